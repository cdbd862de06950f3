"""One function per kernel. Each runs the kernel where this machine and its arguments allow it, else torch. Kernels are
our own in C++ on a CPU (`native`), and in Triton on CUDA (`triton`).

Callers use these functions unconditionally. Results of kernel and fallback are equal up to rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_el.kernels import build, fallback, native
from fairseq_el.kernels.formats import (
    NO_ACTIVATION,
    NO_PADDING,
    Activation,
    KeyValues,
    LowPrecisionWeight,
    Padding,
    Slots,
)
from fairseq_el.kernels.triton.library import kernels_for

LANES = 16
"""Rows of EL-attention that occupy one thread."""

SHORT_SENTENCE = 48
"""Mean tokens per sentence below which the fallback of varlen attention, one call per sentence, costs more than
padding does."""


CACHE_DTYPES = (torch.float32, torch.float16)
"""Precisions of cached states, keys and values that the C++ kernels read."""


def supported(x: Tensor, width: int) -> bool:
    """Whether kernels run on such tensors: single precision, on a CPU, in whole vectors.

    width: the inner dimension of the product, a head's or a linear layer's input.
    """
    return x.device.type == "cpu" and x.dtype == torch.float32 and width % 16 == 0 and build.library() is not None


def decoder_attention(
    queries: Tensor,
    num_heads: int,
    scale: float,
    prefix: KeyValues | None = None,
    padding: Padding = NO_PADDING,
    slots: Slots | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a decoding step: few queries per sentence, one softmax over a shared prefix and generated tokens.

    queries: [b, r, h * d_k]; prefix: keys and values [b, h, d_k, n] that all r rows of a sentence share, less its
    padding; slots: keys and values of generated tokens. Prefix or slots may be missing. Returns [b, r, h * d_k] and,
    if needed, weights [b, h, r, used + n].
    """
    has_span, d_k = prefix is None or padding.span is not None, queries.size(2) // num_heads
    triton = kernels_for(queries)
    if triton is not None and not need_weights and has_span and triton.supports_heads(d_k):
        return triton.decoder_attention(queries, num_heads, scale, prefix, padding.span, slots), None
    slots = slots and slots.written()
    cached = {t.dtype for t in (*(prefix or ()), *(slots[:2] if slots else ()))}
    readable = len(cached) == 1 and cached <= set(CACHE_DTYPES)
    if not need_weights and has_span and readable and supported(queries, d_k):
        return native.decoder_attention(queries, num_heads, scale, prefix, padding.span, slots), None
    context, weights = fallback.decoder_attention(queries, num_heads, scale, prefix, padding.mask, slots)
    return context, weights if need_weights else None


def el_attention(
    queries: Tensor, states: Tensor, padding: Padding, need_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """EL-attention's part over the source: softmax(queries states^T) states, with rows of all heads and beams.

    queries: [b, rows, d], may be overwritten; states: [b, n, d]. Returns [b, rows, d] and, if needed, weights
    [b, rows, n].
    """
    b, rows, d = queries.shape
    triton = kernels_for(queries)
    if triton is not None and not need_weights and padding.span is not None and triton.supports_states(states.dtype, d):
        return triton.el_attention(queries, states, padding.span)[0], None
    occupies_threads = b * -(-rows // LANES) >= torch.get_num_threads()
    fits = states.size(2) == d and states.dtype in CACHE_DTYPES  # else torch says what is wrong
    if not need_weights and padding.span is not None and occupies_threads and fits and supported(queries, d):
        return native.el_attention_(queries, states, padding.span), None
    context, weights = fallback.el_attention(queries, states, padding.mask)
    return context, weights if need_weights else None


def transpose_heads(x: Tensor, out: Tensor) -> None:
    """Stores keys or values in the order of a cache. x: [b, n, h * d_k], out: [b, h, d_k, n]"""
    if out.dtype in CACHE_DTYPES and out.is_contiguous() and supported(x, x.size(2)):
        native.transpose_heads(x, out)
    else:
        largest = torch.finfo(out.dtype).max
        out.copy_(x.mT.clamp(-largest, largest).view(out.shape))


def writes_slots(keys: Tensor) -> bool:
    """Whether `decoder_attention` writes the newest keys, [b, h, x, d_k], and values to their slots while it attends,
    which saves launches."""
    triton = kernels_for(keys)
    return triton is not None and triton.supports_heads(keys.size(3))


def varlen_attention(
    projected: Tensor, lengths: list[int], num_heads: int, scale: float, low_precision: bool = False
) -> Tensor:
    """Self-attention of a padding-free batch: concatenated sentences, each attending to itself alone.

    projected: [tokens, 3 * d], queries, keys and values side by side; lengths: tokens of each sentence. Returns
    [tokens, d]. low_precision: products may be in bfloat16, on CPUs that have such instructions.
    """
    if supported(projected, projected.size(1) // 3 // num_heads):
        return native.varlen_attention(projected, lengths, num_heads, scale, low_precision)
    return fallback.varlen_attention(projected, lengths, num_heads, scale)


def varlen_pays(lengths: Tensor, weight: Tensor, head_dim: int) -> bool:
    """Whether `varlen_attention` is faster than attention with padding.

    lengths: [b], tokens of each sentence; weight: any tensor with the device and precision of the model. On a GPU, the
    fallback's launches cost more than padding does.
    """
    if lengths.device.type != "cpu":
        return False
    return supported(weight, head_dim) or int(lengths.sum()) >= SHORT_SENTENCE * lengths.numel()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For few rows and a row-major weight. x: [..., in], weight: [out, in], bias: [out]; returns [..., out]."""
    if supported(x, weight.size(1)):
        return native.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def packed_gemm(
    x: Tensor, packed: Tensor, bias: Tensor, out: int, activation: Activation = NO_ACTIVATION
) -> Tensor:
    """A linear layer with a weight of `formats.pack_gemm`, and the activation that follows it.

    x: [..., in], packed: [panels, in, PANEL] in half or single precision, bias: [panels * PANEL]; returns [..., out].
    """
    if supported(x, packed.size(1)):
        return native.packed_gemm(x, packed, bias, out, activation)
    return fallback.packed_gemm(x, packed, bias, out, activation)


def low_precision_gemm(x: Tensor, weight: LowPrecisionWeight, activation: Activation = NO_ACTIVATION) -> Tensor:
    """A linear layer with a weight in int8 or bfloat16, and the activation that follows it.

    Activations are rounded to the precision of the weight: to bfloat16, or to int8 with one scale per row. x: [..., in]
    in single precision; returns [..., out].
    """
    if supported(x, x.size(-1)):
        return native.low_precision_gemm(x, weight, activation)
    return fallback.low_precision_gemm(x, weight, activation)


def logsumexp(x: Tensor) -> Tensor:
    """log(sum(exp(x))) over the last dimension."""
    if x.is_contiguous() and supported(x, 0):
        return native.logsumexp(x)
    return torch.logsumexp(x, dim=-1)
