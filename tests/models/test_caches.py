"""What is kept during generation has the size that the formulas say."""

import pytest
import torch

from fairseq_el.kernels.packing import pack
from fairseq_el.models.caches import CrossAttentionCache, SelfAttentionCache
from fairseq_el.models.costs import Shape
from fairseq_el.models.policy import AttentionPolicy
from helpers import assert_same_hypotheses

BART_LARGE = {"heads": 16, "width": 1024}
LAYERS = 12


def cross_attention_cache(batch, length, width) -> CrossAttentionCache:
    states = torch.empty(batch, length, width, device="meta")
    return CrossAttentionCache(states, None, AttentionPolicy())


@pytest.mark.parametrize(("batch", "length"), [(32, 256), (32, 1024), (64, 1024), (320, 1024)])
def test_bart_large_keeps_24_and_96_times_less(batch, length):
    """Against keys and values of 12 layers, shared by 4 beams (fairseq 0.12) or one copy each (0.9)."""
    kept = cross_attention_cache(batch, length, 1024).nbytes()
    shape = Shape(batch, 4, length, **BART_LARGE)
    assert kept == shape.kept_states() == batch * length * 1024 * 4
    assert LAYERS * shape.kept_key_values() == 24 * kept
    assert LAYERS * shape.kept_key_values(copied=True) == 96 * kept


def test_the_papers_table_4():
    """Gigabytes in half precision, within the paper's rounding."""
    for batch, length, multi_head, el in (
        (32, 256, 1.5, 0.02), (32, 1024, 6, 0.06), (64, 256, 3, 0.03),
        (64, 1024, 12, 0.13), (320, 256, 15, 0.15), (320, 1024, 60, 0.63),
    ):  # fmt: skip
        shape = Shape(batch, 4, length, **BART_LARGE, element_size=2)
        assert LAYERS * shape.kept_key_values(copied=True) / 2**30 == pytest.approx(multi_head, rel=0.01)
        assert shape.kept_states() / 2**30 == pytest.approx(el, abs=0.0065)


def test_generation_keeps_the_encoder_output_once_per_sentence(el):
    """Measured on live tensors: H of the widest batch, and the mask of its padding."""
    system = el(el_attention="always")
    system.generate(beam=4)
    sizes = [batch["net_input"]["src_tokens"].shape for batch in system.batches()]
    expected = max(b * n * (192 * 4) for b, n in sizes)
    peak = system.generator.profile.peak_source_bytes
    assert expected <= peak <= expected + max(b * n for b, n in sizes)


def test_keys_and_values_are_kept_once_per_sentence_too(el):
    system = el(el_attention="never")
    system.generate(beam=4)
    sizes = [batch["net_input"]["src_tokens"].shape for batch in system.batches()]
    layers = 2
    expected = max(b * n * (192 * 4) * (1 + 2 * layers) for b, n in sizes)
    peak = system.generator.profile.peak_source_bytes
    assert expected <= peak <= expected + max(b * n for b, n in sizes)


def test_the_self_attention_cache_grows_in_blocks_not_to_the_longest_output_at_once():
    cache = SelfAttentionCache(beam_size=4)
    layer = torch.nn.Identity()
    sizes = set()
    for _ in range(40):
        cache.begin_step(torch.zeros(8, dtype=torch.bool))
        cache.append(layer, torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 5))
        sizes.add(cache.beam_mask.size(2))
    assert sorted(sizes) == [64, 128, 192]


def test_finished_sentences_are_dropped():
    cache = SelfAttentionCache(beam_size=2)
    layer = torch.nn.Identity()
    cache.begin_step(torch.zeros(6, dtype=torch.bool))
    newest = torch.arange(6.0).view(3, 1, 2, 1)
    cache.append(layer, newest, newest)
    cache.reorder(torch.tensor([5, 4, 0, 0]))
    keys, _ = cache.slots[layer]
    assert keys[:, 0, :2, 0].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert cache.beam_mask[:, :, :2].tolist() == [[[True, False], [False, True]], [[False, True]] * 2]


@pytest.mark.parametrize(
    ("form", "budget"),
    [("auto", "0"), ("never", "0"), ("auto", "100K"), ("never", "3M"), ("never", "20M"), ("auto", "20M")],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_memory_budget_is_kept_and_changes_no_hypothesis(stock, el, form, budget, packed):
    """From nothing but H, over batches that must be split, to layers that may switch."""
    system = el(el_attention=form, el_memory_budget=budget)
    if packed:
        pack(system.models[0])
    assert_same_hypotheses(system.generate(beam=4), stock().generate(beam=4))
    profile = system.generator.profile
    if budget not in ("0", "100K"):  # a single sentence of this set needs more than 100K
        limit = int(budget[:-1]) * 2**20
        assert profile.peak_source_bytes + profile.peak_beam_bytes <= limit


