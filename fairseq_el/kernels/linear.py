"""Linear layers as a CPU reads them fastest.

A decoding step multiplies a few rows with every weight of the decoder, so it is bound by reading weights, and
`F.linear` copies each weight into another layout on every call. Weights are put into a better one beforehand:

- in half precision, computing in single, where that is exact: where all weights are representable in half precision,
  as those of a checkpoint saved in half precision are. By our kernel (`kernels/panels.cpp`) on machines with AVX-512,
  else by FBGEMM, which comes with torch.
- in single precision by the same kernel of ours on machines with AVX-512, or by oneDNN, which comes with torch, where
  ours could not be compiled.
- as they lie, in single precision (`kernels/linear.cpp`): on other machines, and weights that somebody else reads too,
  an embedding or EL-attention, and that packing would make a second copy of.

A packed weight replaces the original; the rows come back by unpacking, so state dicts stay as they are. The first layer
of a feed-forward block also applies the activation that follows it: our kernel and oneDNN while they have the numbers
at hand, the others in place.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from fairseq.modules import gelu, gelu_accurate
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_el.kernels import ops

logger = logging.getLogger(__name__)

FP16, FP32, FP32_AS_IT_LIES = "fp16", "fp32", "fp32 as it lies"

Activation = tuple[str, str]
"""As oneDNN names it: a function, and by which formula."""
NONE: Activation = ("none", "")
ACTIVATIONS: dict[Callable[[Tensor], Tensor], Activation] = {
    F.relu: ("relu", ""), gelu: ("gelu", "none"), gelu_accurate: ("gelu", "tanh"),
}  # fmt: skip


def activate_(x: Tensor, activation: Activation) -> Tensor:
    """In place, and in one pass where fairseq's `gelu_accurate` takes eight."""
    function, formula = activation
    if function == "relu":
        return x.relu_()
    return torch.ops.aten.gelu_(x, approximate=formula) if function == "gelu" else x


def is_exact_in_fp16(weight: Tensor) -> bool:
    return torch.equal(weight, weight.half().to(weight.dtype))


class PanelWeight:
    """Weight [out, in] in half or single precision, in panels for our kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        self.out, width = weight.shape
        missing = -self.out % ops.PANEL  # outputs of the last panel
        rows = F.pad(weight.to(dtype), (0, 0, 0, missing)) if missing else weight.to(dtype)
        self.panels = rows.reshape(-1, ops.PANEL, width).transpose(1, 2).contiguous()  # [n, in, PANEL]
        self.bias = F.pad(weight.new_zeros(self.out) if bias is None else bias, (0, missing))

    def multiply(self, x: Tensor, activation: Activation = NONE) -> Tensor:
        return ops.multiply_panels(x, self.panels, self.bias, self.out, activation)

    def unpack(self) -> Tensor:
        return self.panels.transpose(1, 2).flatten(0, 1)[: self.out].float()


class FBGEMMWeight:
    """Half-precision weight [out, in] for single-precision arithmetic."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    def multiply(self, x: Tensor, activation: Activation = NONE) -> Tensor:
        return activate_(torch.ops.quantized.linear_dynamic_fp16(x, self.packed), activation)

    def unpack(self) -> Tensor:
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0]


class OneDNNWeight:
    """Single-precision weight [out, in] in oneDNN's blocked layout."""

    TYPICAL_ROWS = 32  # the layout is chosen for about this many rows at a time

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.TYPICAL_ROWS)
        self.bias = bias

    def multiply(self, x: Tensor, activation: Activation = NONE) -> Tensor:
        return onednn_linear(x, self.packed, self.bias, activation)

    def unpack(self) -> Tensor:
        return self.packed.to_dense()


class PlainWeight:
    """Single-precision weight [out, in] as it is; few rows by our kernel, many by torch's."""

    # beyond, the work is arithmetic, at which torch's matrix kernels are better: MKL's and oneDNN's
    MOST_ROWS, MOST_ROWS_WITH_ONEDNN = 192, 32

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight.contiguous(), bias
        self.most_rows = self.MOST_ROWS_WITH_ONEDNN if onednn_is_faster() else self.MOST_ROWS

    def multiply(self, x: Tensor, activation: Activation = NONE) -> Tensor:
        if x.numel() <= self.most_rows * x.size(-1):
            return activate_(ops.linear(x, self.weight, self.bias), activation)
        if onednn_is_faster():
            return onednn_linear(x, self.weight, self.bias, activation)
        return activate_(F.linear(x, self.weight, self.bias), activation)

    def unpack(self) -> Tensor:
        return self.weight


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """weight: [out, in], packed or plain"""
    function, formula = activation
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, function, [], formula)


