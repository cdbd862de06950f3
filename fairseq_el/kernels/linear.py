"""Linear layers whose weights are packed (see `weights`).

A packed weight replaces the original. State dicts stay as they are: they unpack it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_el.kernels.fallback import activate_
from fairseq_el.kernels.formats import NO_ACTIVATION, Activation
from fairseq_el.kernels.weights import FORMATS, LOW_PRECISION, Weight


class PackedMatrix:
    """The weights of one linear layer, or of several with the same input, as one packed matrix."""

    def __init__(self, linears: list[nn.Linear], kind: str):
        self.kind = kind
        self.activation: Activation = NO_ACTIVATION
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = concatenate(biases) if biases else None
        self.set_weight(concatenate(weights))

    @classmethod
    def restored(cls, kind: str, stored: Weight, bias: Tensor | None) -> "PackedMatrix":
        matrix = cls.__new__(cls)
        matrix.kind, matrix.stored, matrix.bias, matrix.activation = kind, stored, bias, NO_ACTIVATION
        return matrix

    def set_weight(self, weight: Tensor) -> None:
        """Packs what the CPU kernels support; other devices and precisions keep the plain weight."""
        self.unpacked: Tensor | None = None
        packs = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.stored: Weight | Tensor = FORMATS[self.kind](weight, self.bias) if packs else weight

    def weight(self) -> Tensor:
        """[out, in], unpacked at each call: slow."""
        return self.stored if isinstance(self.stored, Tensor) else self.stored.unpack()

    def unpacked_weight(self) -> Tensor:
        """The same, unpacked at the first call and kept: for EL-attention, which applies it to queries at each step."""
        if self.unpacked is None:
            self.unpacked = self.weight()
        return self.unpacked

    def multiply(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        if isinstance(self.stored, Tensor) or x.dtype != torch.float32:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return activate_(F.linear(x, self.weight().to(x.dtype), bias), self.activation)
        return self.stored.multiply(x, self.activation)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.bias = None if self.bias is None else fn(self.bias)
        self.set_weight(fn(self.weight()))

    def replace(self, rows: slice, weight: Tensor, bias: Tensor | None) -> None:
        whole = self.weight()
        whole = whole.index_copy(0, torch.arange(rows.start, rows.stop, device=whole.device), weight.to(whole))
        if self.bias is not None and bias is not None:
            self.bias = self.bias.clone()
            self.bias[rows] = bias.to(self.bias)
        self.set_weight(whole)


def concatenate(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class PackedLinear(nn.Module):
    """Replaces an `nn.Linear`, under the same name and with the same state dict.

    Its weight is a packed matrix, or rows of one that several layers share.
    """

    def __init__(self, linear: nn.Linear, matrix: PackedMatrix, first_row: int = 0):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.matrix = matrix
        self.rows = slice(first_row, first_row + linear.out_features)

    @property
    def weight(self) -> Tensor:
        return self.matrix.weight()[self.rows]

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.multiply(x)[..., self.rows]

    def _apply(self, fn, recurse: bool = True):
        """`.cuda()`, `.half()` and the like. A shared matrix is converted once per layer, to the same effect."""
        super()._apply(fn, recurse)
        self.matrix.convert(fn)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, *args):
        weight = state_dict.get(prefix + "weight")
        own = {key: value for key, value in state_dict.items() if key != prefix + "weight"}
        super()._load_from_state_dict(own, prefix, metadata, strict, missing, *args)
        if weight is not None:
            self.matrix.replace(self.rows, weight.detach(), None if self.bias is None else self.bias.detach())
        elif strict:
            missing.append(prefix + "weight")

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, kind={self.matrix.kind}"


def unpacked_weight(layer: Any) -> Tensor:
    """[out, in], of a linear layer that is packed or not."""
    return layer.matrix.unpacked_weight()[layer.rows] if isinstance(layer, PackedLinear) else layer.weight


def in_low_precision(layer: nn.Module) -> bool:
    return isinstance(layer, PackedLinear) and layer.matrix.kind in LOW_PRECISION


def project_together(x: Tensor, *layers: Any) -> list[Tensor]:
    """The output of each layer; layers that share a packed matrix take one multiplication."""
    matrix = shared_matrix(layers)
    if matrix is None:
        return [layer(x) for layer in layers]
    product = matrix.multiply(x)
    return [product[..., layer.rows] for layer in layers]


def project_side_by_side(x: Tensor, *layers: Any) -> Tensor:
    """The same, concatenated: [..., sum of out_features]."""
    matrix = shared_matrix(layers)
    return torch.cat([layer(x) for layer in layers], dim=-1) if matrix is None else matrix.multiply(x)


def shared_matrix(layers: Sequence[nn.Module]) -> PackedMatrix | None:
    """The packed matrix that consists of these layers' rows, in this order."""
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if len(packed) < len(layers) or any(layer.matrix is not packed[0].matrix for layer in packed):
        return None
    in_order = all(before.rows.stop == after.rows.start for before, after in pairwise(packed))
    return packed[0].matrix if in_order else None
