"""Hugging Face folders become fairseq checkpoints that say the same, and BART goes back."""
# Over 400 lines: both directions of converting share its models.

import json
import shlex
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe import GPT2BPE
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf
from safetensors import safe_open

from fairseq_el.checkpoints import loading
from fairseq_el.cli.convert import convert, convert_back
from fairseq_el.cli.main import main
from fairseq_el.errors import UserError
from helpers import run_command
from hf_models import (
    GPT2_ROWS,
    MASK_ROW,
    PIECES,
    TEXTS,
    bart,
    far_below_zero,
    gpt2,
    save,
    without_biases,
    write_tokenizer,
)

transformers = pytest.importorskip("transformers")

MODELS = {
    "gpt2": gpt2,
    "gpt2, logits far below zero": lambda: far_below_zero(gpt2()),
    "gpt2, no biases": lambda: without_biases(gpt2()),
    "gpt2, untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt2, other inner size and activation": lambda: gpt2(n_inner=40, activation_function="relu"),
    "bart": bart,  # as those for summaries: without a row of <mask>
    "bart, with a row of <mask>": lambda: bart(vocab_size=MASK_ROW + 1),
    "bart, untied": lambda: bart(tie_word_embeddings=False),
    "bart, scaled embeddings": lambda: bart(scale_embedding=True, activation_function="relu"),
    "bart, padded beyond its names": lambda: bart(vocab_size=MASK_ROW + 3),
}
GPT2_MODELS, BART_MODELS = ([m for m in MODELS if m.startswith(kind)] for kind in ("gpt2", "bart"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Models with their Hugging Face folder and the checkpoint made of it, each once."""
    known = {}

    def make(name: str, stored: torch.dtype = torch.float32, dtype: torch.dtype | None = None) -> Namespace:
        if (name, stored, dtype) not in known:
            folder, model = tmp_path_factory.mktemp("model"), MODELS[name]().to(stored)
            source = save(model, folder / "hf")
            path = convert(source, folder / "fairseq", dtype)
            known[name, stored, dtype] = Namespace(model=model, source=source, path=path)
        return known[name, stored, dtype]

    return make


def load_with_stock_fairseq(path: Path):
    if (path.parent / "dict.source.txt").exists():
        config = TranslationConfig(
            data=str(path.parent), source_lang="source", target_lang="target", train_subset="train",
            dataset_impl=None, required_seq_len_multiple=1,
        )  # fmt: skip
        task = TranslationTask.setup_task(OmegaConf.structured(config))
    else:
        config = LanguageModelingConfig(data=str(path.parent))
        task = LanguageModelingTask.setup_task(OmegaConf.structured(config))
        task.args = Namespace(add_bos_token=False)
    [model], _ = checkpoint_utils.load_model_ensemble([str(path)], task=task)
    return model.eval(), task


def rows_of(task) -> torch.Tensor:
    """The row in fairseq of each of GPT-2's tokens."""
    dictionary = task.source_dictionary
    rows = [dictionary.index(str(number)) for number in range(GPT2_ROWS - 1)] + [dictionary.eos()]
    assert dictionary.unk() not in rows
    return torch.tensor(rows)


def random_tokens(*shape: int, first: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randint(first, GPT2_ROWS, shape, generator=torch.Generator().manual_seed(seed))


def assert_equal_weights(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.dtype == theirs[name].dtype, name
        assert torch.equal(weight, theirs[name]), name


# --- GPT-2 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPT2_MODELS)
def test_gpt2_has_the_logits_and_probabilities_it_has_in_transformers(made, name):
    original = made(name).model
    model, task = load_with_stock_fairseq(made(name).path)
    assert type(model) is TransformerLanguageModel
    tokens, rows = random_tokens(3, 40, first=0), rows_of(task)
    with torch.no_grad():
        expected = original(input_ids=tokens).logits
        found, extra = model(rows[tokens])
        probabilities = model.get_normalized_probs((found, extra), log_probs=True)
    assert expected.std() > 1
    assert (expected.max() < -30) == ("far below" in name)
    torch.testing.assert_close(found[..., rows], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(probabilities[..., rows], expected.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "gpt2, logits far below zero", "gpt2, no biases"])
@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_what_gpt2_lacks_has_no_probability_in_half_precision_either(made, name, dtype):
    model, task = load_with_stock_fairseq(made(name, dtype=dtype).path)
    if "no biases" not in name or dtype == torch.float16:
        model.half().float()  # as --fp16 does to checkpoints in single precision
    with torch.no_grad():
        probabilities = model.get_normalized_probs(model(random_tokens(20, 40)), log_probs=False)
    dictionary = task.source_dictionary
    lacking = [dictionary.bos(), dictionary.pad(), dictionary.unk()]
    assert probabilities[..., lacking].max() < 1e-15
    assert probabilities.isfinite().all()


def test_padding_in_front_of_a_prompt_changes_nothing(made):
    model, task = load_with_stock_fairseq(made("gpt2").path)
    tokens = random_tokens(2, 20)
    padded = torch.nn.functional.pad(tokens, (5, 0), value=task.source_dictionary.pad())
    with torch.no_grad():
        found, expected = (model(given)[0][:, -20:, 4:] for given in (padded, tokens))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def fairseq_greedy(model, task, prompt: list[int], length: int) -> list[int]:
    """What stock fairseq appends to the prompt, without the end of sentence it is stopped with."""
    dictionary = task.source_dictionary
    generator = SequenceGenerator([model], dictionary, beam_size=1, max_len_b=len(prompt) + length)
    source = torch.tensor([[dictionary.eos(), *prompt]])
    sample = {"id": torch.tensor([0]), "net_input": {"src_tokens": source}}
    sample["net_input"]["src_lengths"] = torch.tensor([source.size(1)])
    [[best]] = task.inference_step(generator, [model], sample)
    return best["tokens"].tolist()[len(prompt) : -1]


@pytest.mark.parametrize("name", ["gpt2", "gpt2, logits far below zero"])
def test_gpt2_writes_greedily_what_it_writes_in_transformers(made, name):
    model, task = load_with_stock_fairseq(made(name).path)
    rows, end = rows_of(task), GPT2_ROWS - 1
    for seed in range(3):
        prompt = random_tokens(6, first=0, seed=seed)
        asked = torch.cat([torch.tensor([end]), prompt])[None]
        with torch.no_grad():
            written = made(name).model.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=25, do_sample=False,
                pad_token_id=end,
            )[0, asked.size(1) :]  # fmt: skip
        expected = [token for token in written.tolist() if token != end]
        assert len(set(expected)) > 3
        ours = fairseq_greedy(model, task, rows[prompt].tolist(), 25)
        assert ours == rows[torch.tensor(expected)].tolist()


def without_head(folder: Path) -> None:
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    model.transformer.save_pretrained(folder)


def in_shards(folder: Path) -> None:
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def pickled(folder: Path, is_zip: bool = True) -> None:
    """As the first releases were: with the output's table and causal masks."""
    weights = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
    mask = torch.ones(40, 40, dtype=torch.uint8).tril().view(1, 1, 40, 40)
    for number in range(3):
        weights[f"transformer.h.{number}.attn.bias"] = mask
        weights[f"transformer.h.{number}.attn.masked_bias"] = torch.tensor(-1e4)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)


def vocabulary_in_one_file(folder: Path) -> None:
    transformers.GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()


LAYOUTS = {
    "without a head": without_head,
    "in shards": in_shards,
    "pickled": pickled,
    "pickled before torch 1.6": lambda folder: pickled(folder, is_zip=False),
    "tokenizer.json": vocabulary_in_one_file,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_folder_gives_the_same_checkpoint(made, tmp_path, layout):
    usual = made("gpt2")
    folder = shutil.copytree(usual.source, tmp_path / "hf")
    LAYOUTS[layout](folder)
    path = convert(folder, tmp_path / "fairseq")
    assert_equal_weights(loading.load(path)["model"], loading.load(usual.path)["model"])
    for name in ("dict.txt", "vocab.bpe"):
        assert (path.parent / name).read_bytes() == (usual.path.parent / name).read_bytes()
    encoder = json.loads((path.parent / "encoder.json").read_text())
    assert sorted(encoder, key=encoder.get) == PIECES


# --- BART ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BART_MODELS)
def test_bart_has_the_logits_it_has_in_transformers(made, name):
    model, task = load_with_stock_fairseq(made(name).path)
    source, target = random_tokens(3, 40), random_tokens(3, 12, seed=2)
    source[0, 30:] = source[1, 20:] = task.source_dictionary.pad()
    with torch.no_grad():
        attention_mask = source.ne(task.source_dictionary.pad())
        expected = (
            made(name).model(input_ids=source, attention_mask=attention_mask, decoder_input_ids=target).logits
        )
        found, _ = model(source, torch.tensor([30, 20, 40]), target)
    assert expected.std() > 1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_bart_of_2020_gives_the_same_checkpoint(made, tmp_path):
    """Pickled, as the bare model, with every tied table written out."""
    usual = made("bart")
    folder = shutil.copytree(usual.source, tmp_path / "hf")
    weights = {name.removeprefix("model."): weight for name, weight in usual.model.state_dict().items()}
    weights["encoder.version"] = torch.tensor([3.0])
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    path = convert(folder, tmp_path / "fairseq")
    assert_equal_weights(loading.load(path)["model"], loading.load(usual.path)["model"])


def test_bart_writes_greedily_what_it_writes_in_transformers(made):
    model, task = load_with_stock_fairseq(made("bart").path)
    source = random_tokens(4, 30)
    with torch.no_grad():
        written = made("bart").model.generate(
            source, attention_mask=torch.ones_like(source), max_new_tokens=20, do_sample=False,
            num_beams=1, forced_eos_token_id=None,
        )  # fmt: skip
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=1, max_len_b=20)
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((4,), 30)}}
    for [ours], theirs in zip(generator.generate([model], sample), written, strict=True):
        expected = [token for token in theirs.tolist()[1:] if token > 2]
        assert len(set(expected)) > 3
        assert ours["tokens"].tolist()[:-1] == expected


