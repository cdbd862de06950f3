"""Calls of the compiled kernels. No checks: `ops` decides whether they run."""

import ctypes

import torch
from torch import Tensor

from fairseq_el.kernels.build import library
from fairseq_el.kernels.formats import ACTIVATIONS, Activation, KeyValues, LowPrecisionWeight, Slots, Span


def kernels() -> ctypes.CDLL:
    compiled = library()
    assert compiled is not None, "ops.supported was not asked"
    return compiled


def is_half(x: Tensor | None) -> bool:
    return x is not None and x.dtype == torch.float16


def decoder_attention(
    queries: Tensor, num_heads: int, scale: float, prefix: KeyValues | None, span: Span | None, slots: Slots | None
) -> Tensor:
    """queries: [b, r, d], prefix: [b, h, d_k, n] each; returns [b, r, d]."""
    b, r, d = queries.shape
    queries, out = queries.contiguous(), torch.empty_like(queries, memory_format=torch.contiguous_format)
    keys, values = prefix or (None, None)
    begin, end = span or (None, None)
    slot_keys, slot_values, beam_mask, used, _ = slots or (None, None, None, 0, None)
    pointers = [
        None if t is None else t.data_ptr() for t in (keys, values, begin, end, slot_keys, slot_values, beam_mask)
    ]
    length = 0 if keys is None else keys.size(3)
    capacity = 0 if slot_keys is None else slot_keys.size(2)
    kernels().fairseq_el_decoder_attention(
        queries.data_ptr(), d, out.data_ptr(), b, r, num_heads, d // num_heads, scale,
        *pointers[:2], length, *pointers[2:], capacity, used, is_half(keys if slot_keys is None else slot_keys),
    )  # fmt: skip
    return out


def el_attention_(queries: Tensor, states: Tensor, span: Span) -> Tensor:
    """queries: [b, rows, d], overwritten by the result if contiguous; states: [b, n, d]."""
    (b, rows, d), n = queries.shape, states.size(1)
    queries, states = queries.contiguous(), states.contiguous()
    kernels().fairseq_el_el_attention(
        queries.data_ptr(), states.data_ptr(), is_half(states), b, rows, n, d, *(bound.data_ptr() for bound in span),
        torch.get_num_threads(),
    )  # fmt: skip
    return queries


def transpose_heads(x: Tensor, out: Tensor) -> None:
    """x: [b, n, h * d_k], out: [b, h, d_k, n], contiguous, in half or single precision."""
    (b, n, d), x = x.shape, x.contiguous()
    kernels().fairseq_el_transpose_heads(x.data_ptr(), out.data_ptr(), is_half(out), b, n, d)


def varlen_attention(
    projected: Tensor, lengths: list[int], num_heads: int, scale: float, low_precision: bool
) -> Tensor:
    """projected: [tokens, 3 * d]; returns [tokens, d]."""
    projected, d = projected.contiguous(), projected.size(1) // 3
    out = projected.new_empty(projected.size(0), d)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    kernels().fairseq_el_varlen_attention(
        projected.data_ptr(), out.data_ptr(), starts.data_ptr(), len(lengths), num_heads, d // num_heads, scale,
        low_precision,
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., in], weight: [out, in]; returns [..., out]."""
    x, (out, width) = x.contiguous(), weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    kernels().fairseq_el_linear(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        x.numel() // width, width, out,
    )  # fmt: skip
    return y


def packed_gemm(x: Tensor, packed: Tensor, bias: Tensor, out: int, activation: Activation) -> Tensor:
    """x: [..., in], packed: [panels, in, PANEL]; returns [..., out]."""
    x, width = x.contiguous(), packed.size(1)
    y = x.new_empty(*x.shape[:-1], out)
    kernels().fairseq_el_packed_gemm(
        x.data_ptr(), packed.data_ptr(), packed.dtype == torch.float16, bias.data_ptr(), y.data_ptr(),
        x.numel() // width, width, out, ACTIVATIONS.index(activation), torch.get_num_threads(),
    )  # fmt: skip
    return y


def low_precision_gemm(x: Tensor, weight: LowPrecisionWeight, activation: Activation) -> Tensor:
    """x: [..., in]; returns [..., out]."""
    x, width = x.contiguous(), x.size(-1)
    y = x.new_empty(*x.shape[:-1], weight.out)
    kernels().fairseq_el_low_precision_gemm(
        x.data_ptr(), weight.packed.data_ptr(),
        None if weight.scales is None else weight.scales.data_ptr(),
        None if weight.totals is None else weight.totals.data_ptr(),
        weight.bias.data_ptr(), y.data_ptr(), x.numel() // width, width, weight.out,
        ACTIVATIONS.index(activation), torch.get_num_threads(),
    )  # fmt: skip
    return y


def logsumexp(x: Tensor) -> Tensor:
    """x: [..., width], contiguous; returns [...]."""
    out = x.new_empty(x.shape[:-1])
    kernels().fairseq_el_logsumexp(x.data_ptr(), out.data_ptr(), out.numel(), x.size(-1))
    return out
