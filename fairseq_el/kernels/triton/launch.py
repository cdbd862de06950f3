"""Tile sizes of the Triton kernels, and their launches. Shapes as in `fairseq_el.kernels.ops`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_el.kernels.triton import kernels

ROWS = 16  # query rows a program takes: the fewest that tensor cores multiply
KEYS_A_SPLIT = 64  # at least, so that splitting does not cost more than it gains
MOST_SPLITS = 16


@dataclass(frozen=True)
class Tile:
    keys: int
    warps: int
    stages: int


def el_tile(capability: int, dtype: torch.dtype, d: int) -> Tile | None:
    """How `el_attention` is tiled on a device, or None where torch's products serve better.

    capability: 80 for 8.0. A tile of H has all of its width, and so have the queries and the sums. Before 8.0 Triton
    multiplies without tensor cores and keeps both operands in shared memory: more than 512 columns don't fit there.
    """
    if d % 16 or d > (1024 if capability >= 80 else 512):
        return None
    if dtype == torch.float32 or capability < 80:
        return Tile(keys=16, warps=16, stages=1)
    return Tile(keys=32, warps=8 if d > 512 else 4, stages=2)


ATTENTION_TILE = Tile(keys=32, warps=4, stages=2)


def power_of_2(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def key_splits(programs: int, longest: int, processors: int) -> int:
    """Parts of the keys: one, unless most of the device would be idle."""
    if 2 * programs > processors:
        return 1
    return max(1, min(processors // programs, longest // KEYS_A_SPLIT, MOST_SPLITS))


def attend_states(
    queries: Tensor,
    states: Tensor,
    span: tuple[Tensor, Tensor],
    scale: float,
    tile: Tile,
    processors: int,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """EL-attention's products with H and the softmax between them.

    queries: [b, rows, d]; states: [b, n, d], of which a sentence has those from span[0] to span[1], [b] each. Returns
    [b, rows, d] and, if wanted, log2 of the sums of weights, [b, rows]. One launch; two where keys are split.
    """
    (b, rows, d), n = queries.shape, states.size(1)
    tiles = -(-rows // ROWS)
    splits = key_splits(b * tiles, n, processors)
    out = queries.new_empty(b, rows, d)
    lse = queries.new_empty(b, rows, dtype=torch.float32) if with_lse else None
    parts = out if splits == 1 else queries.new_empty(splits, b, rows, d, dtype=torch.float32)
    lses = lse if splits == 1 else queries.new_empty(splits, b, rows, dtype=torch.float32)
    width = power_of_2(d)
    kernels.el_attention[tiles, b, splits](
        queries, states, *span, parts, lses,
        scale, rows, n, d, splits, queries.stride(0), queries.stride(1), states.stride(0), states.stride(1),
        BLOCK_ROWS=ROWS, BLOCK_KEYS=tile.keys, BLOCK_D=width, HAS_LSE=lses is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        kernels.merge_splits[(b * rows,)](
            parts, lses, out, lse, b * rows, d, splits, BLOCK_D=width, HAS_LSE=with_lse, num_warps=4
        )
    return out, lse


def attend(
    queries: Tensor,
    num_heads: int,
    scale: float,
    shared: tuple[Tensor, Tensor] | None = None,
    span: tuple[Tensor, Tensor] | None = None,
    slots: tuple[Tensor, Tensor] | None = None,
    beam_mask: Tensor | None = None,
    used: int = 0,
    newest: tuple[Tensor, Tensor] | None = None,
    prompt: tuple[Tensor, Tensor] | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of few rows a sentence, under one softmax, to what a sentence's rows share and to slots. One launch.

    queries: [b, x, h * d_k]; shared: keys and values [b, h, d_k, n], of which a sentence has those from span[0] to
    span[1]; slots: keys and values [b, h, capacity, d_k]; beam_mask: [b, x, capacity], True where a row may not look;
    newest: keys and values [b, x, h * d_k] of the last x of the `used` slots, which are written here; prompt: context
    [b, x, h * d_k] and log2 of the sum of weights, [b, h * x], of EL-attention to a prompt, without the biases of
    keys and values, [h * d_k] each. Returns [b, x, h * d_k].
    """
    b, x, width = queries.shape
    d_k = width // num_heads
    out = queries.new_empty(b, x, width)
    tile = ATTENTION_TILE
    none = (None, None)
    kernels.attention[b * num_heads, -(-x // ROWS)](
        queries, *(shared or none), *(span or none), *(slots or none), beam_mask, *(newest or none),
        *(prompt or none), *(biases or none), out,
        scale, x, num_heads, shared[0].size(3) if shared else 0, slots[0].size(2) if slots else 0, used,
        queries.stride(1), newest[0].stride(1) if newest else 0,
        D_K=d_k, BLOCK_ROWS=ROWS, BLOCK_KEYS=tile.keys, BLOCK_D=power_of_2(d_k),
        HAS_SHARED=shared is not None, HAS_SLOTS=slots is not None, HAS_NEW=newest is not None,
        HAS_PROMPT=prompt is not None, HAS_BIAS=biases is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
