"""Linear layers in bfloat16 and int8, and attention to caches in half precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_el.kernels import build, fallback, ops
from fairseq_el.kernels.formats import (
    NO_ACTIVATION,
    LowPrecisionWeight,
    Padding,
    Slots,
    pack_bf16,
    pack_int8,
    unpack_low_precision,
)
from fairseq_el.kernels.packing import HalfEmbedding, pack

SHAPES = [(1, 16, 1), (4, 64, 21), (7, 1024, 130), (33, 48, 64), (5, 4096, 65)]
ACTIVATIONS = {NO_ACTIVATION: lambda x: x, ("relu", ""): F.relu, ("gelu", "none"): F.gelu}


@pytest.fixture(params=["kernels", "torch"])
def kernels(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(build, "library", lambda: None)
    elif build.library() is None:
        pytest.skip("the kernels were not compiled")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def dequantised(weight: LowPrecisionWeight):
    numbers = unpack_low_precision(weight).double()
    return numbers if weight.scales is None else numbers * weight.scales[: weight.out, None].double()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows, width, out", SHAPES)
def test_bf16_multiplies_rounded_numbers(rows, width, out, activation, kernels):
    x, weight, bias = drawn(rows, width), drawn(out, width), drawn(out)
    expected = x.bfloat16().double() @ weight.bfloat16().double().T + bias
    found = ops.low_precision_gemm(x, pack_bf16(weight, bias), activation)
    torch.testing.assert_close(found.double(), ACTIVATIONS[activation](expected), atol=2e-6 * width, rtol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows, width, out", SHAPES)
def test_int8_differs_by_no_more_than_half_a_unit_of_the_activations(rows, width, out, activation, kernels):
    x, weight, bias = drawn(rows, width), drawn(out, width), drawn(out)
    packed = pack_int8(weight, bias)
    weight = dequantised(packed)
    found = ops.low_precision_gemm(x, packed)
    unit = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)) / 254
    bound = 0.501 * unit[:, None] * weight.abs().sum(1) + 1e-4
    assert ((found - (x.double() @ weight.T + bias)).abs() <= bound).all()
    torch.testing.assert_close(
        ops.low_precision_gemm(x, packed, activation), ACTIVATIONS[activation](found), atol=1e-5, rtol=1e-5
    )


def test_int8_is_exact_for_whole_numbers_and_for_zeros(kernels):
    weight = torch.randint(-127, 128, (70, 64)).float()
    weight[:, 0] = 127  # the scale of each output becomes 1
    x = torch.randint(-127, 128, (9, 64)).float()
    x[:, :2] = torch.tensor([-127, 127])  # and that of each row
    x[8] = 0
    assert torch.equal(ops.low_precision_gemm(x, pack_int8(weight, None)), x @ weight.T)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("pack_weight", [pack_bf16, pack_int8])
def test_numbers_that_are_not_finite_stay_visible(pack_weight, value, kernels):
    x, weight = drawn(3, 32), drawn(20, 32)
    x[1, 5] = value
    found = ops.low_precision_gemm(x, pack_weight(weight, None))
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def test_int8_weights_keep_the_sign_and_the_largest_of_each_output():
    weight = drawn(70, 32)
    restored = dequantised(pack_int8(weight, None)).float()
    largest = weight.abs().amax(1, keepdim=True)
    assert ((restored - weight).abs() <= largest / 254 * 1.001).all()


@pytest.mark.parametrize("n", [1, 15, 16, 70])
def test_decoder_attention_reads_caches_in_half_precision(n, kernels):
    b, h, x, d_k, used = 2, 2, 3, 32, 6
    queries = drawn(b, x, h * d_k)
    prefix = drawn(b, h, d_k, n).half(), drawn(b, h, d_k, n + 1)[..., :n].contiguous().half()
    mask = torch.zeros(b, x, 8, dtype=torch.bool)
    mask[0, 1, 2] = mask[1, 2, 4] = True
    slots = Slots(drawn(b, h, 8, d_k).half(), drawn(b, h, d_k, 8).mT.contiguous().half(), mask, used)
    padding = Padding.behind(torch.tensor([n, max(1, n - 3)]))
    found, _ = ops.decoder_attention(queries, h, 0.3, prefix, padding, slots)
    wide = slots._replace(keys=slots.keys.float(), values=slots.values.float())
    expected, _ = fallback.decoder_attention(queries, h, 0.3, tuple(t.float() for t in prefix), padding.mask, wide)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_el_attention_reads_states_in_half_precision(kernels):
    queries, states = drawn(2, 40, 48), drawn(2, 70, 48).half()
    padding = Padding.behind(torch.tensor([70, 33]))
    expected, _ = fallback.el_attention(queries, states.float(), padding.mask)
    found, _ = ops.el_attention(queries.clone(), states, padding)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("d_k", [16, 64, 80])
@pytest.mark.parametrize("lengths", [[1], [64, 5], [65, 130, 7]])
def test_varlen_attention_in_low_precision_rounds_to_bf16_at_most(lengths, d_k, kernels):
    h = 2
    projected = drawn(sum(lengths), 3 * h * d_k)
    expected = fallback.varlen_attention(projected.double(), lengths, h, d_k**-0.5)
    found = ops.varlen_attention(projected, lengths, h, d_k**-0.5, low_precision=True)
    torch.testing.assert_close(found.double(), expected, atol=0.03, rtol=0.01)


def test_varlen_attention_in_low_precision_shows_numbers_that_are_not_finite(kernels):
    projected = drawn(70, 96)
    projected[68, 40] = float("nan")  # in a key
    found = ops.varlen_attention(projected, [66, 4], 1, 1.0, low_precision=True)
    assert found[:66].isfinite().all()
    assert not found[66:].isfinite().any()


@pytest.mark.parametrize("n", [1, 16, 37])
def test_heads_are_transposed_and_large_numbers_stay_finite(n, kernels):
    x = drawn(2, n, 48)
    expected = x.view(2, n, 3, 16).permute(0, 2, 3, 1)
    for dtype in (torch.float32, torch.float16):
        out = torch.empty(2, 3, 16, n, dtype=dtype)
        ops.transpose_heads(x, out)
        assert torch.equal(out, expected.to(dtype))
    large = torch.empty(1, 1, 16, n, dtype=torch.float16)
    ops.transpose_heads(torch.full((1, n, 16), 1e6), large)
    assert large.eq(65504).all()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_layers_and_embeddings_of_a_model_are_packed(precision):
    model = nn.ModuleList([nn.Embedding(50, 48), nn.Linear(48, 40), nn.Linear(20, 40)])
    pack(model, precision)
    assert isinstance(model[0], HalfEmbedding)
    assert model[1].matrix.kind == precision
    assert model[2].matrix.kind not in ("bf16", "int8")  # its width doesn't fit the kernels
    assert model.low_precision == precision
    assert model[1].state_dict()["weight"].shape == (40, 48)
