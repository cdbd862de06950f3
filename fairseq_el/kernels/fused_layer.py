"""A decoding step of a whole decoder layer as one kernel (`cpp/decoder_layer.cpp`), which saves the way back to Python
between its operations.

The structures are those of the C++ source. They hold addresses: whoever fills them keeps the tensors.
"""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_el.kernels.formats import ACTIVATIONS, KeyValues, Slots, Span
from fairseq_el.kernels.linear import PackedLinear, PackedMatrix, shared_matrix
from fairseq_el.kernels.native import is_half, kernels
from fairseq_el.kernels.weights import PackedGemmWeight, RoundedWeight, RowMajorWeight

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
ROW_MAJOR, PACKED_SINGLE, PACKED_HALF, LOW_PRECISION = range(4)

LINE = 16
"""Kernels take widths in multiples of this."""


class LinearSpec(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("weights", "scales", "totals", "bias")),
        *((name, NUMBER) for name in ("inputs", "outputs", "format", "activation")),
    ]
    max_rows = sys.maxsize  # that the kernel is good at


class NormSpec(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER), ("eps", ctypes.c_double)]


class LayerSpec(ctypes.Structure):
    _fields_ = [
        *((name, LinearSpec) for name in ("query", "key_value", "self_out", "cross_query", "cross_out", "fc1", "fc2")),
        *((name, NormSpec) for name in ("self_norm", "cross_norm", "final_norm")),
        *((name, ctypes.c_double) for name in ("self_scale", "cross_scale")),
        *((name, NUMBER) for name in ("self_heads", "cross_heads", "norm_first", "width")),
    ]
    max_rows = sys.maxsize


class PrefixSpec(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("keys", "values", "begin", "end")),
        *((name, NUMBER) for name in ("length", "half")),
    ]


class StateSpec(ctypes.Structure):
    _fields_ = [
        ("prompt", PrefixSpec),
        ("source", PrefixSpec),
        *((name, POINTER) for name in ("slot_keys", "slot_values", "beam_mask")),
        *((name, NUMBER) for name in ("batch", "beam", "capacity", "used", "half")),
    ]


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def describe_norm(norm: Any) -> NormSpec | None:
    """None if the kernel doesn't support it."""
    plain = type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1 and norm.bias is not None
    if not plain or norm.weight.dtype != torch.float32:
        return None
    return NormSpec(address(norm.weight), address(norm.bias), norm.eps)


def describe_linear(*layers: nn.Module) -> LinearSpec | None:
    """Of layers whose outputs are computed together; None if the kernel doesn't support them."""
    matrix = shared_matrix(layers)
    if matrix is None:
        return None
    stored, first, last = matrix.stored, layers[0], layers[-1]
    assert isinstance(first, PackedLinear) and isinstance(last, PackedLinear)
    inputs, outputs = first.in_features, last.rows.stop
    if first.rows.start or outputs % LINE or inputs % LINE:
        return None
    spec = describe_weight(matrix)
    if spec is None or getattr(stored, "out", outputs) != outputs:
        return None
    spec.inputs, spec.outputs, spec.activation = inputs, outputs, ACTIVATIONS.index(matrix.activation)
    return spec


def describe_weight(matrix: PackedMatrix) -> LinearSpec | None:
    stored = matrix.stored
    if isinstance(stored, PackedGemmWeight):
        kind = PACKED_HALF if is_half(stored.packed) else PACKED_SINGLE
        return LinearSpec(address(stored.packed), None, None, address(stored.bias), format=kind)
    if isinstance(stored, RoundedWeight):
        packed, bias, _, scales, totals = stored.stored
        return LinearSpec(address(packed), address(scales), address(totals), address(bias), format=LOW_PRECISION)
    if isinstance(stored, RowMajorWeight):
        spec = LinearSpec(address(stored.weight), None, None, address(stored.bias), format=ROW_MAJOR)
        spec.max_rows = stored.max_rows
        return spec
    return None


def layer_spec(
    linears: dict[str, LinearSpec | None], norms: dict[str, NormSpec | None], **numbers: float
) -> LayerSpec | None:
    """None if there is a part that the kernel doesn't support."""
    known = [linear for linear in linears.values() if linear is not None]
    if len(known) < len(linears) or None in norms.values():
        return None
    spec = LayerSpec(**linears, **norms, **numbers)
    spec.max_rows = min(linear.max_rows for linear in known)
    return spec


def describe_prefix(key_values: KeyValues | None, span: Span | None) -> PrefixSpec:
    """key_values: [b, h, d_k, n] each."""
    if key_values is None or span is None:
        return PrefixSpec()
    keys, values = key_values
    return PrefixSpec(
        address(keys), address(values), address(span[0]), address(span[1]), keys.size(3), is_half(keys)
    )


def decoder_layer(layer: LayerSpec, x: Tensor, slots: Slots, prompt: PrefixSpec, source: PrefixSpec) -> Tensor:
    """x: [b * beam, d], contiguous. Keys and values of these rows are written to the last of the slots. Returns
    [b * beam, d]."""
    (b, beam, capacity), y = slots.beam_mask.shape, torch.empty_like(x)
    state = StateSpec(
        prompt, source, address(slots.keys), address(slots.values), address(slots.beam_mask),
        b, beam, capacity, slots.used, is_half(slots.keys),
    )  # fmt: skip
    kernels().fairseq_el_decoder_layer(
        ctypes.addressof(layer), ctypes.addressof(state), x.data_ptr(), y.data_ptr(), torch.get_num_threads()
    )
    return y
