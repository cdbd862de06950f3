"""The compiled kernels compute what torch computes, and everything works without them."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_el.kernels import ops
from helpers import assert_same_hypotheses

compiled = pytest.mark.skipif(ops.library() is None, reason="the kernels were not compiled")


def reference(q, heads, scale, keys, values, begin, end, slot_keys, slot_values, hidden, used):
    """The same in torch and double precision: keys and values of both kinds side by side, what a row may not
    see masked. Also the largest score, to which the error of single precision is proportional."""
    q, keys, values, slot_keys, slot_values = (x.double() for x in (q, keys, values, slot_keys, slot_values))
    b, r, d = q.shape
    place = torch.arange(keys.size(3))
    outside = (place < begin[:, None]) | (place >= end[:, None])  # [b, n]
    masked = torch.cat([outside[:, None].expand(b, r, -1), hidden[:, :, :used]], dim=2)
    every_key = torch.cat([keys.mT, slot_keys[:, :, :used]], dim=2)
    every_value = torch.cat([values.mT, slot_values[:, :, :used]], dim=2)
    scores = scale * q.view(b, r, heads, -1).transpose(1, 2) @ every_key.mT
    weights = scores.masked_fill(masked[:, None], float("-inf")).softmax(-1)
    return (weights @ every_value).transpose(1, 2).reshape(b, r, d).float(), scores.abs().max().item()


@compiled
@settings(max_examples=60)
@given(
    b=st.integers(1, 3), r=st.integers(1, 9), heads=st.integers(1, 3), d_k=st.sampled_from([16, 32, 64, 80]),
    n=st.integers(1, 70), used=st.integers(0, 20), spread=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_attention_equals_torch_on_any_shape(b, r, heads, d_k, n, used, spread, seed):
    torch.manual_seed(seed)
    capacity = used + 3
    q = torch.randn(b, r, heads * d_k) * spread
    keys, values = torch.randn(2, b, heads, d_k, n)
    slot_keys, slot_values = torch.randn(2, b, heads, capacity, d_k)
    hidden = torch.rand(b, r, capacity) < 0.4
    begin = torch.randint(0, n, (b,))
    end = torch.maximum(begin + 1, torch.randint(1, n + 1, (b,)))
    args = (q, heads, 0.3, keys, values, begin, end, slot_keys, slot_values, hidden, used)
    slots = dict(slots=(slot_keys, slot_values), hidden=hidden, used=used) if used else {}
    ours = ops.attend(q, heads, 0.3, (keys, values), (begin, end), **slots)
    expected, largest_score = reference(*args)
    tolerance = 4 * torch.finfo(torch.float).eps * (10 + largest_score)
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@compiled
def test_attention_to_slots_alone():
    q, slots = torch.randn(2, 3, 32), torch.randn(2, 2, 2, 8, 16)
    hidden = torch.rand(2, 3, 8) < 0.4
    hidden[:, :, 0] = False
    ours = ops.attend(q, 2, 1.0, slots=tuple(slots), hidden=hidden, used=8)
    nothing = torch.zeros(2, 2, 16, 1)
    none = torch.zeros(2, dtype=torch.long)
    expected, _ = reference(q, 2, 1.0, nothing, nothing, none, none, *slots, hidden, 8)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@compiled
@settings(max_examples=60)
@given(
    b=st.integers(1, 3), rows=st.integers(1, 70), d=st.sampled_from([16, 48, 128]), n=st.integers(1, 100),
    spread=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_attention_to_states_equals_torch_on_any_shape(b, rows, d, n, spread, seed):
    torch.manual_seed(seed)
    queries, states = torch.randn(b, rows, d) * spread / d**0.5, torch.randn(b, n, d)
    begin = torch.randint(0, n, (b,))
    end = torch.maximum(begin + 1, torch.randint(1, n + 1, (b,)))
    place = torch.arange(n)
    outside = (place < begin[:, None]) | (place >= end[:, None])  # [b, n]
    scores = queries.double() @ states.double().mT
    expected = scores.masked_fill(outside[:, None], float("-inf")).softmax(-1) @ states.double()
    tolerance = 4 * torch.finfo(torch.float).eps * (10 + scores.abs().max().item())
    ours = ops.attend_states_(queries.clone(), states, (begin, end))
    torch.testing.assert_close(ours, expected.float(), atol=tolerance, rtol=tolerance)


@compiled
def test_attention_to_states_has_work_for_every_thread_or_is_left_to_torch():
    threads = torch.get_num_threads()
    assert ops.serves_states(torch.zeros(threads, 16, 32)) and ops.serves_states(torch.zeros(1, 16 * threads, 32))
    assert threads == 1 or not ops.serves_states(torch.zeros(threads - 1, 16, 32))


@compiled
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4), heads=st.integers(1, 3),
    d_k=st.sampled_from([16, 64, 80]), spread=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_self_attention_of_sentences_equals_torch_on_each_alone(lengths, heads, d_k, spread, seed):
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
    ours = ops.attend_sentences(projected.flatten(1), lengths, heads, 0.3)
    torch.testing.assert_close(ours, torch.cat(expected).float(), atol=tolerance, rtol=tolerance)


@compiled
def test_a_sentence_does_not_depend_on_its_neighbours():
    projected = torch.randn(90, 3 * 32)
    alone = ops.attend_sentences(projected[20:70], [50], 2, 1.0)
    assert torch.equal(ops.attend_sentences(projected, [20, 50, 20], 2, 1.0)[20:70], alone)


@compiled
@settings(max_examples=60)
@given(
    rows=st.integers(1, 20), width=st.sampled_from([16, 48, 1040, 2064]), out=st.integers(1, 40),
    bias=st.booleans(),
)  # fmt: skip
def test_linear_layers_equal_torch_on_any_shape(rows, width, out, bias):
    x, weight, b = torch.randn(rows, width), torch.randn(out, width), torch.randn(out) if bias else None
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double()).float()
    torch.testing.assert_close(ops.linear(x, weight, b), expected, atol=1e-4, rtol=1e-4)


def in_panels(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [out, in] -> [panels, in, PANEL], bias likewise; outputs that are none of the layer's are NaN."""
    missing, nan = -len(weight) % ops.PANEL, float("nan")
    panels = F.pad(weight, (0, 0, 0, missing), value=nan).unflatten(0, (-1, ops.PANEL)).mT
    return panels.to(dtype).contiguous(), F.pad(bias, (0, missing), value=nan)


