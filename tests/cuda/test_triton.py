"""The Triton kernels, run by Triton's interpreter, agree with torch; compiled, they fit the devices they are for."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import ROOT

pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")

from fairseq_el.kernels.formats import Slots  # noqa: E402
from fairseq_el.kernels.triton import launch  # noqa: E402  (imports Triton)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # of values around 1


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def random_span(b: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    begin = torch.randint(0, n, (b,)) // 2
    return begin, torch.tensor([int(torch.randint(int(first) + 1, n + 1, ())) for first in begin])


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    assert ours.dtype != torch.float64 and ours.isfinite().all()
    return torch.allclose(ours.double(), expected, atol=TOLERANCE[ours.dtype], rtol=TOLERANCE[ours.dtype])


# ---- EL-attention

@settings(max_examples=12)
@given(
    b=st.integers(1, 3), rows=st.integers(1, 96), n=st.integers(1, 70), d=st.sampled_from([64, 192, 768, 1024]),
    dtype=st.sampled_from([torch.float32, torch.float16]), processors=st.sampled_from([1, 64]),
)  # fmt: skip
@example(b=1, rows=1, n=1, d=64, dtype=torch.float32, processors=108)
@example(b=2, rows=64, n=300, d=1024, dtype=torch.float16, processors=108)
@example(b=1, rows=16, n=300, d=128, dtype=torch.float32, processors=4)
def test_el_attention_is_softmax_over_h(b, rows, n, d, dtype, processors):
    queries, states, span = random(b, rows, d, dtype=dtype), random(b, n, d, dtype=dtype), random_span(b, n)
    scale = d**-0.5
    out, lse = launch.TritonKernels(80, processors).el_attention(queries, states, span, scale)
    for s in range(b):
        hidden = states[s, span[0][s] : span[1][s]].double()
        scores = scale * queries[s].double() @ hidden.T
        assert close(out[s], scores.softmax(-1) @ hidden)
        torch.testing.assert_close(lse[s].double() * math.log(2), scores.logsumexp(-1), atol=2e-3, rtol=0)


def test_keys_are_split_only_where_the_device_would_be_idle():
    processors = 108
    assert launch.key_splits(64, 1024, processors) == 1
    assert launch.key_splits(4, 1024, processors) == 16
    assert launch.key_splits(1, 100, processors) == 1
    assert all(launch.key_splits(p, 1024, processors) * p <= processors for p in range(1, 55))


# ---- attention to slots and to shared keys and values


@settings(max_examples=14)
@given(
    b=st.integers(1, 3), x=st.sampled_from([1, 2, 4, 6, 20]), h=st.integers(1, 3), d_k=st.sampled_from([16, 48, 64]),
    n=st.integers(1, 50), steps=st.integers(1, 12), dtype=st.sampled_from([torch.float32, torch.float16]),
    parts=st.sampled_from(["shared", "slots", "both", "prompt"]), fresh=st.booleans(),
)  # fmt: skip
@example(b=2, x=4, h=2, d_k=64, n=40, steps=1, dtype=torch.float32, parts="slots", fresh=True)
@example(b=1, x=1, h=1, d_k=64, n=1, steps=1, dtype=torch.float16, parts="prompt", fresh=True)
@example(b=2, x=4, h=3, d_k=64, n=33, steps=20, dtype=torch.float32, parts="prompt", fresh=True)
@example(b=2, x=4, h=3, d_k=64, n=33, steps=20, dtype=torch.float32, parts="both", fresh=False)
def test_attention_is_one_softmax_over_all_parts(b, x, h, d_k, n, steps, dtype, parts, fresh):
    """fresh: the newest slots are not written yet, and the kernel does that too."""
    width, used, scale = h * d_k, steps * x, d_k**-0.5
    queries = random(b, x, 3 * width, dtype=dtype)[..., :width]  # as a fused projection of Q, K and V leaves it
    has_shared, has_slots = parts in ("shared", "both"), parts != "shared"
    shared = tuple(random(b, h, d_k, n, dtype=dtype) for _ in range(2)) if has_shared else None
    span = random_span(b, n)
    slots = tuple(random(b, h, used + 5, d_k, dtype=dtype) for _ in range(2)) if has_slots else None
    beam_mask = torch.rand(b, x, used + 5) < 0.5
    beam_mask[:, :, used - x : used] = ~torch.eye(x, dtype=torch.bool)
    q = queries.view(b, x, h, d_k).transpose(1, 2).double()  # [b, h, x, d_k]

    options, keys, values, seen = {}, [], [], []
    if has_slots:
        old = [t.clone() for t in slots]
        if fresh:
            product = random(b, x, 3 * width, dtype=dtype)  # of a fused projection
            newest = tuple(part.view(b, x, h, d_k).transpose(1, 2) for part in product.split(width, dim=2)[1:])
            for kept, new in zip(old, newest):
                kept[:, :, used - x : used] = new
        options["slots"] = Slots(*slots, beam_mask, used, newest if fresh else None)
        keys.append(old[0][:, :, :used].double())
        values.append(old[1][:, :, :used].double())
        seen.append(~beam_mask[:, :, :used])
    position = torch.arange(n)
    in_span = (position >= span[0][:, None]) & (position < span[1][:, None])
    if has_shared:
        options |= {"prefix": shared, "span": span}
        keys.append(shared[0].mT.double())
        values.append(shared[1].mT.double())
        seen.append(in_span[:, None].expand(b, x, n))
    if parts == "prompt":
        options |= el_prompt(q, n, in_span, scale, dtype, keys, values, seen)
    out = launch.TritonKernels(80, 108).decoder_attention(queries, h, scale, **options)

    scores = scale * q @ torch.cat(keys, dim=2).mT
    scores = scores.masked_fill(~torch.cat(seen, dim=-1).unsqueeze(1), float("-inf"))
    expected = (scores.softmax(-1) @ torch.cat(values, dim=2)).transpose(1, 2).reshape(b, x, width)
    assert close(out, expected)
    if fresh and has_slots:
        assert all(torch.equal(written[:, :, :used], kept[:, :, :used]) for written, kept in zip(slots, old))


def el_prompt(q, n, in_span, scale, dtype, keys, values, seen) -> dict:
    """What `el_attention` finds of prompts [b, n, d], and their keys and values, with biases, for the oracle."""
    b, h, x, d_k = q.shape
    width = h * d_k
    states = torch.randn(b, n, width).to(dtype).double()
    key_weight, value_weight = (torch.randn(width, width).double() / width**0.5 for _ in range(2))
    biases = tuple(random(width, dtype=dtype) for _ in range(2))

    def heads(weight):
        return (states @ weight.T).view(b, n, h, d_k).transpose(1, 2)

    without_bias, prompt_values = heads(key_weight), heads(value_weight)
    scores = scale * q @ without_bias.mT
    scores = scores.masked_fill(~in_span[:, None, None], float("-inf"))
    context = (scores.softmax(-1) @ prompt_values).transpose(1, 2).reshape(b, x, width)
    lse = scores.logsumexp(-1).transpose(1, 2).reshape(b, x * h) / math.log(2)
    bias_of_keys, bias_of_values = (bias.double().view(h, 1, d_k) for bias in biases)
    keys.append(without_bias + bias_of_keys)
    values.append(prompt_values + bias_of_values)
    seen.append(in_span[:, None].expand(b, x, n))
    return {"prompt": (context.to(dtype), lse.float()), "biases": biases}


# ---- compiled, for devices that are not here

SHARED_MEMORY = {70: 96 * 1024, 80: 163 * 1024, 90: 227 * 1024}  # bytes a block may have (CUDA programming guide)
REGISTERS = 64 * 1024  # of a block


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """All kernels for all devices, half of them in each of two processes: here Triton only interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "triton_resources.py"), "--json", "--kernel"]
    processes = [
        subprocess.Popen([*command, kernel], env=environment, stdout=subprocess.PIPE, text=True)
        for kernel in ("el_attention", "attention")
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(line) for part in printed for line in part.splitlines()]


def test_compiled_kernels_fit_their_devices(compiled):
    assert {(row["kernel"], row["capability"], row["dtype"]) for row in compiled} == {
        (kernel, capability, dtype)
        for kernel in ("el_attention", "attention") for capability in SHARED_MEMORY for dtype in ("fp16", "fp32")
    }  # fmt: skip
    for row in compiled:
        assert row["shared_bytes"] <= SHARED_MEMORY[row["capability"]], row
        assert row["spilled_bytes"] == 0, row
        assert row["registers"] * row["warps"] * 32 <= REGISTERS, row


def test_what_no_tile_fits_is_left_to_torch():
    assert launch.el_tile(70, torch.float16, 1024) is None
    assert launch.el_tile(80, torch.float16, 1000) is None and launch.el_tile(90, torch.float16, 2048) is None
