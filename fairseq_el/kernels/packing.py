"""Packs the linear layers of a model (see `weights` for the formats)."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_el import heap
from fairseq_el.errors import UserError
from fairseq_el.kernels import ops
from fairseq_el.kernels.linear import PackedLinear, PackedMatrix
from fairseq_el.kernels.weights import (
    ACTIVATION_OF,
    BF16,
    FORMATS,
    FP16,
    FP32,
    FP32_ROW_MAJOR,
    LOW_PRECISION,
    available,
)

logger = logging.getLogger(__name__)

LINE = 16
"""Kernels take inputs in multiples of this."""


class HalfEmbedding(nn.Embedding):
    """An embedding whose table is kept in half precision, exactly, and looked up in single precision.

    If the output projection shares its weight with the embedding, packing makes a second copy of it. Both in half
    precision take the memory that the one took.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


PRECISIONS = ("auto", "fp32", "fp16", "bf16", "int8")


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise UserError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")


def pack(model: BaseFairseqModel, precision: str = "auto") -> None:
    """Packs the linear layers of a model that will only be used for inference; on a GPU see `fuse`.

    precision: `auto` is exact, half precision for weights that are exact in it, else single; `fp32` and `fp16` round
    weights at most; `bf16` and `int8` round activations too, and caches are kept in half precision. In `bf16`, the
    layers most sensitive to rounding stay in `fp16`. A model in half precision (`--fp16`) is packed in half precision
    and computes in single precision from then on.
    """
    first = next(model.parameters())
    if first.device.type not in ("cpu", "cuda") or not first.is_floating_point():
        return
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        return  # packed already; that is also why its embedding may be in half precision
    if first.device.type == "cuda":
        if precision in LOW_PRECISION:
            logger.warning(f"precision {precision} is for CPUs: on this GPU the model runs as it was loaded")
        fuse(model)
        return
    if precision == "auto" and first.dtype == torch.float16:
        precision = FP16
    counts = pack_layers(model, precision)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
    if counts[FP16] or precision in LOW_PRECISION:
        halve_embeddings(model, exactly=precision not in LOW_PRECISION)
    finish(model, precision, counts)


def finish(model: BaseFairseqModel, precision: str, counts: dict[str, int]) -> None:
    """What follows once the layers are packed. counts: of layers, by format."""
    for block in feed_forward_blocks(model):
        fuse_activation(block)
    if precision in LOW_PRECISION:
        model.low_precision = precision
    report(precision, counts)