APPLIED = (lambda x: x, F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"))


@compiled
@settings(max_examples=100)
@given(
    rows=st.integers(1, 40), width=st.sampled_from([16, 48, 1040, 2064]), out=st.integers(1, 600),
    dtype=st.sampled_from([torch.half, torch.float]), spread=st.sampled_from([0.1, 5.0]), kind=st.integers(0, 3),
)  # fmt: skip
def test_linear_layers_in_panels_equal_torch_on_any_shape(rows, width, out, dtype, spread, kind):
    x, weight, bias = torch.randn(rows, width) * spread / width**0.5, torch.randn(out, width).half(), torch.randn(out)
    expected = APPLIED[kind](F.linear(x.double(), weight.double(), bias.double())).float()
    panels, padded = in_panels(weight.float(), bias, dtype)
    ours = ops.multiply_panels(x, panels, padded, out, ops.ACTIVATIONS[kind])
    tolerance = 4 * torch.finfo(torch.float).eps * width**0.5  # of sums of so many numbers
    torch.testing.assert_close(ours, expected, atol=tolerance * (1 + spread), rtol=tolerance)


@compiled
@pytest.mark.parametrize("dtype", [torch.half, torch.float])
def test_a_row_through_panels_does_not_depend_on_other_rows_nor_on_threads(dtype):
    x, out = torch.randn(50, 2064), 100
    panels, bias = in_panels(torch.randn(out, 2064), torch.randn(out), dtype)
    expected = ops.multiply_panels(x, panels, bias, out)
    for some in (slice(0, 1), slice(3, 20), slice(40, 50)):
        assert torch.equal(ops.multiply_panels(x[some], panels, bias, out), expected[some])
    threads = torch.get_num_threads()
    try:
        for other in (1, 3, 9):  # of which 9 are more than there are panels
            torch.set_num_threads(other)
            assert torch.equal(ops.multiply_panels(x, panels, bias, out), expected)
    finally:
        torch.set_num_threads(threads)


@compiled
def test_half_precision_is_widened_exactly():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.half)
    weight = every[every.isfinite()].view(-1, 16)
    panels, bias = in_panels(weight.float(), torch.zeros(len(weight)), torch.half)
    ones = torch.eye(16)
    assert torch.equal(ops.multiply_panels(ones, panels, bias, len(weight)), weight.float().T)


