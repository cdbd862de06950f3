"""Tile sizes of the Triton kernels, and their launches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_el.kernels.formats import KeyValues, Slots, Span
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


WIDEST_HEAD = 256


@dataclass(frozen=True)
class TritonKernels:
    """The kernels on one device."""

    capability: int  # 80 for 8.0
    processors: int  # streaming multiprocessors

    def supports_heads(self, d_k: int) -> bool:
        return d_k <= WIDEST_HEAD

    def supports_states(self, dtype: torch.dtype, d: int) -> bool:
        return el_tile(self.capability, dtype, d) is not None

    def el_attention(self, queries: Tensor, states: Tensor, span: Span, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """EL-attention's products with H and the softmax between them. One launch; two where keys are split.

        queries: [b, rows, d]; states: [b, n, d], of which a sentence has those of its span. Returns [b, rows, d] and
        log2 of the sums of weights, [b, rows].
        """
        (b, rows, d), n = queries.shape, states.size(1)
        tile = el_tile(self.capability, queries.dtype, d)
        assert tile is not None, "supports_states was not asked"
        tiles, width = -(-rows // ROWS), power_of_2(d)
        splits = key_splits(b * tiles, n, self.processors)
        out, lse = queries.new_empty(b, rows, d), queries.new_empty(b, rows, dtype=torch.float32)
        parts, lses = out, lse
        if splits > 1:
            parts = queries.new_empty(splits, b, rows, d, dtype=torch.float32)
            lses = queries.new_empty(splits, b, rows, dtype=torch.float32)
        kernels.el_attention[tiles, b, splits](
            queries, states, *span, parts, lses,
            scale, rows, n, d, splits, queries.stride(0), queries.stride(1), states.stride(0), states.stride(1),
            BLOCK_ROWS=ROWS, BLOCK_KEYS=tile.keys, BLOCK_D=width, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            kernels.merge_splits[(b * rows,)](parts, lses, out, lse, b * rows, d, splits, BLOCK_D=width, num_warps=4)
        return out, lse

    def decoder_attention(
        self,
        queries: Tensor,
        num_heads: int,
        scale: float,
        prefix: KeyValues | None = None,
        span: Span | None = None,
        slots: Slots | None = None,
        prompt: tuple[Tensor, Tensor] | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention of few rows per sentence, under one softmax, to a shared prefix and to slots. One launch.

        queries: [b, x, h * d_k]; prefix: keys and values [b, h, d_k, n], of which a sentence has those of its span;
        slots: the newest of them are written too, if they are not yet; prompt: the result of EL-attention to a prompt:
        context [b, x, h * d_k], after the value projection, and log2 of the sums of weights, [b, x * h], both without
        the biases of keys and values, [h * d_k] each. Returns [b, x, h * d_k].
        """
        b, x, width = queries.shape
        d_k, none = width // num_heads, (None, None)
        keys, values, beam_mask, used, newest = slots or (None, None, None, 0, None)
        out = queries.new_empty(b, x, width)
        kernels.attention[b * num_heads, -(-x // ROWS)](
            queries, *(prefix or none), *(span or none), keys, values, beam_mask, *(newest or none),
            *(prompt or none), *(biases or none), out,
            scale, x, num_heads, prefix[0].size(3) if prefix else 0, 0 if keys is None else keys.size(2), used,
            queries.stride(1), newest[0].stride(2) if newest else 0,
            D_K=d_k, BLOCK_ROWS=ROWS, BLOCK_KEYS=ATTENTION_TILE.keys, BLOCK_D=power_of_2(d_k),
            HAS_SHARED=prefix is not None, HAS_SLOTS=slots is not None, HAS_NEW=newest is not None,
            HAS_PROMPT=prompt is not None, HAS_BIAS=biases is not None,
            num_warps=ATTENTION_TILE.warps, num_stages=ATTENTION_TILE.stages,
        )  # fmt: skip
        return out
