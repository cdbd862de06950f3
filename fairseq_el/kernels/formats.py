"""Data that kernels and their fallbacks take: keys and values, padding in both forms, packed weights."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KeyValues = tuple[Tensor, Tensor]
Span = tuple[Tensor, Tensor]
"""First position of each sentence and the position behind its last, [b] each."""

Activation = tuple[str, str]
"""A function and its variant, as oneDNN names them."""
ACTIVATIONS: tuple[Activation, ...] = (("none", ""), ("relu", ""), ("gelu", "none"), ("gelu", "tanh"))
"""In the order of activations.h."""
NO_ACTIVATION = ACTIVATIONS[0]

PANEL = 32
"""Outputs in a panel of a packed weight."""
LOW_PRECISION_PANEL = 64
UNIT_BYTES = 4
"""Weights of neighbouring inputs that a low-precision kernel reads together: four in int8, two in bfloat16."""


class Padding(NamedTuple):
    """Padding of a batch in two forms: a mask for torch, and for kernels the span of each sentence."""

    mask: Tensor | None = None
    """[b, n], True at padding; None without padding."""
    span: Span | None = None
    """None if unknown, or if a sentence has padding inside: kernels can't be used then."""

    @classmethod
    def of(cls, states: Tensor, mask: Tensor | None) -> "Padding":
        """states: [b, n, d], mask: [b, n]."""
        b, n, _ = states.shape
        if mask is None:
            begin = torch.zeros(b, dtype=torch.long, device=states.device)
            return cls(None, (begin, begin + n))
        real = (~mask).long()
        begin = real.argmax(dim=1)
        end = begin + real.sum(dim=1)
        contiguous = torch.equal(end, n - real.flip(1).argmax(dim=1))
        return cls(mask, (begin, end) if contiguous else None)

    @classmethod
    def behind(cls, lengths: Tensor) -> "Padding":
        """Of sentences that are padded behind. lengths: [b]."""
        mask = torch.arange(int(lengths.max()), device=lengths.device) >= lengths.unsqueeze(1)
        return cls(mask, (torch.zeros_like(lengths), lengths))

    def select(self, sentences: Tensor) -> "Padding":
        """sentences: [b'], indices."""
        return Padding(
            None if self.mask is None else self.mask[sentences],
            None if self.span is None else (self.span[0][sentences], self.span[1][sentences]),
        )


NO_PADDING = Padding()


class Slots(NamedTuple):
    """Keys and values of generated tokens, and which of them each beam attends to."""

    keys: Tensor  # [b, h, capacity, d_k]
    values: Tensor  # [b, h, capacity, d_k]
    beam_mask: Tensor  # [b, x, capacity], True where a beam must not attend
    used: int  # filled slots
    newest: KeyValues | None = None
    """Keys and values of the last x of them, [b, h, x, d_k] each, if they are still to be written."""

    def written(self) -> "Slots":
        """The same, with the newest keys and values in their slots."""
        if self.newest is None:
            return self
        last = slice(self.used - self.newest[0].size(2), self.used)
        self.keys[:, :, last], self.values[:, :, last] = self.newest
        return self._replace(newest=None)


def pack_gemm(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight: [out, in] -> [panels, in, PANEL]; bias: [out] or None -> [panels * PANEL]; padded with zeros."""
    out, width = weight.shape
    missing = -out % PANEL  # outputs of the last panel
    rows = F.pad(weight.to(dtype), (0, 0, 0, missing)) if missing else weight.to(dtype)
    packed = rows.reshape(-1, PANEL, width).transpose(1, 2).contiguous()
    return packed, F.pad(weight.new_zeros(out) if bias is None else bias, (0, missing))


def unpack_gemm(packed: Tensor, out: int) -> Tensor:
    """[panels, in, PANEL] -> [out, in] in single precision."""
    return packed.transpose(1, 2).flatten(0, 1)[:out].float()


class LowPrecisionWeight(NamedTuple):
    """A weight [out, in] in int8 or bfloat16, packed for `ops.low_precision_gemm`; the last panel is padded."""

    packed: Tensor  # [panels, in / unit, LOW_PRECISION_PANEL, unit]
    bias: Tensor  # [panels * LOW_PRECISION_PANEL]
    out: int
    scales: Tensor | None = None  # of int8 weights, one per output, [panels * LOW_PRECISION_PANEL]
    totals: Tensor | None = None  # sum of the int8 weights of each output


def pack_bf16(weight: Tensor, bias: Tensor | None) -> LowPrecisionWeight:
    """weight: [out, in], bias: [out] or None."""
    return LowPrecisionWeight(pack_units(weight.bfloat16()), padded_bias(weight, bias), weight.size(0))


def pack_int8(weight: Tensor, bias: Tensor | None) -> LowPrecisionWeight:
    """weight: [out, in], bias: [out] or None. The largest weight of each output becomes 127 or -127."""
    scales = weight.abs().amax(dim=1).float() / 127
    rounded = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round().to(torch.int8)
    return restore_int8(pack_units(rounded), pad_outputs(scales), padded_bias(weight, bias), weight.size(0))


def restore_int8(packed: Tensor, scales: Tensor, bias: Tensor, out: int) -> LowPrecisionWeight:
    totals = packed.sum(dim=(1, 3), dtype=torch.int32).flatten()
    return LowPrecisionWeight(packed, bias, out, scales, totals)


def pack_units(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, in / unit, LOW_PRECISION_PANEL, unit]"""
    unit = UNIT_BYTES // weight.element_size()
    units = pad_outputs(weight).view(-1, LOW_PRECISION_PANEL, weight.size(1) // unit, unit)
    return units.transpose(1, 2).contiguous()


def pad_outputs(x: Tensor) -> Tensor:
    """Pads the first dimension, the outputs, to whole panels."""
    missing = -x.size(0) % LOW_PRECISION_PANEL
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def padded_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    return pad_outputs(weight.new_zeros(weight.size(0)) if bias is None else bias).float()


def unpack_low_precision(weight: LowPrecisionWeight) -> Tensor:
    """[out, in] in single precision; int8 weights without their scales."""
    panels, units, outputs, unit = weight.packed.shape
    # as 32-bit numbers: transposing single bytes is slow
    rows = weight.packed.view(torch.int32).squeeze(-1).transpose(1, 2).contiguous().view(weight.packed.dtype)
    return rows.view(panels * outputs, units * unit)[: weight.out].float()
