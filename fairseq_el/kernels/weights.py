"""Formats of a linear layer's weight on a CPU, and the kernels that read them.

A decoding step multiplies a few rows with every weight of the decoder, so it is bound by reading weights, and
`F.linear` copies each weight into another layout on every call. Weights are put into a better layout beforehand:

- FP16, half precision with single-precision arithmetic: exact where all weights are representable in half precision,
  as those of a checkpoint saved in half precision are. A packed GEMM (`cpp/packed_gemm.cpp`) on machines with AVX2,
  else FBGEMM, which comes with torch.
- FP32, single precision: the same packed GEMM with AVX2, else row-major.
- FP32_ROW_MAJOR, single precision without packing (`cpp/linear.cpp`): for machines without AVX2, and for weights that
  an embedding or EL-attention reads too, of which packing would keep a second copy. oneDNN without our kernels.
- BF16 and INT8, on request: weights and activations are rounded (`cpp/low_precision_gemm.cpp`).
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fairseq.modules import gelu, gelu_accurate
from torch import Tensor

from fairseq_el.kernels import build, ops
from fairseq_el.kernels.fallback import activate_
from fairseq_el.kernels.formats import (
    NO_ACTIVATION,
    Activation,
    LowPrecisionWeight,
    pack_bf16,
    pack_gemm,
    pack_int8,
    unpack_gemm,
    unpack_low_precision,
)

FP16, FP32, FP32_ROW_MAJOR, BF16, INT8 = "fp16", "fp32", "fp32 row-major", "bf16", "int8"
LOW_PRECISION = (BF16, INT8)

ACTIVATION_OF: dict[Callable[[Tensor], Tensor], Activation] = {
    F.relu: ("relu", ""), gelu: ("gelu", "none"), gelu_accurate: ("gelu", "tanh"),
}  # fmt: skip
"""Activation functions that a packed layer can apply."""


class PackedGemmWeight:
    """Weight [out, in] in half or single precision, packed for our GEMM."""

    def __init__(self, packed: Tensor, bias: Tensor, out: int):
        self.packed, self.bias, self.out = packed, bias, out

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> "PackedGemmWeight":
        return cls(*pack_gemm(weight, bias, dtype), weight.size(0))

    def multiply(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        return ops.packed_gemm(x, self.packed, self.bias, self.out, activation)

    def unpack(self) -> Tensor:
        return unpack_gemm(self.packed, self.out)


class RoundedWeight:
    """Weight [out, in] in bfloat16 or int8, with activations rounded alike."""

    def __init__(self, stored: LowPrecisionWeight):
        self.stored = stored

    def multiply(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        return ops.low_precision_gemm(x, self.stored, activation)

    def unpack(self) -> Tensor:
        scales = self.stored.scales
        weight = unpack_low_precision(self.stored)
        return weight if scales is None else weight.mul_(scales[: self.stored.out].unsqueeze(1))


class FBGEMMWeight:
    """Weight [out, in] in half precision for single-precision arithmetic."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    def multiply(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        return activate_(torch.ops.quantized.linear_dynamic_fp16(x, self.packed), activation)

    def unpack(self) -> Tensor:
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0]


