"""EL models are stock models in all but the way they generate."""

import copy
import sys
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.bart import BARTModel
from fairseq.models.lstm import LSTMModel, base_architecture
from fairseq.sequence_generator import SequenceGenerator

import fairseq_el
from fairseq_el.errors import UserError
from fairseq_el.generation.generator import ELSequenceGenerator
from fairseq_el.kernels.linear import PackedLinear
from fairseq_el.models.attention import ELAttention
from fairseq_el.models.conversion import is_accelerated
from helpers import DEMO, assert_same_hypotheses, run_command


@pytest.mark.parametrize("family", ["transformer", "bart", "transformer_lm"])
def test_every_stock_architecture_has_an_el_twin_with_its_defaults(family):
    for name in ARCH_MODEL_INV_REGISTRY[family]:
        if name.startswith("el_"):
            continue
        if name != "transformer_lm":  # whose defaults are those of its data class, which the twin has too
            assert ARCH_CONFIG_REGISTRY["el_" + name] is ARCH_CONFIG_REGISTRY[name]
        assert issubclass(ARCH_MODEL_REGISTRY["el_" + name], ARCH_MODEL_REGISTRY[name])


def test_a_stock_checkpoint_becomes_an_el_model_with_the_same_state_dict(stock, el):
    theirs, ours = stock().models[0].state_dict(), el().models[0].state_dict()
    assert is_accelerated(el().models[0])
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_state_dicts_go_both_ways(stock, el):
    one, other = el().models[0], stock().models[0]
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_training_is_stock_training(stock, el):
    """The same loss and the same gradients."""
    losses, gradients = [], []
    for system in (stock(), el()):
        model = system.models[0].train()
        for module in model.modules():
            if hasattr(module, "p"):
                module.p = 0.0  # dropout would draw different numbers
        sample = next(iter(system.batches(8)))
        out, _ = model(**sample["net_input"])
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), sample["target"].flatten())
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_accelerate_works_in_place_and_twice(stock, el):
    system = stock()
    model = system.models[0]
    assert fairseq_el.accelerate(model) is model
    assert fairseq_el.accelerate(model) is model
    assert isinstance(model.decoder.layers[0].encoder_attn, ELAttention)
    ours = el()
    ours.models = [model]
    assert_same_hypotheses(ours.generate(beam=4), stock().generate(beam=4))


def test_accelerate_clears_what_an_earlier_stock_search_left_on_the_model(stock):
    """Stock fairseq leaves the beam size there; its own greedy search then goes wrong."""
    system = stock()
    system.generate(beam=4)
    fairseq_el.accelerate(system.models[0])
    assert_same_hypotheses(system.generate(beam=1), stock().generate(beam=1))


def test_accelerate_names_an_architecture_that_has_no_el_form(el):
    with pytest.raises(UserError, match=r"LSTMModel has no EL form .* stock fairseq"):
        fairseq_el.accelerate(LSTMModel.build_model(lstm_settings(), el().task))


def lstm_settings() -> Namespace:
    settings = Namespace(encoder_embed_dim=8, decoder_embed_dim=8, criterion="cross_entropy")
    base_architecture(settings)
    return settings


def test_what_from_pretrained_returns_can_be_accelerated(demo_data, stock):
    """`BARTModel.from_pretrained` and `bart.sample` go on working, and use our generator."""
    hub = BARTModel.from_pretrained(
        str(DEMO), data_name_or_path=str(demo_data), bpe="sentencepiece",
        sentencepiece_model=str(DEMO / "sentencepiece.model"),
    )  # fmt: skip
    texts = (DEMO / "test.source").read_text(encoding="utf-8").splitlines()[:6]
    # the reference: stock's generator on the same weights, forced to begin with <s> as hub models do
    reference = stock()
    dictionary = reference.task.source_dictionary
    expected = []
    for text in texts:
        tokens = hub.encode(text)
        generator = SequenceGenerator(reference.models, dictionary, beam_size=4, max_len_b=20)
        sample = {"net_input": {"src_tokens": tokens[None], "src_lengths": torch.tensor([len(tokens)])}}
        prefix = torch.tensor([[dictionary.bos()]])
        best = generator.generate(reference.models, sample, prefix_tokens=prefix)[0][0]
        expected.append(hub.decode(best["tokens"]))

    assert fairseq_el.accelerate(hub) is hub
    assert hub.sample(texts, beam=4, max_len_b=20) == expected
    built = hub.task.build_generator(hub.models, hub.cfg.generation)
    assert isinstance(built, ELSequenceGenerator)


def test_a_prepared_model_is_packed_but_its_state_dict_is_not(demo_data, stock):
    hub = BARTModel.from_pretrained(
        str(DEMO), data_name_or_path=str(demo_data), bpe="sentencepiece",
        sentencepiece_model=str(DEMO / "sentencepiece.model"),
    )  # fmt: skip
    fairseq_el.accelerate(hub)
    assert any(isinstance(module, PackedLinear) for module in hub.modules())
    theirs = stock().models[0].state_dict()
    ours = hub.model.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in theirs)


def test_what_an_el_architecture_trains_loads_in_stock_fairseq(demo_data, tmp_path):
    """`fairseq-train --arch el_bart_base`, then generation without our user-dir, in another process."""
    data = tmp_path / "data"
    data.mkdir()
    for file in demo_data.iterdir():
        for split in ("train", "valid", "test"):
            (data / file.name.replace("test", split)).write_bytes(file.read_bytes())
    small = [
        word
        for side in ("encoder", "decoder")
        for word in (f"--{side}-embed-dim", 16, f"--{side}-ffn-embed-dim", 16, f"--{side}-layers", 1,
                     f"--{side}-attention-heads", 2)
    ]  # fmt: skip
    done = run_command(
        "fairseq-train", data, "--user-dir", "fairseq_el", "--arch", "el_bart_base", *small,
        "--task", "el_translation", "--source-lang", "source", "--target-lang", "target",
        "--max-source-positions", 512, "--max-target-positions", 512, "--optimizer", "adam", "--lr", "0.001",
        "--max-tokens", 2000, "--max-update", 2, "--save-dir", tmp_path / "saved", "--cpu",
        "--share-all-embeddings", "--num-workers", 0, "--disable-validation", "--no-progress-bar",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    script = (
        "import sys, torch, argparse; torch.serialization.add_safe_globals([argparse.Namespace]);"
        "from fairseq import checkpoint_utils;"
        "models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([sys.argv[1]],"
        " arg_overrides={'data': sys.argv[2]});"
        "assert 'fairseq_el' not in sys.modules; print(type(models[0]).__name__, type(task).__name__)"
    )
    loaded = run_command(
        sys.executable, "-c", script,
        tmp_path / "saved" / "checkpoint_last.pt", data,
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    assert loaded.stdout.split() == ["BARTModel", "TranslationTask"]
