"""Packed weights as named tensors, and back: what packed files hold. The layout is the same for all kernels."""

import torch
from torch import Tensor

from fairseq_el.kernels.formats import LOW_PRECISION_PANEL, PANEL, UNIT_BYTES, LowPrecisionWeight
from fairseq_el.kernels.linear import PackedMatrix
from fairseq_el.kernels.weights import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    FP32_ROW_MAJOR,
    INT8,
    PackedGemmWeight,
    RoundedWeight,
    RowMajorWeight,
    Weight,
    packed_gemm_is_fastest,
)

DTYPES = {FP16: torch.float16, FP32: torch.float32, BF16: torch.bfloat16, INT8: torch.int8}


def tensors_of(matrix: PackedMatrix) -> dict[str, Tensor]:
    """Also of a matrix that torch's own formats hold, on a machine without kernels."""
    if isinstance(matrix.stored, RoundedWeight):
        fields = matrix.stored.stored._asdict()
        return {name: tensor for name, tensor in fields.items() if isinstance(tensor, Tensor)}
    if matrix.kind == FP32_ROW_MAJOR:
        return {"weight": matrix.weight()} | ({} if matrix.bias is None else {"bias": matrix.bias})
    stored = matrix.stored
    if not isinstance(stored, PackedGemmWeight):
        stored = PackedGemmWeight.pack(matrix.weight(), matrix.bias, DTYPES[matrix.kind])
    return {"packed": stored.packed, "bias": stored.bias}


def expected(kind: str, out: int, width: int, has_bias: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each tensor: kernels read what they are given unchecked."""
    if kind == FP32_ROW_MAJOR:
        return {"weight": (torch.float32, (out, width))} | ({"bias": (torch.float32, (out,))} if has_bias else {})
    dtype = DTYPES[kind]
    if kind in (FP16, FP32):
        panels = -(-out // PANEL)
        return {"packed": (dtype, (panels, width, PANEL)), "bias": (torch.float32, (panels * PANEL,))}
    unit, outputs = UNIT_BYTES // dtype.itemsize, -(-out // LOW_PRECISION_PANEL) * LOW_PRECISION_PANEL
    packed = (outputs // LOW_PRECISION_PANEL, width // unit, LOW_PRECISION_PANEL, unit)
    found = {"packed": (dtype, packed), "bias": (torch.float32, (outputs,))}
    if kind == INT8:
        found |= {"scales": (torch.float32, (outputs,)), "totals": (torch.int32, (outputs,))}
    return found


def restore(kind: str, tensors: dict[str, Tensor], out: int, has_bias: bool) -> PackedMatrix:
    """The matrix of these tensors, without a copy of them. Where kernels for its format are missing, it is in one of
    torch's."""
    bias = tensors["bias"][:out] if has_bias else None
    stored: Weight
    if kind == FP32_ROW_MAJOR:
        stored = RowMajorWeight(tensors["weight"], bias)
    elif kind in (FP16, FP32):
        stored = PackedGemmWeight(tensors["packed"], tensors["bias"], out)
        if not packed_gemm_is_fastest():
            stored = FORMATS[kind](stored.unpack(), bias)
    else:
        stored = RoundedWeight(LowPrecisionWeight(out=out, **tensors))
    return PackedMatrix.restored(kind, stored, bias)