# --- text ----------------------------------------------------------------------------------------


def gpt2_bpe(folder: Path) -> GPT2BPE:
    return GPT2BPE(
        Namespace(gpt2_encoder_json=str(folder / "encoder.json"), gpt2_vocab_bpe=str(folder / "vocab.bpe"))
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_text_gets_the_tokens_it_has_in_transformers_and_comes_back_the_same(made, name, text):
    folder = made(name).path.parent
    tokenizer = {"gpt2": transformers.GPT2Tokenizer, "bart": transformers.BartTokenizer}[name]
    expected = tokenizer.from_pretrained(made(name).source)(text, add_special_tokens=False)["input_ids"]
    bpe, dictionary = gpt2_bpe(folder), Dictionary.load(str(folder / "dict.txt"))
    tokens = dictionary.encode_line(bpe.encode(text), append_eos=False, add_if_not_exist=False)
    assert bpe.decode(dictionary.string(tokens)) == text
    if name == "bart":
        assert tokens.tolist() == expected
    else:
        assert [int(dictionary[token]) for token in tokens] == expected


def test_barts_dictionary_keeps_the_place_of_entries_that_are_no_pieces(made):
    folder = made("bart, padded beyond its names").path.parent
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    assert len(dictionary) == MASK_ROW + 3
    names = ["madeupword0000", "madeupword0001", "<mask>", "madeupword0002", "madeupword0003"]
    assert dictionary.symbols[-5:] == names
    for name in ("dict.source.txt", "dict.target.txt"):
        assert (folder / name).read_bytes() == (folder / "dict.txt").read_bytes()


# --- BART, there and back ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("bart", torch.float16),
        ("bart", torch.float32),
        ("bart, with a row of <mask>", torch.float32),
        ("bart, untied", torch.float32),
    ],
)
def test_bart_comes_back_bit_for_bit(made, tmp_path, name, dtype):
    original = made(name, dtype).model
    convert_back(made(name, dtype).path.parent, tmp_path)
    back = transformers.BartForConditionalGeneration.from_pretrained(tmp_path)
    expected = original.state_dict()
    if "untied" in name:  # then nothing uses this table
        expected["model.shared.weight"] = expected["model.encoder.embed_tokens.weight"]
    assert_equal_weights(back.state_dict(), expected)
    for setting in (
        "encoder_layers", "decoder_ffn_dim", "decoder_attention_heads", "vocab_size", "dropout",
        "max_position_embeddings", "tie_word_embeddings", "scale_embedding", "activation_function",
    ):  # fmt: skip
        assert getattr(back.config, setting) == getattr(original.config, setting), setting
    assert back.generation_config.forced_eos_token_id == 2


