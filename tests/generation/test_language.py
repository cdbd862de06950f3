"""Language models: prompts are prefilled once, in parallel, and the hypotheses are stock fairseq's."""

import argparse
import sys

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

import fairseq_el
from fairseq_el.errors import UserError
from fairseq_el.generation.language import ELLanguageGenerator
from fairseq_el.generation.state import DecodingState
from fairseq_el.kernels import ops
from fairseq_el.kernels.packing import pack
from fairseq_el.models.attention import PromptAttention
from fairseq_el.models.conversion import ELTransformerLanguageModel, has_el_form
from fairseq_el.plugin.tasks import ELLanguageModelingConfig, ELLanguageModelingTask
from helpers import ROOT, assert_same_hypotheses, run_command
from make_checkpoint import make_checkpoint

VOCABULARY = 120
SHAPE = {
    "decoder_layers": 2, "decoder_embed_dim": 64, "decoder_output_dim": 64, "decoder_input_dim": 64,
    "decoder_ffn_embed_dim": 128, "decoder_attention_heads": 2, "share_decoder_input_output_embed": True,
    "tokens_per_sample": 64, "max_target_positions": 64,
}  # fmt: skip
LAYERS, WIDTH = SHAPE["decoder_layers"], SHAPE["decoder_embed_dim"]


