"""The compiled kernels compute what torch computes, and everything works without them: each operation falls back."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_el.kernels import build, fallback, native, ops
from fairseq_el.kernels.formats import ACTIVATIONS, PANEL, Padding, Slots, pack_gemm, unpack_gemm
from helpers import assert_same_hypotheses

compiled = pytest.mark.skipif(build.library() is None, reason="the kernels were not compiled")


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(ops, "supported", lambda x, width: False)


def random_padding(b: int, n: int) -> Padding:
    """Sentences with padding before and behind."""
    begin = torch.randint(0, n, (b,))
    end = torch.maximum(begin + 1, torch.randint(1, n + 1, (b,)))
    position = torch.arange(n)
    return Padding((position < begin[:, None]) | (position >= end[:, None]), (begin, end))


def reference(q, heads, scale, keys, values, padding_mask, slot_keys, slot_values, beam_mask, used):
    """The same in torch and double precision: keys and values of both kinds side by side, with a mask. Also the
    largest score, to which the error of single precision is proportional."""
    q, keys, values, slot_keys, slot_values = (x.double() for x in (q, keys, values, slot_keys, slot_values))
    b, r, d = q.shape
    masked = torch.cat([padding_mask[:, None].expand(b, r, -1), beam_mask[:, :, :used]], dim=2)
    every_key = torch.cat([keys.mT, slot_keys[:, :, :used]], dim=2)
    every_value = torch.cat([values.mT, slot_values[:, :, :used]], dim=2)
    scores = scale * q.view(b, r, heads, -1).transpose(1, 2) @ every_key.mT
    weights = scores.masked_fill(masked[:, None], float("-inf")).softmax(-1)
    return (weights @ every_value).transpose(1, 2).reshape(b, r, d).float(), scores.abs().max().item()


@settings(max_examples=60)
@given(
    b=st.integers(1, 3), r=st.integers(1, 9), heads=st.integers(1, 3), d_k=st.sampled_from([16, 32, 64, 80]),
    n=st.integers(1, 70), used=st.integers(0, 20), spread=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_decoder_attention_equals_torch_on_any_shape(b, r, heads, d_k, n, used, spread, seed):
    torch.manual_seed(seed)
    capacity = used + 3
    q = torch.randn(b, r, heads * d_k) * spread
    keys, values = torch.randn(2, b, heads, d_k, n)
    slot_keys, slot_values = torch.randn(2, b, heads, capacity, d_k)
    beam_mask, padding = torch.rand(b, r, capacity) < 0.4, random_padding(b, n)
    slots = Slots(slot_keys, slot_values, beam_mask, used) if used else None
    expected, largest_score = reference(
        q, heads, 0.3, keys, values, padding.mask, slot_keys, slot_values, beam_mask, used
    )
    tolerance = 4 * torch.finfo(torch.float).eps * (10 + largest_score)
    close = {"atol": tolerance, "rtol": tolerance}
    by_kernel, nothing = ops.decoder_attention(q, heads, 0.3, (keys, values), padding, slots)
    by_torch, weights = ops.decoder_attention(q, heads, 0.3, (keys, values), padding, slots, need_weights=True)
    torch.testing.assert_close(by_kernel, expected, **close)
    torch.testing.assert_close(by_torch, expected, **close)
    assert nothing is None and weights.shape == (b, heads, r, used + n)
    torch.testing.assert_close(weights.sum(-1), torch.ones(b, heads, r))


def test_attention_to_slots_alone():
    q, slots = torch.randn(2, 3, 32), torch.randn(2, 2, 2, 8, 16)
    beam_mask = torch.rand(2, 3, 8) < 0.4
    beam_mask[:, :, 0] = False
    nothing, everywhere = torch.zeros(2, 2, 16, 1), torch.ones(2, 1, dtype=torch.bool)
    expected, _ = reference(q, 2, 1.0, nothing, nothing, everywhere, *slots, beam_mask, 8)
    for need_weights in (False, True):
        found, _ = ops.decoder_attention(q, 2, 1.0, slots=Slots(*slots, beam_mask, 8), need_weights=need_weights)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_padding_inside_a_sentence_is_left_to_torch():
    """Kernels take one span per sentence."""
    q, (keys, values) = torch.randn(2, 3, 32), torch.randn(2, 2, 2, 16, 9)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 4] = True
    padding = Padding.of(torch.empty(2, 9, 32), mask)
    assert padding.span is None
    none = torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), torch.ones(2, 3, 1, dtype=torch.bool), 0
    expected, _ = reference(q, 2, 1.0, keys, values, mask, *none)
    found, _ = ops.decoder_attention(q, 2, 1.0, (keys, values), padding)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_both_forms_of_padding_say_the_same():
    for expected in (random_padding(4, 12), random_padding(1, 1)):
        b, n = expected.mask.shape
        found = Padding.of(torch.empty(b, n, 8), expected.mask)
        assert all(torch.equal(mine, other) for mine, other in zip(found.span, expected.span))
        chosen = torch.arange(b)[::2]
        assert torch.equal(found.select(chosen).mask, expected.mask[::2])
        assert torch.equal(found.select(chosen).span[1], expected.span[1][::2])
    lengths = torch.tensor([3, 0, 5])
    assert Padding.behind(lengths).mask.sum(dim=1).tolist() == [2, 5, 0]
    assert Padding.behind(lengths).span[1].tolist() == [3, 0, 5]


@settings(max_examples=60)
@given(
    b=st.integers(1, 3), rows=st.integers(1, 70), d=st.sampled_from([16, 48, 128]), n=st.integers(1, 100),
    spread=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_el_attention_equals_torch_on_any_shape(b, rows, d, n, spread, seed):
    torch.manual_seed(seed)
    queries, states = torch.randn(b, rows, d) * spread / d**0.5, torch.randn(b, n, d)
    padding = random_padding(b, n)
    scores = queries.double() @ states.double().mT
    expected = scores.masked_fill(padding.mask[:, None], float("-inf")).softmax(-1) @ states.double()
    tolerance = 4 * torch.finfo(torch.float).eps * (10 + scores.abs().max().item())
    close = {"atol": tolerance, "rtol": tolerance}
    if build.library() is not None:  # also where the operation would leave it to torch
        ours = native.el_attention_(queries.clone(), states, padding.span)
        torch.testing.assert_close(ours, expected.float(), **close)
    torch.testing.assert_close(ops.el_attention(queries.clone(), states, padding)[0], expected.float(), **close)
    found, weights = ops.el_attention(queries.clone(), states, padding, need_weights=True)
    torch.testing.assert_close(found, expected.float(), **close)
    assert weights.shape == (b, rows, n) and not weights[padding.mask[:, None].expand_as(weights)].any()


@compiled
def test_el_attention_has_work_for_every_thread_or_is_left_to_torch():
    """The kernel overwrites the queries, torch doesn't."""

    def runs_kernel(b: int, rows: int) -> bool:
        queries, states = torch.ones(b, rows, 32), torch.rand(b, 5, 32)
        ops.el_attention(queries, states, Padding.of(states, None))
        return not torch.equal(queries, torch.ones(b, rows, 32))

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert runs_kernel(3, 16) and runs_kernel(1, 48) and runs_kernel(2, 17)
        assert not runs_kernel(2, 16) and not runs_kernel(1, 32)
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4), heads=st.integers(1, 3),
    d_k=st.sampled_from([16, 64, 80]), spread=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_varlen_attention_equals_torch_on_each_sentence_alone(lengths, heads, d_k, spread, seed):
    torch.manual_seed(seed)
    projected = torch.randn(sum(lengths), 3, heads, d_k)
    projected[:, 0] *= spread
    expected, largest_score = [], 0.0
    for sentence in projected.double().split(lengths):
        q, k, v = sentence.permute(1, 2, 0, 3)  # [h, n, d_k]
        scores = 0.3 * q @ k.mT
        largest_score = max(largest_score, scores.abs().max().item())
        expected.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    tolerance = 4 * torch.finfo(torch.float).eps * (10 + largest_score)
    for attention in (ops.varlen_attention, fallback.varlen_attention):
        found = attention(projected.flatten(1), lengths, heads, 0.3)
        torch.testing.assert_close(found, torch.cat(expected).float(), atol=tolerance, rtol=tolerance)