@compiled
@settings(max_examples=40)
@given(rows=st.integers(1, 9), width=st.integers(1, 100), spread=st.sampled_from([0.1, 5.0, 500.0]))
def test_normalisers_equal_torch_on_any_shape(rows, width, spread):
    x = torch.randn(rows, width) * spread
    torch.testing.assert_close(ops.logsumexp(x), torch.logsumexp(x, dim=-1), atol=1e-5, rtol=1e-6)


@compiled
def test_normalisers_of_rows_without_numbers():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf, -inf], [nan, nan], [0.0, -inf], [1.0, nan]])
    torch.testing.assert_close(ops.logsumexp(x), torch.logsumexp(x, dim=-1), equal_nan=True)


@compiled
def test_numbers_that_are_none_do_not_turn_into_numbers():
    q, keys = torch.randn(1, 1, 16), torch.randn(1, 1, 16, 8)
    q[0, 0, 3] = float("nan")
    span = torch.tensor([0]), torch.tensor([8])
    assert ops.attend(q, 1, 1.0, (keys, keys), span).isnan().all()
    assert ops.attend_states_(q.clone(), keys[0].mT, span).isnan().all()
    too_large = torch.full((1, 1, 16), -3e38)  # every score is -inf, of which torch makes NaN
    assert ops.attend_states_(too_large, torch.full((1, 8, 16), 3.0), span).isnan().all()
    assert ops.attend_sentences(q[0].repeat(2, 3), [1, 1], 1, 1.0).isnan()[:, 3].all()
    assert ops.linear(q, torch.ones(4, 16), None).isnan().all()
    for activation in ops.ACTIVATIONS:
        assert ops.multiply_panels(q, torch.ones(1, 16, 32), torch.ones(1, 32), 4, activation).isnan().all()


@pytest.mark.parametrize("form", ["always", "never", "auto"])
def test_same_hypotheses_without_the_kernels(stock, el, form, monkeypatch):
    monkeypatch.setattr(ops, "serves", lambda x, width: False)
    assert_same_hypotheses(el(el_attention=form).generate(beam=4), stock().generate(beam=4))


@pytest.mark.parametrize(
    "settings, answer",
    [
        ({}, "True"),
        ({"CXX": "no-such-compiler"}, "False"),
        ({"CXX": "false"}, "False"),
        ({"FAIRSEQ_EL_NATIVE": "0"}, "False"),
    ],
)
def test_a_machine_without_a_compiler_goes_on_without_the_kernels(tmp_path, settings, answer):
    if ops.library() is None and answer == "True":
        pytest.skip("the kernels were not compiled")
    code = "from fairseq_el.kernels import ops; print(ops.library() is not None)"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | settings
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == answer, done.stderr
    assert "Traceback" not in done.stderr
    left = [path.suffix for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ([".so"] if answer == "True" else [])
