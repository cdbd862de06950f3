"""EL-attention gives what multi-head attention gives."""

import torch
from fairseq.modules import MultiheadAttention
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_el.kernels import ops
from fairseq_el.kernels.formats import Padding
from fairseq_el.models.attention import CachedSelfAttention, ELAttention
from fairseq_el.models.caches import SelfAttentionCache

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def random_attention(subclass, width, heads, bias=True, dtype=torch.float32, **options):
    """A stock attention and our subclass of it with the same weights.

    The stock one always has biases, zero where ours has none: torch's implementation behind it needs them.
    """
    stock = MultiheadAttention(width, heads, **options).to(dtype).eval()
    for name, parameter in stock.named_parameters():
        torch.nn.init.normal_(parameter, std=width**-0.5 if bias or "bias" not in name else 0.0)
    ours = subclass(width, heads, bias=bias, **options).to(dtype).eval()
    ours.load_state_dict({name: stock.state_dict()[name] for name in ours.state_dict()})
    return stock, ours


shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 4),
        "beams": st.integers(1, 5),
        "steps": st.integers(1, 3),
        "length": st.integers(1, 17),
        "heads": st.sampled_from([1, 2, 3, 8]),
        "head_width": st.sampled_from([1, 4, 16]),
        "source_width": st.sampled_from([None, 5, 24]),
        "bias": st.booleans(),
        "padded": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "seed": st.integers(0, 2**16),
    }
)


def random_source(batch, length, width, padded, dtype):
    source = torch.randn(length, batch, width, dtype=dtype)
    if not padded:
        return source, None
    lengths = torch.randint(1, length + 1, (batch,))
    return source, torch.arange(length) >= lengths.unsqueeze(1)


@given(shapes)
@settings(max_examples=150)
def test_el_attention_equals_multi_head_attention(shape):
    torch.manual_seed(shape["seed"])
    width, dtype = shape["heads"] * shape["head_width"], shape["dtype"]
    source_width = shape["source_width"] or width
    stock, ours = random_attention(
        ELAttention, width, shape["heads"], shape["bias"], dtype,
        kdim=source_width, vdim=source_width, encoder_decoder_attention=True,
    )  # fmt: skip
    b, x, t = shape["batch"], shape["beams"], shape["steps"]
    query = torch.randn(t, b * x, width, dtype=dtype)
    source, mask = random_source(b, shape["length"], source_width, shape["padded"], dtype)

    # the oracle gets the source once per beam, we get it once per sentence
    repeated = source.repeat_interleave(x, dim=1)
    repeated_mask = None if mask is None else mask.repeat_interleave(x, dim=0)
    # stock generation computes softmax in single precision; for double its other path, torch's own, is exact
    generating = {"incremental_state": {}, "static_kv": True} if dtype == torch.float32 else {}
    for options in ({"need_weights": False}, {}) + (({"need_head_weights": True},) if generating else ()):
        generating and generating.update(incremental_state={})
        expected, expected_weights = stock(
            query, repeated, repeated, repeated_mask, **generating, **options
        )
        found, weights = ours(
            query, source, source, mask, incremental_state={}, static_kv=True, **options
        )
        close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(found, expected, **close)
        if expected_weights is None:
            assert weights is None
        else:
            torch.testing.assert_close(weights, expected_weights, **close)


@given(shapes)
@settings(max_examples=50)
def test_the_multi_head_form_equals_the_el_form(shape):
    torch.manual_seed(shape["seed"])
    width, dtype = shape["heads"] * shape["head_width"], shape["dtype"]
    _, ours = random_attention(
        ELAttention, width, shape["heads"], shape["bias"], dtype, encoder_decoder_attention=True
    )
    source, mask = random_source(shape["batch"], shape["length"], width, shape["padded"], dtype)
    states = source.transpose(0, 1)
    query = torch.randn(shape["batch"], shape["beams"], width, dtype=dtype)
    padding, key_values = Padding(mask), ours.build_key_values(states)
    expected, expected_weights = ours.attend_to_states(query, states, padding, need_weights=True)
    found, weights = ops.decoder_attention(
        query, shape["heads"], ours.scaling, key_values, padding, need_weights=True
    )
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(weights, expected_weights, **close)


def test_outside_generation_it_is_its_parent():
    stock, ours = random_attention(ELAttention, 16, 4, encoder_decoder_attention=True)
    query, source = torch.randn(3, 2, 16), torch.randn(5, 2, 16)
    torch.testing.assert_close(ours(query, source, source), stock(query, source, source))
    stock.train(), ours.train()
    out, _ = ours(query, source, source)
    out.sum().backward()
    assert all(p.grad is not None for p in ours.parameters())


def test_what_has_no_el_form_behaves_as_in_the_parent():
    query, source = torch.randn(2, 3, 16), torch.randn(5, 3, 16)
    for built_with, called_with in (
        ({}, {"attn_mask": torch.randn(2, 5)}),
        ({}, {"before_softmax": True}),
        ({"add_zero_attn": True}, {}),
    ):
        stock, ours = random_attention(
            ELAttention, 16, 4, encoder_decoder_attention=True, **built_with
        )
        expected, found = (
            attention(query, source, source, incremental_state={}, static_kv=True, **called_with)
            for attention in (stock, ours)
        )
        torch.testing.assert_close(found, expected)


@given(
    beams=st.integers(1, 4),
    batch=st.integers(1, 3),
    steps=st.integers(1, 40),
    seed=st.integers(0, 2**16),
    drops=st.booleans(),
)
@settings(max_examples=60)
def test_slots_with_a_beam_mask_equal_a_cache_that_is_copied_and_reordered(beams, batch, steps, seed, drops):
    """Random parents, padding tokens and finished sentences, step after step."""
    torch.manual_seed(seed)
    stock, ours = random_attention(CachedSelfAttention, 8, 2, dtype=torch.float64, self_attention=True)
    copied, cache = {}, SelfAttentionCache(beams)
    kept = {SelfAttentionCache.KEY: cache}
    for step in range(steps):
        rows = batch * beams
        query = torch.randn(1, rows, 8, dtype=torch.float64)
        padded = (torch.rand(rows, 1) < 0.1) if step > 0 else torch.zeros(rows, 1, dtype=torch.bool)
        mask = padded if padded.any() else None
        expected, _ = stock(query, query, query, key_padding_mask=mask, incremental_state=copied)
        cache.begin_step(padded.squeeze(1))
        found, _ = ours(query, query, query, key_padding_mask=mask, incremental_state=kept)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)

        sentences = torch.arange(batch)
        if drops and batch > 1 and torch.rand(()) < 0.2:
            sentences = sentences[torch.randperm(batch)[:-1].sort().values]
            batch -= 1
        parents = torch.randint(beams, (batch, beams)) + sentences.unsqueeze(1) * beams
        stock.reorder_incremental_state(copied, parents.view(-1))
        cache.reorder(parents.view(-1))