class OneDNNWeight:
    """Weight [out, in] in single precision, in oneDNN's blocked layout."""

    TYPICAL_ROWS = 32  # the layout is chosen for about this many rows at a time

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.TYPICAL_ROWS)
        self.bias = bias

    def multiply(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        return onednn_linear(x, self.packed, self.bias, activation)

    def unpack(self) -> Tensor:
        return self.packed.to_dense()


class RowMajorWeight:
    """Weight [out, in] in single precision, unchanged; our kernel for few rows, torch's for many."""

    # with more rows the work is bound by arithmetic, at which MKL and oneDNN are better
    MAX_ROWS, MAX_ROWS_WITH_ONEDNN = 192, 32

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight.contiguous(), bias
        self.max_rows = self.MAX_ROWS_WITH_ONEDNN if onednn_is_faster() else self.MAX_ROWS

    def multiply(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        if x.numel() <= self.max_rows * x.size(-1):
            return activate_(ops.linear(x, self.weight, self.bias), activation)
        if onednn_is_faster():
            return onednn_linear(x, self.weight, self.bias, activation)
        return activate_(F.linear(x, self.weight, self.bias), activation)

    def unpack(self) -> Tensor:
        return self.weight


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """weight: [out, in], blocked or row-major."""
    function, variant = activation
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, function, [], variant)


def packed_gemm_is_fastest() -> bool:
    """Whether the kernels in use were compiled for AVX2 or better, with which this was measured.

    GFLOP/s for BART-large's weights on two cores of an AMD EPYC, medians of three rounds. All with AVX-512:

        rows                            1           4          16          80         930
        packed GEMM, half       30 to  68  103 to 137  156 to 185  188 to 204  201 to 211
        FBGEMM, half            25 to  55   73 to 133  143 to 170  168 to 189  188 to 198
        packed GEMM, single     13 to  35   48 to 109  126 to 172  184 to 197  198 to 205
        oneDNN, single          10 to  20   40 to  75  117 to 164  167 to 203  203 to 212
        ours, row-major         10 to  20   40 to  75   87 to 103  115 to 142
        oneDNN, row-major       13 to  22   28 to  43   81 to 111  158 to 181  199 to 202
        MKL, row-major           7 to  11   12 to  21   51 to  64  113 to 129  172 to 179

    All with AVX2, in another run:

        packed GEMM, half       47 to  77  129 to 156  180 to 193  201 to 205  200 to 209
        FBGEMM, half            46 to  93  115 to 169  156 to 195  170 to 198  182 to 205
        packed GEMM, single     27 to  45   84 to 134  159 to 184  187 to 195  200 to 207
        oneDNN, single          14 to  32   38 to  79   98 to 125  167 to 178  186 to 198
        ours, row-major         16 to  27   65 to  96   98 to 123  130 to 142
        oneDNN, row-major       14 to  35   32 to  50   86 to 103  155 to 172  189 to 196
        MKL, row-major           7 to  10   14 to  17   46 to  70   99 to 137  167 to 195

    The choice depends on CPU features and not on a measurement: the kernel determines how sums are rounded, which must
    be the same in every run.
    """
    kernels = build.library()
    return kernels is not None and kernels.variant != build.PORTABLE and "avx2" in build.cpu_features().split()


def onednn_is_faster() -> bool:
    """Than MKL, which `F.linear` calls, and than our row-major kernel for many rows (see above)."""
    return torch.backends.mkldnn.is_available()


Weight = PackedGemmWeight | RoundedWeight | FBGEMMWeight | OneDNNWeight | RowMajorWeight


def half_precision(weight: Tensor, bias: Tensor | None) -> Weight:
    if packed_gemm_is_fastest() and ops.supported(weight, weight.size(1)):
        return PackedGemmWeight.pack(weight, bias, torch.float16)
    return FBGEMMWeight(weight, bias)


def single_precision(weight: Tensor, bias: Tensor | None) -> Weight:
    if packed_gemm_is_fastest() and ops.supported(weight, weight.size(1)):
        return PackedGemmWeight.pack(weight, bias, torch.float32)
    return row_major(weight, bias)


def row_major(weight: Tensor, bias: Tensor | None) -> Weight:
    return (RowMajorWeight if ops.supported(weight, weight.size(1)) else OneDNNWeight)(weight, bias)


FORMATS: dict[str, Callable[[Tensor, Tensor | None], Weight]] = {
    FP16: half_precision,
    FP32: single_precision,
    FP32_ROW_MAJOR: row_major,
    BF16: lambda weight, bias: RoundedWeight(pack_bf16(weight, bias)),
    INT8: lambda weight, bias: RoundedWeight(pack_int8(weight, bias)),
}


@functools.cache
def available(kind: str) -> bool:
    """Whether this CPU and this torch support an exact format, determined by using it."""
    weight = torch.arange(256.0).view(16, 16)
    x, bias = torch.eye(16), torch.ones(16)
    try:
        packed = FORMATS[kind](weight, bias)
        product = F.linear(x, weight, bias)
        works = torch.allclose(packed.multiply(x), product)
        works &= all(
            torch.allclose(packed.multiply(x, fused), function(product), atol=1e-6)
            for function, fused in ACTIVATION_OF.items()
        )
        return works and torch.equal(packed.unpack(), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
