"""`accelerate(...)` on what `from_pretrained` returns."""

import pytest
import torch
from fairseq.models.bart import BARTModel
from fairseq.models.speech_to_text import XMTransformerModel
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask

import fairseq_el
from fairseq_el.generation.generator import ELSequenceGenerator
from fairseq_el.plugin.accelerate import ELHubInterface
from families import (
    FAMILIES,
    SMALL,
    Family,
    fairseq_generate,
    make_checkpoint,
    sentences,
    task_words,
    use_stock_tasks,
    write_data,
)

PLAIN = Family("translation", [], ["--arch", "transformer", *SMALL])
BART = Family("translation", [], ["--arch", "bart_base", *SMALL, "--share-all-embeddings"])


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Makes a model, and gives what `from_pretrained` of a class returns for it."""
    folder = tmp_path / "data"

    def hub(family: Family, kind=TransformerModel, stock: bool = False, **options):
        if not folder.exists():
            write_data(family, folder)
            make_checkpoint(family, folder)
        with monkeypatch.context() as patch:
            if stock:
                use_stock_tasks(patch)
            return kind.from_pretrained(str(folder), "model.pt", str(folder), **options)

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


def every_other_word(sentence: int, so_far) -> list[int]:
    """And <s>, with which BART begins."""
    return [0, 2, *range(4 + (sentence + len(so_far)) % 3, 44, 3)]


def of_sentence(number: int):
    """For a sentence that is generated alone."""
    return lambda _, so_far: every_other_word(number, so_far)


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize(
    "family, kind",
    [(PLAIN, TransformerModel), (BART, BARTModel), (FAMILIES["denoising"], BARTModel)],
    ids=["transformer", "bart", "denoising"],
)
def test_allowed_tokens_give_what_stock_gives_for_each_sentence_alone(family, kind, batch_size, load):
    """Of several sentences, stock's interface of BART calls the function with the wrong numbers."""
    stock = load(family, kind, stock=True, bpe=None)
    tokens = [torch.cat([torch.tensor([0]), stock.binarize(sentence)[-9:]]) for sentence in sentences()]
    search = {"beam": 3, "max_len_b": 9}
    alone = [
        stock.generate([row], **search, prefix_allowed_tokens_fn=of_sentence(number))[0]
        for number, row in enumerate(tokens)
    ]
    expected = [hypotheses[0]["tokens"].tolist() for hypotheses in alone]
    hub = fairseq_el.accelerate(load(family, kind, bpe=None))
    hub.cfg.dataset.batch_size = batch_size
    found = hub.generate(tokens, **search, prefix_allowed_tokens_fn=every_other_word)
    assert [hypotheses[0]["tokens"].tolist() for hypotheses in found] == expected
    [best, *_] = hub.generate(tokens[4], **search, prefix_allowed_tokens_fn=of_sentence(4))
    assert best["tokens"].tolist() == expected[4]


def test_sample_passes_allowed_tokens_on(load):
    hub = fairseq_el.accelerate(load(PLAIN))
    tokens = [hub.encode(sentence) for sentence in sentences()]
    search = {"beam": 2, "max_len_b": 8, "prefix_allowed_tokens_fn": every_other_word}
    expected = [hub.decode(found[0]["tokens"]) for found in hub.generate(tokens, **search)]
    assert hub.sample(sentences(), **search) == hub.translate(sentences(), **search) == expected
    assert expected != hub.sample(sentences(), beam=2, max_len_b=8)


def test_speech_is_recognised_as_stock_does(load, tmp_path):
    family = FAMILIES["xm_transformer"]
    stock = load(family, XMTransformerModel, stock=True, freeze_regex=None)
    hub = fairseq_el.accelerate(load(family, XMTransformerModel))
    assert type(hub.generator) is ELSequenceGenerator and type(stock.generator) is SequenceGenerator
    noise = torch.Generator().manual_seed(2)
    for length in (1500, 2600, 4000):
        waveform = torch.randn(1, length, generator=noise)
        texts = {}
        for name, interface in (("ours", hub), ("stock", stock)):
            interface.task.data_cfg.config["hub"] = {"input_type": "waveform"}
            interface.generator.max_len_b = 12
            texts[name] = interface.predict(waveform)
        assert texts["ours"] == texts["stock"] and texts["ours"]


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