def pack_layers(model: BaseFairseqModel, precision: str) -> dict[str, int]:
    """Returns how many layers each format got."""
    counts = dict.fromkeys(FORMATS, 0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parent, names in packable_layers(model, with_key_values=precision in LOW_PRECISION):
        linears = [getattr(parent, name) for name in names]
        is_table = any(id(linear.weight) in tables for linear in linears)
        weights = [linear.float().weight for linear in linears]  # converting all at once would take more memory
        applied = set(names) <= set(getattr(parent, "applies_weights", ()))  # it reads the weights at each step
        if applied and precision not in LOW_PRECISION:
            kind = FP32_ROW_MAJOR if ops.supported(weights[0], weights[0].size(1)) else None
        else:
            keeps_half = precision == BF16 and any(is_sensitive(parent, name) for name in names)
            kind = choose_kind(weights, FP16 if keeps_half else precision, is_table)
        if kind is not None:
            replace_layers(parent, names, kind)
            counts[kind] += len(names)
            del linears, weights
            heap.trim()  # else the gaps that weights leave add up to a second copy of the model
    return counts


def report(precision: str, counts: dict[str, int]) -> None:
    single = counts[FP32] + counts[FP32_ROW_MAJOR]
    if precision in LOW_PRECISION:
        others = f"{counts[FP16]} in fp16 and {single} in fp32"
        logger.info(f"packed {counts[precision]} linear layers in {precision}, {others}")
    elif any(counts.values()):
        exact = "as asked" if precision == FP16 else "exact for this checkpoint"
        logger.info(f"packed {counts[FP16]} linear layers in half precision ({exact}) and {single} in single")


def fuse(model: BaseFairseqModel) -> None:
    """Saves launches on a GPU: layers with the same input become one matrix, and activations one operation in place."""
    blocks = {id(block) for block in feed_forward_blocks(model)}
    for parent, names in packable_layers(model):
        if len(names) > 1 or (names == ("fc1",) and id(parent) in blocks):
            replace_layers(parent, names, FP32_ROW_MAJOR)
    for block in feed_forward_blocks(model):
        fuse_activation(block)


def replace_layers(parent: nn.Module, names: tuple[str, ...], kind: str) -> None:
    replace_layers_by(PackedMatrix([getattr(parent, name) for name in names], kind), parent, names)


def replace_layers_by(matrix: PackedMatrix, parent: nn.Module, names: Sequence[str]) -> None:
    first_row = 0
    for name in names:
        linear = getattr(parent, name)
        setattr(parent, name, PackedLinear(linear, matrix, first_row))
        first_row += linear.out_features


def feed_forward_blocks(model: nn.Module) -> list[Any]:
    """Encoder and decoder layers with fairseq's own forward; user-defined ones may use their parts differently."""
    stock = (TransformerEncoderLayerBase.forward, TransformerDecoderLayerBase.forward)
    return [
        module
        for module in model.modules()
        if getattr(type(module), "forward", None) in stock or getattr(type(module), "runs_as_stock", False)
    ]


def fuse_activation(block: Any) -> None:
    """Has the first layer of a feed-forward block apply the activation: kernels do so while sums are in registers."""
    activation = ACTIVATION_OF.get(block.activation_fn)
    if activation is not None and isinstance(block.fc1, PackedLinear):
        block.fc1.matrix.activation = activation
        block.activation_fn = identity


def identity(x: Tensor) -> Tensor:
    return x


def packable_layers(model: nn.Module, with_key_values: bool = False) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Plain linear layers by parent and name; those that their parent `projects_together` in one entry.

    with_key_values: also the two of encoder-decoder attention whose weights EL-attention applies to queries and
    contexts. Where building K and V is cheap, as in low precision, EL-attention is the exception.
    """
    found = []
    for parent in model.modules():
        names = tuple(
            name
            for name, child in parent.named_children()
            if type(child) is nn.Linear
            and child.weight.numel()  # an adaptive softmax may have layers of width 0
            and not child._forward_pre_hooks
            and (with_key_values or not builds_key_values(parent, name))
        )
        together = getattr(parent, "projects_together", ())
        if together and set(together) <= set(names) and alike([getattr(parent, name) for name in together]):
            found.append((parent, together))
            names = tuple(name for name in names if name not in together)
        found += [(parent, (name,)) for name in names]
    return found


def is_sensitive(parent: nn.Module, name: str) -> bool:
    """Whether rounding the layer changes scores most: the vocabulary layer, and the two that build K and V of the
    source. With the demo model in bfloat16, half of the squared error of the scores is theirs."""
    return name == "output_projection" or builds_key_values(parent, name)


def builds_key_values(parent: nn.Module, name: str) -> bool:
    return bool(getattr(parent, "encoder_decoder_attention", False)) and name in ("k_proj", "v_proj")


def alike(linears: list[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.bias is None) for linear in linears}) == 1


def choose_kind(weights: list[Tensor], precision: str, is_table: bool = False) -> str | None:
    """is_table: an embedding shares the weights, so that packing in single precision would make a second copy."""
    if precision in LOW_PRECISION and weights[0].size(1) % LINE == 0:
        return precision
    if precision != FP32 and available(FP16) and (precision == FP16 or all(map(is_exact_in_fp16, weights))):
        return FP16
    kind = FP32_ROW_MAJOR if is_table else FP32
    return kind if available(kind) else None


def is_exact_in_fp16(weight: Tensor) -> bool:
    return torch.equal(weight, weight.half().to(weight.dtype))


def halve_embeddings(model: nn.Module, exactly: bool) -> None:
    for embedding in {m for m in model.modules() if type(m) is nn.Embedding}:
        if not exactly or is_exact_in_fp16(embedding.weight):
            embedding.__class__ = HalfEmbedding
            embedding.weight.data = embedding.weight.data.half()