@functools.cache
def has_wide_vectors() -> bool:
    """AVX-512, with which our panels are the fastest.

    GFLOP/s for BART-large's weights on an AMD EPYC with AVX-512, medians of three rounds:

        rows                            1           4          16          80         930
        ours, half              30 to  68  103 to 137  156 to 185  188 to 204  201 to 211
        FBGEMM, half            25 to  55   73 to 133  143 to 170  168 to 189  188 to 198
        ours, single            13 to  35   48 to 109  126 to 172  184 to 197  198 to 205
        oneDNN, single          10 to  20   40 to  75  117 to 164  167 to 203  203 to 212
        ours, as it lies        10 to  20   40 to  75   87 to 103  115 to 142
        oneDNN, as it lies      13 to  22   28 to  43   81 to 111  158 to 181  199 to 202
        MKL, as it lies          7 to  11   12 to  21   51 to  64  113 to 129  172 to 179

    On one with AVX2, oneDNN does 120 to 136 for many rows and MKL 128 to 170. Decided by what the CPU has, not by a
    clock: the kernel is part of a sum's rounding, which is to be the same in every run.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def onednn_is_faster() -> bool:
    """Than MKL, which `F.linear` calls, and than our kernel for weights as they lie, with many rows."""
    return has_wide_vectors() and torch.backends.mkldnn.is_available()


Kernel = PanelWeight | FBGEMMWeight | OneDNNWeight | PlainWeight


def half_precision(weight: Tensor, bias: Tensor | None) -> Kernel:
    if has_wide_vectors() and ops.serves(weight, weight.size(1)):
        return PanelWeight(weight, bias, torch.float16)
    return FBGEMMWeight(weight, bias)


def single_precision(weight: Tensor, bias: Tensor | None) -> Kernel:
    if has_wide_vectors() and ops.serves(weight, weight.size(1)):
        return PanelWeight(weight, bias, torch.float32)
    return as_it_lies(weight, bias)


def as_it_lies(weight: Tensor, bias: Tensor | None) -> Kernel:
    return (PlainWeight if ops.serves(weight, weight.size(1)) else OneDNNWeight)(weight, bias)


KERNELS: dict[str, Callable[[Tensor, Tensor | None], Kernel]] = {
    FP16: half_precision, FP32: single_precision, FP32_AS_IT_LIES: as_it_lies,
}  # fmt: skip


@functools.cache
def available(kind: str) -> bool:
    """Whether this CPU and this torch have the kernel, found out by using it."""
    weight = torch.arange(256.0).view(16, 16)
    x, bias = torch.eye(16), torch.ones(16)
    try:
        kernel = KERNELS[kind](weight, bias)
        product = F.linear(x, weight, bias)
        works = torch.allclose(kernel.multiply(x), product)
        works &= all(
            torch.allclose(kernel.multiply(x, fused), function(product), atol=1e-6)
            for function, fused in ACTIVATIONS.items()
        )
        return works and torch.equal(kernel.unpack(), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


class PackedMatrix:
    """The weights of one linear layer, or of several with the same input, as one packed matrix."""

    def __init__(self, linears: list[nn.Linear], kind: str):
        self.kind, self.activation = kind, NONE
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = join(biases) if biases else None
        self.hold(join(weights))

    def hold(self, weight: Tensor) -> None:
        """Packs what the CPU kernels take; other devices and precisions keep the plain weight."""
        packs = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.kernel = KERNELS[self.kind](weight, self.bias) if packs else None
        self.plain = None if packs else weight

    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each call: for code that needs the numbers, not for speed."""
        return self.plain if self.kernel is None else self.kernel.unpack()

    def multiply(self, x: Tensor) -> Tensor:
        if self.kernel is None or x.dtype != torch.float32:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return activate_(F.linear(x, self.weight().to(x.dtype), bias), self.activation)
        return self.kernel.multiply(x, self.activation)

    def convert(self, fn) -> None:
        self.bias = None if self.bias is None else fn(self.bias)
        self.hold(fn(self.weight()))

    def replace(self, rows: slice, weight: Tensor, bias: Tensor | None) -> None:
        whole = self.weight()
        whole = whole.index_copy(0, torch.arange(rows.start, rows.stop, device=whole.device), weight.to(whole))
        if bias is not None:
            self.bias = self.bias.clone()
            self.bias[rows] = bias.to(self.bias)
        self.hold(whole)