def test_barts_vocabulary_comes_back_the_same(made, tmp_path):
    convert_back(made("bart").path, tmp_path)
    source = made("bart").source
    there, here = (json.loads((folder / "vocab.json").read_text()) for folder in (source, tmp_path))
    assert here == there
    assert (tmp_path / "merges.txt").read_bytes() == (source / "merges.txt").read_bytes()
    tokenizers = [transformers.BartTokenizer.from_pretrained(folder) for folder in (source, tmp_path)]
    for text in [*TEXTS, "in the <mask> cat"]:
        there, here = (tokenizer(text)["input_ids"] for tokenizer in tokenizers)
        assert here == there


def test_tied_tables_are_stored_once_on_both_sides(made, tmp_path):
    with safe_open(convert_back(made("bart").path, tmp_path), "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
    assert [name for name, shape in shapes.items() if shape == [MASK_ROW, 32]] == ["model.shared.weight"]
    weights = loading.load(made("bart").path)["model"]
    inputs = {weights[f"{side}.embed_tokens.weight"].data_ptr() for side in ("encoder", "decoder")}
    assert inputs == {weights["decoder.output_projection.weight"].data_ptr()}


def test_a_checkpoint_of_2019_with_a_row_of_mask_that_its_dictionary_lacks_goes_back(made, tmp_path):
    """The first BART: <mask> is no entry of dict.txt, and the file has no output projection."""
    name = "bart, with a row of <mask>"
    folder = shutil.copytree(made(name).path.parent, tmp_path / "fairseq")
    state = loading.load(folder / "model.pt")
    del state["model"]["decoder.output_projection.weight"]
    state["args"], state["cfg"] = state["cfg"]["model"], None
    torch.save(state, folder / "model.pt", _use_new_zipfile_serialization=False)
    for dictionary in folder.glob("dict*.txt"):
        dictionary.write_text(dictionary.read_text().removesuffix("<mask> 1\n"))
    back = convert_back(folder, tmp_path / "back").parent
    model = transformers.BartForConditionalGeneration.from_pretrained(back)
    assert_equal_weights(model.state_dict(), made(name).model.state_dict())
    assert json.loads((back / "vocab.json").read_text())["<mask>"] == MASK_ROW


# --- refusals ------------------------------------------------------------------------------------


def change_config(**changes):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        kept = {name: value for name, value in {**config, **changes}.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def change_weights(**changes):
    def change(folder: Path) -> None:
        weights = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
        (folder / "model.safetensors").unlink()
        weights |= {name.replace("__", "."): value for name, value in changes.items()}
        torch.save({k: v for k, v in weights.items() if v is not None}, folder / "pytorch_model.bin")

    return change


def cut_short(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def lose_a_shard(folder: Path) -> None:
    in_shards(folder)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def smuggle_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weights": subprocess.run}, folder / "pytorch_model.bin")


GPT2_MISTAKES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
    "config cut": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "other model": (change_config(model_type="t5"), "type 't5', which fairseq has no counterpart for: use one of"),
    "no sizes": (change_config(n_embd="absent"), "config.json does not say n_embd"),
    "other sizes": (change_config(n_embd=64), r"wte.weight is of shape \[270, 32\], but \[270, 64\]"),
    "more layers": (change_config(n_layer=4), "weights lack h.3.ln_1.weight"),
    "fewer layers": (change_config(n_layer=2), "12 weights .* such as h.2.attn.c_attn.bias"),
    "attention scaled": (change_config(scale_attn_by_inverse_layer_idx=True), "can only express"),
    "other epsilon": (change_config(layer_norm_epsilon=1e-6), "layer_norm_epsilon = 1e-06"),
    "activation": (change_config(activation_function="mish"), "no activation function 'mish'"),
    "several ends": (change_config(eos_token_id=[1, 2]), r"eos_token_id is \[1, 2\]"),
    "two tables": (change_weights(lm_head__weight=torch.ones(GPT2_ROWS, 32)), "tie_word_embeddings"),
    "a head": (change_weights(multiple_choice_head=torch.ones(1)), "multiple_choice_head"),
    "no gain": (change_weights(transformer__ln_f__weight=torch.zeros(32)), "ln_f"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights, neither"),
    "cut short": (cut_short, "model.safetensors is not a complete checkpoint"),
    "a shard lost": (lose_a_shard, "model-00002-of-.* does not exist"),
    "code": (smuggle_code, "pytorch_model.bin was refused and nothing in it was run"),
    "no vocabulary": (lambda folder: (folder / "vocab.json").unlink(), "vocab.json does not exist"),
    "no merges": (lambda folder: (folder / "merges.txt").unlink(), "merges.txt does not exist"),
    "more pieces": (lambda folder: write_tokenizer(folder, [*PIECES, "more"]), "'more' as number 270, but"),
    "merges": (lambda folder: (folder / "merges.txt").write_text("#version\na b c\n"), "two pieces belong"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", GPT2_MISTAKES)
def test_a_folder_that_cannot_be_converted_is_refused_in_one_line(made, tmp_path, mistake):
    folder = shutil.copytree(made("gpt2").source, tmp_path / "hf")
    spoil, message = GPT2_MISTAKES[mistake]
    spoil(folder)
    with pytest.raises(UserError, match=message) as refused:
        convert(folder, tmp_path / "fairseq")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "fairseq").exists()


BART_MISTAKES = {
    "logits with a bias": (lambda model: model.final_logits_bias.fill_(0.5), "adds no bias to its logits"),
    "another start": (
        lambda model: setattr(model.config, "decoder_start_token_id", 0), "decoder_start_token_id = 0",
    ),
    "pre-norm": (lambda model: setattr(model.config, "normalize_before", True), "normalize_before = True"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BART_MISTAKES)
def test_a_bart_that_fairseq_cannot_express_is_refused(tmp_path, mistake):
    model = bart()
    spoil, message = BART_MISTAKES[mistake]
    spoil(model)
    with pytest.raises(UserError, match=message):
        convert(save(model, tmp_path / "hf"), tmp_path / "fairseq")


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
    folder = save(bart(), tmp_path / "hf")
    write_tokenizer(folder, PIECES)
    with pytest.raises(UserError, match="'!' as number 0, where BART's has <s>"):
        convert(folder, tmp_path / "fairseq")


def edit(name: str, function):
    def change(folder: Path) -> None:
        (folder / name).write_text(function((folder / name).read_text()))

    return change


BACK_MISTAKES = {
    "no checkpoint": (lambda folder: (folder / "model.pt").unlink(), "model.pt does not exist"),
    "no encoder": (lambda folder: (folder / "encoder.json").unlink(), "encoder.json does not exist"),
    "no merges": (lambda folder: (folder / "vocab.bpe").unlink(), "vocab.bpe does not exist"),
    "languages": (edit("dict.target.txt", lambda text: text + "new 1\n"), "dict.target.txt are different"),
    "encoder": (edit("encoder.json", lambda text: '{"a": 1}'), "entry 0, which encoder.json does not"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BACK_MISTAKES)
def test_a_fairseq_folder_that_cannot_go_back_is_refused_in_one_line(made, tmp_path, mistake):
    folder = shutil.copytree(made("bart").path.parent, tmp_path / "fairseq")
    spoil, message = BACK_MISTAKES[mistake]
    spoil(folder)
    with pytest.raises(UserError, match=message) as refused:
        convert_back(folder, tmp_path / "back")
    assert "\n" not in str(refused.value)


def test_a_language_model_has_no_way_back(made, tmp_path):
    with pytest.raises(UserError, match="has no encoder, which Transformers' BART cannot express"):
        convert_back(made("gpt2").path, tmp_path / "back")


# --- command line --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_the_suggested_command_runs_on_the_folder(made, tmp_path, monkeypatch, capsys, name):
    output = tmp_path / "a folder"
    main(["convert", str(made(name).source), str(output)])
    suggestion = capsys.readouterr().out.splitlines()[-1].removeprefix("try: ")
    generated = run_command(*shlex.split(suggestion), input="the cat\n")
    assert generated.returncode == 0, generated.stderr
    [text] = [line for line in generated.stdout.split("\n") if line.startswith("D-0")]
    assert name == "bart" or text.split("\t")[2].startswith("the cat")


def test_the_script_runs_from_anywhere_and_says_only_what_it_did(made, tmp_path):
    done = run_command(
        sys.executable, "-m", "fairseq_el", "convert", "--reverse", made("bart").path, "out",
        "--precision", "fp16", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("wrote out/model.safetensors (0.1 MB) and its")
    model = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_a_mistake_on_the_command_line_is_answered_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "none"), str(tmp_path)])
    expected = f"convert: error: {tmp_path / 'none' / 'config.json'} does not exist: put the model's"
    assert str(ended.value).startswith(expected)
    assert "\n" not in str(ended.value)