@pytest.fixture(scope="module", params=["sinusoidal", "learned"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"lm_{request.param}")
    settings = SHAPE | {"decoder_learned_pos": request.param == "learned"}
    return make_checkpoint("transformer_lm_gpt2_small", folder, vocab=VOCABULARY, settings=settings)


class LanguageSystem:
    """A task with its model: stock fairseq's or ours."""

    def __init__(self, task_class, config_class, paths, **options):
        config = config_class(data=str(paths[0].parent), **options)
        self.task = task_class.setup_task(config)
        self.models, _ = checkpoint_utils.load_model_ensemble([str(p) for p in paths], task=self.task)
        for model in self.models:
            model.float().eval()

    def generate(self, prompts, seed=1, extra=None, **search):
        """The hypotheses for prompts, given as lists of tokens."""
        search = {"max_len_b": 30, **search}
        self.generator = self.task.build_generator(
            self.models, argparse.Namespace(**search), extra_gen_cls_kwargs=extra
        )
        torch.manual_seed(seed)
        return self.task.inference_step(self.generator, self.models, as_sample(prompts))


def as_sample(prompts):
    """As fairseq's data sets collate them: </s> in front, padding behind."""
    longest = max(map(len, prompts)) + 1
    rows = [[2, *prompt] + [1] * (longest - 1 - len(prompt)) for prompt in prompts]
    lengths = torch.tensor([len(prompt) + 1 for prompt in prompts])
    return {"id": torch.arange(len(rows)), "net_input": {"src_tokens": torch.tensor(rows), "src_lengths": lengths}}


@pytest.fixture
def stock(checkpoint):
    return lambda *paths: LanguageSystem(LanguageModelingTask, LanguageModelingConfig, paths or [checkpoint])


@pytest.fixture
def el(checkpoint):
    def build(*paths, **options):
        paths = paths or [checkpoint]
        return LanguageSystem(ELLanguageModelingTask, ELLanguageModelingConfig, paths, **options)

    return build


def random_prompts(*lengths, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


EQUAL, UNEQUAL = random_prompts(9, 9, 9), random_prompts(3, 14, 1, 8)

SEARCHES = {
    "beam": dict(beam=4),
    "greedy": dict(beam=1),
    "length penalty": dict(beam=4, lenpen=2.0),
    "long before short": dict(beam=3, lenpen=0.1),
    "unnormalised": dict(beam=4, unnormalized=True),
    "temperature": dict(beam=3, temperature=1.7),
    "unknown words penalised": dict(beam=3, unkpen=2.5),
    "sampling": dict(beam=3, sampling=True),
    "top-k sampling": dict(beam=2, sampling=True, sampling_topk=5),
    "diverse": dict(beam=4, diverse_beam_groups=2, diverse_beam_strength=0.4),
}


@pytest.mark.parametrize("form", ["always", "never", "auto"])
@pytest.mark.parametrize("prompts", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", SEARCHES)
def test_same_hypotheses_as_stock(stock, el, name, prompts, form):
    ours = el(el_attention=form).generate(prompts, **SEARCHES[name])
    assert_same_hypotheses(ours, stock().generate(prompts, **SEARCHES[name]))


@pytest.mark.parametrize(
    "prompts",
    [[[]], [[], []], [[7]], random_prompts(29, 5), random_prompts(40, 5), [[9, 2, 11]]],
    ids=["empty", "two empty", "one token", "at the limit", "beyond the limit", "closed inside"],
)
@pytest.mark.parametrize("beam", [1, 3])
def test_prompts_at_the_edges(stock, el, prompts, beam):
    assert_same_hypotheses(el().generate(prompts, beam=beam), stock().generate(prompts, beam=beam))


def test_an_empty_prompt_among_others_is_continued_as_it_is_alone(stock, el):
    """In stock fairseq it may end at once: a least length, by default one token, holds there only behind the
    longest prompt of a batch."""
    prompts = random_prompts(0, 5, 12)
    alone = [stock().generate([prompt], beam=3)[0] for prompt in prompts]
    assert_same_hypotheses(el().generate(prompts, beam=3), alone)


def test_a_least_length_counts_the_prompt_as_in_stock(stock, el):
    settings = dict(beam=3, min_len=25)
    assert_same_hypotheses(el().generate(EQUAL, **settings), stock().generate(EQUAL, **settings))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("precision", ["auto", "fp32"])
@pytest.mark.parametrize("form", ["always", "never"])
def test_same_hypotheses_with_every_exact_precision(stock, el, form, precision, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(ops, "supported", lambda x, width: False)
    system = el(el_attention=form)
    pack(system.models[0], precision)
    assert_same_hypotheses(system.generate(UNEQUAL, beam=4), stock().generate(UNEQUAL, beam=4))


def test_ensembles(stock, el, checkpoint, tmp_path):
    other = make_checkpoint(
        "transformer_lm_gpt2_small", tmp_path, vocab=VOCABULARY, seed=2,
        settings=SHAPE | {"decoder_learned_pos": "learned" in str(checkpoint)},
    )  # fmt: skip
    ours, theirs = el(checkpoint, other), stock(checkpoint, other)
    assert_same_hypotheses(ours.generate(UNEQUAL, beam=3), theirs.generate(UNEQUAL, beam=3))


@pytest.mark.parametrize("search", [dict(beam=4), dict(beam=1)], ids=["beam", "greedy"])
def test_results_do_not_depend_on_what_else_is_in_the_batch(el, search):
    system = el(max_new_tokens=12)
    together = system.generate(UNEQUAL, **search)
    alone = [system.generate([prompt], **search)[0] for prompt in UNEQUAL]
    assert_same_hypotheses(together, alone)


@pytest.mark.parametrize("search", [dict(beam=4), dict(beam=2, sampling=True)], ids=["behind", "through"])
def test_new_tokens_are_counted_from_the_end_of_each_prompt(el, search):
    hypotheses = el(max_new_tokens=7).generate(UNEQUAL, min_len=64, max_len_b=1, **search)
    for prompt, found in zip(UNEQUAL, hypotheses):
        assert all(len(h["tokens"]) <= len(prompt) + 8 for h in found)
        assert all(h["tokens"][: len(prompt)].tolist() == prompt for h in found)
    longest = [max(len(h["tokens"]) for h in found) for found in hypotheses]
    assert longest == [len(prompt) + 8 for prompt in UNEQUAL]


def test_the_prompt_is_prefilled_once_per_sentence_and_not_per_beam(el, monkeypatch):
    rows = []
    prefill = PromptAttention.prefill

    def counting(self, query, prompts):
        rows.append(query.shape[:2])
        return prefill(self, query, prompts)

    monkeypatch.setattr(PromptAttention, "prefill", counting)
    system = el()
    steps = []
    system.models[0].decoder.register_forward_hook(lambda module, args, out: steps.append(args[0].shape))
    system.generate(EQUAL, beam=4, max_len_b=20)
    assert rows == [(9, 3)] * LAYERS
    assert len(steps) <= 20 + 1 - 9


@pytest.mark.parametrize("beam", [1, 4])
def test_always_keeps_half_of_keys_and_values_whatever_the_beam(el, beam):
    sizes = {}
    for form in ("always", "never"):
        system = el(el_attention=form)
        system.generate(EQUAL, beam=beam)
        sizes[form] = system.generator.profile.peak_source_bytes
    mask = len(EQUAL) * len(EQUAL[0])
    assert sizes["always"] == LAYERS * mask * WIDTH * 4 + mask
    assert sizes["never"] == 2 * LAYERS * mask * WIDTH * 4 + mask


@pytest.mark.parametrize("budget", ["0", "12K", "100K", "180K", "330K", "400K"])
@pytest.mark.parametrize("form", ["auto", "never"])
def test_a_memory_budget_is_kept_and_changes_no_hypothesis(stock, el, form, budget):
    system = el(el_attention=form, el_memory_budget=budget)
    assert_same_hypotheses(system.generate(UNEQUAL, beam=2), stock().generate(UNEQUAL, beam=2))
    profile = system.generator.profile
    if budget not in ("0", "12K"):  # a single sentence needs more
        assert profile.peak_source_bytes + profile.peak_beam_bytes <= int(budget[:-1]) * 1024


def test_layers_without_room_switch_once_finished_sentences_make_some(stock, el, monkeypatch):
    built = []
    build = PromptAttention.build_key_values
    monkeypatch.setattr(
        PromptAttention, "build_key_values", lambda self, x: built.append(x.size(0)) or build(self, x)
    )
    prompts = random_prompts(30, 4, 4, 4)  # the first must end after four tokens
    ours = el(el_attention="never", el_memory_budget="355K").generate(prompts, beam=2, max_len_b=34)
    assert_same_hypotheses(ours, stock().generate(prompts, beam=2, max_len_b=34))
    assert built == [3]


def test_a_prompt_without_room_for_output_is_an_error_that_names_the_way_out(el):
    with pytest.raises(UserError, match="--truncate-prompt") as error:
        el(max_new_tokens=20).generate(random_prompts(50))
    assert "\n" not in str(error.value)


def test_truncation_keeps_the_end_of_the_prompt(el):
    prompts = random_prompts(60, 10)
    found = el(max_new_tokens=20, truncate_prompt=True).generate(prompts, beam=2)
    kept = 64 - 1 - 20
    same = el(max_new_tokens=20).generate([prompts[0][-kept:], prompts[1]], beam=2)
    assert_same_hypotheses(found, same)


def test_blocked_ngrams_include_those_of_the_prompt(el):
    prompts = [[5, 6, 7, 8, 9, 5, 6], random_prompts(3)[0]]
    for search in (dict(beam=3), dict(beam=3, sampling=True)):
        system = el(max_new_tokens=40)
        found = system.generate(prompts, no_repeat_ngram_size=3, **search)
        for prompt, hypotheses in zip(prompts, found):
            for hypothesis in hypotheses:
                text = hypothesis["tokens"].tolist()
                grams = [tuple(text[i : i + 3]) for i in range(len(text) - 2)]
                new = grams[max(len(prompt) - 2, 0) :]
                assert len(set(grams)) == len(grams), (prompt, text)
                assert new


def test_stock_checkpoints_load_unchanged_into_the_el_architecture(checkpoint, el):
    model = el().models[0]
    assert type(model) is ELTransformerLanguageModel
    saved = fairseq_el.checkpoints.loading.load(checkpoint)["model"]
    state = model.state_dict()
    assert saved.keys() == {name for name in state if "version" not in name or name in saved}
    assert all(torch.equal(state[name].half(), saved[name].half()) for name in saved)


def test_accelerate_serves_what_from_pretrained_returns(checkpoint):
    folder = str(checkpoint.parent)
    plain = TransformerLanguageModel.from_pretrained(folder, "model.pt", data_name_or_path=folder)
    tokens = torch.tensor([2, 7, 9, 11])
    expected = plain.generate(tokens, beam=3, max_len_b=20)
    hub = fairseq_el.accelerate(
        TransformerLanguageModel.from_pretrained(folder, "model.pt", data_name_or_path=folder)
    )
    found = hub.generate(tokens, beam=3, max_len_b=20)
    assert_same_hypotheses([found], [expected])


def test_positions_that_are_not_fairseqs_own_have_no_el_form(stock):
    """Each row of a step has a position of its own, which only known embeddings can give it."""
    model = stock().models[0]
    assert has_el_form(model)
    positions = model.decoder.embed_positions
    positions.__class__ = type("UsersPositions", (type(positions),), {})
    assert not has_el_form(model)


def test_two_generators_on_one_model_keep_nothing_for_each_other(el, stock):
    system = el()
    first = system.generate(UNEQUAL, beam=4)
    system.generate(EQUAL, beam=1)
    assert_same_hypotheses(system.generate(UNEQUAL, beam=4), first)
    assert isinstance(system.generator, ELLanguageGenerator)
    assert vars(system.generator.state) == vars(DecodingState())


def test_the_command_line_of_stock_fairseq_with_one_option_more(tmp_path):
    folder = tmp_path / "gpt2"
    shrink = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
    made = run_command(
        sys.executable, ROOT / "scripts" / "make_checkpoint.py", "--output", folder,
        "--arch", "transformer_lm_gpt2_small",
        "--vocab", VOCABULARY, "--sentences", 4, "--source-length", 12, *shrink,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    command = [
        "fairseq-generate", folder, "--task", "language_modeling", "--path", folder / "model.pt",
        "--sample-break-mode", "eos", "--beam", 3, "--max-len-b", 30, "--required-batch-size-multiple", 1,
    ]  # fmt: skip
    ours = run_command(*command, "--user-dir", ROOT / "fairseq_el", "--el-profile", "--batch-size", 4)
    assert ours.returncode == 0, ours.stderr
    lines = [line for line in ours.stdout.splitlines() if line.startswith("H-")]
    assert len(lines) == 4
    assert "prefill" in ours.stderr and "sentences/s" in ours.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["always", "never", "auto"])
def test_same_hypotheses_on_a_gpu(stock, el, form):
    expected = stock().generate(UNEQUAL, beam=4)
    system = el(el_attention=form)
    system.models[0].cuda()
    generator = system.task.build_generator(system.models, argparse.Namespace(beam=4, max_len_b=30))
    sample = as_sample(UNEQUAL)
    sample["net_input"] = {name: value.cuda() for name, value in sample["net_input"].items()}
    found = system.task.inference_step(generator, system.models, sample)
    for mine, other in zip(found, expected):
        assert [h["tokens"].tolist() for h in mine] == [h["tokens"].tolist() for h in other]