def join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class PackedLinear(nn.Module):
    """Stands where an `nn.Linear` stood, under the same name and with the same state dict.

    Its weight is a packed matrix, or some rows of one that it shares with its neighbours.
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
        """`.cuda()`, `.half()` and the like; for a shared matrix once for each layer, to the same effect."""
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


def project_together(x: Tensor, *layers: Any) -> list[Tensor]:
    """What each layer makes of x; layers that share a packed matrix read it in one go."""
    matrix = shared_matrix(layers)
    if matrix is None:
        return [layer(x) for layer in layers]
    product = matrix.multiply(x)
    return [product[..., layer.rows] for layer in layers]


def project_side_by_side(x: Tensor, *layers: Any) -> Tensor:
    """The same in one tensor, [..., widths of all]."""
    matrix = shared_matrix(layers)
    return torch.cat([layer(x) for layer in layers], dim=-1) if matrix is None else matrix.multiply(x)


def shared_matrix(layers: Sequence[nn.Module]) -> PackedMatrix | None:
    """The packed matrix whose rows are those of these layers, one after the other."""
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if len(packed) < len(layers) or any(layer.matrix is not packed[0].matrix for layer in packed):
        return None
    in_order = all(before.rows.stop == after.rows.start for before, after in pairwise(packed))
    return packed[0].matrix if in_order else None


class HalfEmbedding(nn.Embedding):
    """An embedding whose table is kept in half precision, exactly, and looked up in single precision.

    Where the output projection shares its weight with the embedding, packing makes two of one: both in half
    precision they take the room that the one took.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def pack(model: BaseFairseqModel, choice: str = "auto") -> None:
    """Packs the linear layers of a model on the CPU that will only be used for inference.

    choice: `auto` is half precision for weights that are exact in it, else single; `fp32`; or `none`. A model
    in half precision (`--fp16`) is packed as it is and computes in single precision from then on.
    """
    first = next(model.parameters())
    if choice == "none" or first.device.type != "cpu" or not first.is_floating_point():
        return
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        return  # it is packed; its embedding may be in half precision for that reason alone
    asked_for_half = first.dtype == torch.float16
    counts = dict.fromkeys(KERNELS, 0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parent, names in packable_layers(model):
        linears = [getattr(parent, name) for name in names]
        is_table = any(id(linear.weight) in tables for linear in linears)
        weights = [linear.float().weight for linear in linears]  # one by one: all at once take more room
        if set(names) <= set(getattr(parent, "applies_weights", ())):  # also as they are: no unpacking at each step
            kind = FP32_AS_IT_LIES if ops.serves(weights[0], weights[0].size(1)) else None
        else:
            kind = choose_kind(weights, FP16 if asked_for_half else choice, is_table)
        if kind is not None:
            replace_layers(parent, names, kind)
            counts[kind] += len(names)
    for block in feed_forward_blocks(model):
        fuse_activation(block)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
    if counts[FP16]:
        halve_embeddings(model)
    if any(counts.values()):
        logger.info(
            f"packed {counts[FP16]} linear layers in half precision "
            f"({'as asked' if asked_for_half else 'exact for this checkpoint'}) and "
            f"{counts[FP32] + counts[FP32_AS_IT_LIES]} in single"
        )


def replace_layers(parent: nn.Module, names: tuple[str, ...], kind: str) -> None:
    linears = [getattr(parent, name) for name in names]
    matrix, first_row = PackedMatrix(linears, kind), 0
    for name, linear in zip(names, linears):
        setattr(parent, name, PackedLinear(linear, matrix, first_row))
        first_row += linear.out_features


def feed_forward_blocks(model: nn.Module) -> list[Any]:
    """Encoder and decoder layers that run as fairseq's do; users' own may do something else with their parts."""
    stock = (TransformerEncoderLayerBase.forward, TransformerDecoderLayerBase.forward)
    return [module for module in model.modules() if getattr(type(module), "forward", None) in stock]


def fuse_activation(block: Any) -> None:
    activation = ACTIVATIONS.get(block.activation_fn)
    if activation is not None and isinstance(block.fc1, PackedLinear):
        block.fc1.matrix.activation = activation
        block.activation_fn = applied_already


def applied_already(x: Tensor) -> Tensor:
    return x


def packable_layers(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Plain linear layers by parent and name; together those that their parent `projects_together`.

    Except the two that EL-attention applies by themselves to queries and contexts.
    """
    found = []
    for parent in model.modules():
        names = tuple(
            name
            for name, child in parent.named_children()
            if type(child) is nn.Linear
            and child.weight.numel()  # adaptive softmax may have layers of width 0
            and not child._forward_pre_hooks
            and not (getattr(parent, "encoder_decoder_attention", False) and name in ("k_proj", "v_proj"))
        )
        together = getattr(parent, "projects_together", ())
        if together and set(together) <= set(names) and alike([getattr(parent, name) for name in together]):
            found.append((parent, together))
            names = tuple(name for name in names if name not in together)
        found += [(parent, (name,)) for name in names]
    return found


def alike(linears: list[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.bias is None) for linear in linears}) == 1


def choose_kind(weights: list[Tensor], choice: str, is_table: bool = False) -> str | None:
    """is_table: an embedding looks the weights up, so that packing in single precision would be a second copy."""
    if choice != FP32 and available(FP16) and (choice == FP16 or all(map(is_exact_in_fp16, weights))):
        return FP16
    kind = FP32_AS_IT_LIES if is_table else FP32
    return kind if available(kind) else None


def halve_embeddings(model: nn.Module) -> None:
    for embedding in {m for m in model.modules() if type(m) is nn.Embedding}:
        if is_exact_in_fp16(embedding.weight):
            embedding.__class__ = HalfEmbedding
            embedding.weight.data = embedding.weight.data.half()
