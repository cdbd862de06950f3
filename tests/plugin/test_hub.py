"""`accelerate(...)` on what `from_pretrained` returns."""

import pytest
import torch
from fairseq.models.transformer import TransformerModel
from fairseq.search import PrefixConstrainedBeamSearch
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask

import fairseq_el
from fairseq_el.plugin.accelerate import ELHubInterface
from families import FAMILIES, SMALL, Family, fairseq_generate, make_checkpoint, sentences, task_words, write_data

PLAIN = Family("translation", [], ["--arch", "transformer", *SMALL])


@pytest.fixture
def load(tmp_path):
    def hub(family: Family):
        folder = tmp_path / "data"
        write_data(family, folder)
        make_checkpoint(family, folder)
        return TransformerModel.from_pretrained(str(folder), "model.pt", str(folder))

    return hub


@pytest.mark.parametrize("name", ["m2m-100", "mbart-25"])
def test_translate_finds_what_stocks_command_line_finds(name, load, tmp_path, monkeypatch):
    """Stock's own hub interface raises a TypeError for the first of these tasks."""
    family = FAMILIES[name]
    hub = fairseq_el.accelerate(load(family))
    assert fairseq_el.accelerate(hub) is hub and isinstance(hub, ELHubInterface)
    found = hub.translate(sentences(), beam=3, max_len_b=10)
    words = [
        *task_words(family, tmp_path / "data"), "--path", tmp_path / "data" / "model.pt", "--beam", 3,
        "--max-len-b", 10, "--required-batch-size-multiple", 1, "--cpu",
    ]  # fmt: skip
    monkeypatch.setattr(TranslationFromPretrainedBARTTask, "args", property(lambda task: task.cfg), raising=False)
    expected = fairseq_generate(words, tmp_path / "stock", monkeypatch, stock=True)
    language = {"__de__", "[de_DE]"}
    without_language = [" ".join(word for word in text.split() if word not in language) for text in found]
    assert without_language == [expected[number][0][0] for number in range(len(found))]


@pytest.mark.parametrize("name", ["m2m-100", "mbart-25"])
def test_allowed_tokens_are_obeyed_by_tasks_that_build_their_own_generator(name, load):
    hub = fairseq_el.accelerate(load(FAMILIES[name]))
    tokens = [hub.encode(sentence) for sentence in sentences()]
    generator = hub.task.build_generator(hub.models, hub.cfg.generation)

    def allowed(sentence: int, so_far) -> list[int]:
        return [generator.eos, *range(4 + sentence % 2, 44, 2)]

    found = hub.generate(tokens, beam=2, max_len_b=8, prefix_allowed_tokens_fn=allowed)
    forced = 1 if name == "m2m-100" else 0  # the language
    for sentence, hypotheses in enumerate(found):
        for hypothesis in hypotheses:
            assert set(hypothesis["tokens"][forced:].tolist()) <= set(allowed(sentence, None))


def test_allowed_tokens_give_what_stocks_search_gives(load):
    hub = load(PLAIN)
    tokens = [hub.encode(sentence) for sentence in sentences()]

    def allowed(sentence: int, so_far) -> list[int]:
        return [hub.tgt_dict.eos(), *range(4 + len(so_far) % 2, 44, 2)]

    expected = []
    for row in tokens:
        search = PrefixConstrainedBeamSearch(hub.tgt_dict, allowed)
        stock = SequenceGenerator(hub.models, hub.tgt_dict, beam_size=3, max_len_b=9, search_strategy=search)
        sample = {"net_input": {"src_tokens": row[None], "src_lengths": torch.tensor([row.numel()])}}
        expected.append(stock.generate(hub.models, sample)[0][0]["tokens"].tolist())
    found = fairseq_el.accelerate(hub).generate(tokens, beam=3, max_len_b=9, prefix_allowed_tokens_fn=allowed)
    assert [hypotheses[0]["tokens"].tolist() for hypotheses in found] == expected


@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_prefix_tokens_go_to_the_sentences_they_were_given_for(batch_size, load):
    """Batches are sorted by length, and don't hold all sentences (fairseq issue 4021)."""
    hub = fairseq_el.accelerate(load(PLAIN))
    tokens = [hub.encode(sentence) for sentence in sentences()]
    prefix = torch.tensor([[4 + n, 30 - n] for n in range(len(tokens))])
    alone = [
        hub.generate(row[None], beam=2, max_len_b=8, inference_step_args={"prefix_tokens": prefix[n : n + 1]})[0]
        for n, row in enumerate(tokens)
    ]
    hub.cfg.dataset.batch_size = batch_size
    together = hub.generate(tokens, beam=2, max_len_b=8, inference_step_args={"prefix_tokens": prefix})
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one[0]["tokens"].tolist() == other[0]["tokens"].tolist()
        assert other[0]["tokens"][:2].tolist() == prefix[number].tolist()
