"""The same operations in torch: for machines, devices and precisions that the kernels don't support."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_el.kernels.formats import (
    Activation,
    KeyValues,
    LowPrecisionWeight,
    Slots,
    unpack_gemm,
    unpack_low_precision,
)


def decoder_attention(
    queries: Tensor,
    num_heads: int,
    scale: float,
    prefix: KeyValues | None,
    padding_mask: Tensor | None,
    slots: Slots | None,
) -> tuple[Tensor, Tensor]:
    """queries: [b, r, d], prefix: [b, h, d_k, n] each, padding_mask: [b, n].

    Returns [b, r, d] and weights [b, h, r, used + n], those of the slots first.
    """
    q = split_heads(queries * scale, num_heads)  # [b, h, r, d_k]
    scores = []
    if slots is not None:
        scores.append(score_slots(q, slots))
    if prefix is not None:
        scores.append(score_prefix(q, prefix[0], padding_mask))
    weights = softmax(torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0])
    used = 0 if slots is None else slots.used
    context = []
    if slots is not None:
        context.append(sum_slots(weights[..., :used].to(q.dtype), slots))
    if prefix is not None:
        context.append(sum_prefix(weights[..., used:].to(q.dtype), prefix[1]))
    return sum(context[1:], context[0]), weights


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[b, r, h * d_k] -> [b, h, r, d_k]"""
    return x.view(x.size(0), x.size(1), num_heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[b, h, r, d_k] -> [b, r, h * d_k]"""
    return x.transpose(1, 2).flatten(2)


def softmax(scores: Tensor) -> Tensor:
    """Over the last dimension, in float32 or better."""
    return F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


# bmm rather than matmul in these four: it reads slots and prefixes in place, matmul would copy them


def score_slots(q: Tensor, slots: Slots) -> Tensor:
    """q: [b, h, r, d_k]; returns [b, h, r, used]."""
    b, h, r, _ = q.shape
    keys = slots.keys[:, :, : slots.used].flatten(0, 1).to(q.dtype)
    scores = torch.bmm(q.reshape(b * h, r, -1), keys.mT).view(b, h, r, -1)
    return scores.masked_fill(slots.beam_mask[:, :, : slots.used].unsqueeze(1), float("-inf"))


def sum_slots(weights: Tensor, slots: Slots) -> Tensor:
    """weights: [b, h, r, used]; returns [b, r, d]."""
    b, h, r, used = weights.shape
    values = slots.values[:, :, :used].flatten(0, 1).to(weights.dtype)
    return join_heads(torch.bmm(weights.reshape(b * h, r, used), values).view(b, h, r, -1))


def score_prefix(q: Tensor, keys: Tensor, padding_mask: Tensor | None) -> Tensor:
    """q: [b, h, r, d_k], keys: [b, h, d_k, n]; returns [b, h, r, n]."""
    b, h, r, _ = q.shape
    scores = torch.bmm(q.reshape(b * h, r, -1), keys.flatten(0, 1).to(q.dtype)).view(b, h, r, -1)
    return mask_prefix(scores, padding_mask)


def mask_prefix(scores: Tensor, padding_mask: Tensor | None) -> Tensor:
    """scores: [b, h, r, n], padding_mask: [b, n]."""
    return scores if padding_mask is None else scores.masked_fill(padding_mask[:, None, None], float("-inf"))


def sum_prefix(weights: Tensor, values: Tensor) -> Tensor:
    """weights: [b, h, r, n], values: [b, h, d_k, n]; returns [b, r, d]."""
    b, h, r, n = weights.shape
    values = values.flatten(0, 1).mT.to(weights.dtype)
    return join_heads(torch.bmm(weights.reshape(b * h, r, n), values).view(b, h, r, -1))


def el_attention(queries: Tensor, states: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """queries: [b, rows, d], states: [b, n, d]; returns [b, rows, d] and weights [b, rows, n]."""
    states = states.to(queries.dtype)
    scores = torch.bmm(queries, states.transpose(1, 2))
    if padding_mask is not None:
        scores = scores.masked_fill(padding_mask.unsqueeze(1), float("-inf"))
    weights = softmax(scores)
    return torch.bmm(weights.to(states.dtype), states), weights


def varlen_attention(projected: Tensor, lengths: list[int], num_heads: int, scale: float) -> Tensor:
    """projected: [tokens, 3 * d]; returns [tokens, d]. One call of torch's attention per sentence."""
    q, k, v = projected.unflatten(1, (3, num_heads, -1)).permute(1, 2, 0, 3).unsqueeze(1)  # [1, h, tokens, d_k]
    sentences = zip(*(x.split(lengths, dim=2) for x in (q, k, v)))
    context = [F.scaled_dot_product_attention(q, k, v, scale=scale) for q, k, v in sentences]
    return join_heads(torch.cat(context, dim=2)).squeeze(0)


def packed_gemm(x: Tensor, packed: Tensor, bias: Tensor, out: int, activation: Activation) -> Tensor:
    """x: [..., in], packed: [panels, in, PANEL], bias: [panels * PANEL]; returns [..., out]."""
    product = F.linear(x, unpack_gemm(packed, out).to(x.dtype), bias[:out].to(x.dtype))
    return activate_(product, activation)


def low_precision_gemm(x: Tensor, weight: LowPrecisionWeight, activation: Activation) -> Tensor:
    """x: [..., in]; returns [..., out]."""
    bias, numbers = weight.bias[: weight.out], unpack_low_precision(weight)
    if weight.scales is None:
        return activate_(F.linear(x.bfloat16().float(), numbers, bias), activation)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 254
    inverse = (1 / scale).nan_to_num(0, posinf=0)
    zero_point = (-low / scale).nan_to_num(0).round()
    # exact: whole numbers below 2^53
    products = F.linear(((x * inverse + zero_point).round() - zero_point).double(), numbers.double()).to(x.dtype)
    return activate_(products * (weight.scales[: weight.out] * scale) + bias, activation)


def activate_(x: Tensor, activation: Activation) -> Tensor:
    """In place, in one pass; fairseq's `gelu_accurate` takes eight."""
    function, variant = activation
    if function == "relu":
        return x.relu_()
    return torch.ops.aten.gelu_(x, approximate=variant) if function == "gelu" else x