@compiled
def test_a_sentence_does_not_depend_on_its_neighbours():
    projected = torch.randn(90, 3 * 32)
    alone = ops.varlen_attention(projected[20:70], [50], 2, 1.0)
    assert torch.equal(ops.varlen_attention(projected, [20, 50, 20], 2, 1.0)[20:70], alone)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 20), width=st.sampled_from([16, 48, 1040, 2064]), out=st.integers(1, 40),
    bias=st.booleans(),
)  # fmt: skip
def test_linear_layers_equal_torch_on_any_shape(rows, width, out, bias):
    x, weight, b = torch.randn(rows, width), torch.randn(out, width), torch.randn(out) if bias else None
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double()).float()
    torch.testing.assert_close(ops.linear(x, weight, b), expected, atol=1e-4, rtol=1e-4)


def packed_with_nan(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [out, in] -> [panels, in, PANEL], bias likewise; outputs behind the last one are NaN."""
    missing, nan = -len(weight) % PANEL, float("nan")
    packed = F.pad(weight, (0, 0, 0, missing), value=nan).unflatten(0, (-1, PANEL)).mT
    return packed.to(dtype).contiguous(), F.pad(bias, (0, missing), value=nan)


APPLIED = (lambda x: x, F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"))


@settings(max_examples=100)
@given(
    rows=st.integers(1, 40), width=st.sampled_from([16, 48, 1040, 2064]), out=st.integers(1, 600),
    dtype=st.sampled_from([torch.half, torch.float]), spread=st.sampled_from([0.1, 5.0]), kind=st.integers(0, 3),
)  # fmt: skip
def test_packed_gemm_equals_torch_on_any_shape(rows, width, out, dtype, spread, kind):
    x, weight, bias = torch.randn(rows, width) * spread / width**0.5, torch.randn(out, width).half(), torch.randn(out)
    expected = APPLIED[kind](F.linear(x.double(), weight.double(), bias.double())).float()
    packed, padded = packed_with_nan(weight.float(), bias, dtype)
    tolerance = 4 * torch.finfo(torch.float).eps * width**0.5  # of sums of so many numbers
    for gemm in (ops.packed_gemm, fallback.packed_gemm):
        found = gemm(x, packed, padded, out, ACTIVATIONS[kind])
        torch.testing.assert_close(found, expected, atol=tolerance * (1 + spread), rtol=tolerance)
    assert torch.equal(unpack_gemm(pack_gemm(weight.float(), bias, dtype)[0], out), weight.float())


@compiled
@pytest.mark.parametrize("dtype", [torch.half, torch.float])
def test_a_row_of_packed_gemm_does_not_depend_on_other_rows_nor_on_threads(dtype):
    x, out = torch.randn(50, 2064), 100
    packed, bias = packed_with_nan(torch.randn(out, 2064), torch.randn(out), dtype)
    expected = ops.packed_gemm(x, packed, bias, out)
    for some in (slice(0, 1), slice(3, 20), slice(40, 50)):
        assert torch.equal(ops.packed_gemm(x[some], packed, bias, out), expected[some])
    threads = torch.get_num_threads()
    try:
        for other in (1, 3, 9):  # of which 9 are more than there are panels
            torch.set_num_threads(other)
            assert torch.equal(ops.packed_gemm(x, packed, bias, out), expected)
    finally:
        torch.set_num_threads(threads)


def test_half_precision_is_converted_exactly():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.half)
    weight = every[every.isfinite()].view(-1, 16)
    packed, bias = packed_with_nan(weight.float(), torch.zeros(len(weight)), torch.half)
    ones = torch.eye(16)
    assert torch.equal(ops.packed_gemm(ones, packed, bias, len(weight)), weight.float().T)


@settings(max_examples=40)
@given(rows=st.integers(1, 9), width=st.integers(1, 100), spread=st.sampled_from([0.1, 5.0, 500.0]))
def test_logsumexp_equals_torch_on_any_shape(rows, width, spread):
    x = torch.randn(rows, width) * spread
    torch.testing.assert_close(ops.logsumexp(x), torch.logsumexp(x, dim=-1), atol=1e-5, rtol=1e-6)


def test_logsumexp_of_rows_without_numbers():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf, -inf], [nan, nan], [0.0, -inf], [1.0, nan]])
    torch.testing.assert_close(ops.logsumexp(x), torch.logsumexp(x, dim=-1), equal_nan=True)


@compiled
def test_nan_stays_nan():
    q, keys = torch.randn(1, 1, 16), torch.randn(1, 1, 16, 8)
    q[0, 0, 3] = float("nan")
    span = torch.tensor([0]), torch.tensor([8])
    assert native.decoder_attention(q, 1, 1.0, (keys, keys), span, None).isnan().all()
    assert native.el_attention_(q.clone(), keys[0].mT, span).isnan().all()
    too_large = torch.full((1, 1, 16), -3e38)  # every score is -inf, of which torch makes NaN
    assert native.el_attention_(too_large, torch.full((1, 8, 16), 3.0), span).isnan().all()
    assert native.varlen_attention(q[0].repeat(2, 3), [1, 1], 1, 1.0, False).isnan()[:, 3].all()
    assert native.linear(q, torch.ones(4, 16), None).isnan().all()
    for activation in ACTIVATIONS:
        assert native.packed_gemm(q, torch.ones(1, 16, 32), torch.ones(1, 32), 4, activation).isnan().all()


@settings(max_examples=30)
@given(
    b=st.integers(1, 3), rows=st.integers(1, 20), heads=st.integers(1, 3), d_k=st.sampled_from([3, 16]),
    n=st.integers(1, 30), dtype=st.sampled_from([torch.float32, torch.float64]), seed=st.integers(0, 9),
)  # fmt: skip
def test_every_operation_takes_what_kernels_do_not_support(b, rows, heads, d_k, n, dtype, seed):
    """Other precisions and widths, in the form of data that the kernels take."""
    torch.manual_seed(seed)
    d, close = heads * d_k, {"atol": 1e-4, "rtol": 1e-4}
    x, states = torch.randn(b, rows, d, dtype=dtype), torch.randn(b, n, d, dtype=dtype)
    weight, bias = torch.randn(40, d).half().float(), torch.randn(40)
    expected = F.gelu(F.linear(x, weight.to(dtype), bias.to(dtype)))
    for precision in (torch.half, torch.float):
        packed, padded = pack_gemm(weight, bias, precision)
        torch.testing.assert_close(ops.packed_gemm(x, packed, padded, 40, ("gelu", "none")), expected, **close)
    torch.testing.assert_close(
        ops.linear(x, weight.to(dtype), bias.to(dtype)), F.linear(x, weight.to(dtype), bias.to(dtype)), **close
    )
    torch.testing.assert_close(ops.logsumexp(x), torch.logsumexp(x, dim=-1), **close)
    padding = random_padding(b, n)
    scores = (x @ states.mT).masked_fill(padding.mask[:, None], float("-inf"))
    torch.testing.assert_close(ops.el_attention(x.clone(), states, padding)[0], scores.softmax(-1) @ states, **close)
    keys = states.view(b, n, heads, d_k).permute(0, 2, 3, 1).contiguous()
    q = x.view(b, rows, heads, d_k).transpose(1, 2)
    visible = ~padding.mask[:, None, None].expand(b, heads, rows, n)
    multi_head = F.scaled_dot_product_attention(q, keys.mT, keys.mT, attn_mask=visible, scale=0.3)
    found, _ = ops.decoder_attention(x, heads, 0.3, (keys, keys), padding)
    torch.testing.assert_close(found, multi_head.transpose(1, 2).flatten(2), **close)


@pytest.mark.parametrize("form", ["always", "never", "auto"])
@pytest.mark.usefixtures("without_kernels")
def test_same_hypotheses_without_the_kernels(stock, el, form):
    assert_same_hypotheses(el(el_attention=form).generate(beam=4), stock().generate(beam=4))


@pytest.mark.parametrize(
    "settings, answer",
    [
        ({}, "True"),
        ({"CXX": "no-such-compiler"}, "False"),
        ({"CXX": "false"}, "False"),
        ({"FAIRSEQ_EL_KERNELS": "off"}, "False"),
    ],
)
def test_a_machine_without_a_compiler_goes_on_without_the_kernels(tmp_path, settings, answer):
    if build.library() is None and answer == "True":
        pytest.skip("the kernels were not compiled")
    code = "from fairseq_el.kernels import build; print(build.library() is not None)"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "FAIRSEQ_EL_KERNELS": "native"} | settings
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == answer, done.stderr
    assert "Traceback" not in done.stderr
    left = [path.suffix for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ([".so"] if answer == "True" else [])
