"""Linear layers whose weights lie in memory the way the CPU's matrix kernels read them.

A decoding step multiplies a few rows with every weight of the decoder, so it is bound by reading weights, and
`F.linear` repacks each weight on every call. Two kernels that come with torch take weights packed once:

- FBGEMM keeps them in half precision and computes in single precision. Exact where a weight is exactly
  representable in half precision, as all weights of a checkpoint saved in half precision are.
- oneDNN keeps them in single precision. Always exact.

Either replaces the original weight; the rows come back by unpacking, so state dicts stay as they are.
"""

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)

FP16, FP32 = "fp16", "fp32"


def is_exact_in_fp16(weight: Tensor) -> bool:
    return torch.equal(weight, weight.half().to(weight.dtype))


class FBGEMMWeight:
    """Half-precision weight [out, in] for single-precision arithmetic."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    def multiply(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)

    def unpack(self) -> Tensor:
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0]


class OneDNNWeight:
    """Single-precision weight [out, in] in oneDNN's blocked layout."""

    TYPICAL_ROWS = 32  # the layout is chosen for about this many rows at a time

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.TYPICAL_ROWS)
        self.bias = bias

    def multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def unpack(self) -> Tensor:
        return self.packed.to_dense()


KERNELS = {FP16: FBGEMMWeight, FP32: OneDNNWeight}


@functools.cache
def available(kind: str) -> bool:
    """Whether this CPU and this torch have the kernel, found out by using it."""
    weight = torch.arange(64.0).view(8, 8)
    x, bias = torch.eye(8), torch.ones(8)
    try:
        kernel = KERNELS[kind](weight, bias)
        works = torch.allclose(kernel.multiply(x), F.linear(x, weight, bias))
        return works and torch.equal(kernel.unpack(), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


class PackedLinear(nn.Module):
    """Stands where an `nn.Linear` stood, under the same name and with the same state dict."""

    def __init__(self, linear: nn.Linear, kind: str):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind = kind
        self.bias = linear.bias
        self._hold(linear.weight.detach())

    def _hold(self, weight: Tensor) -> None:
        """Packs what the CPU kernels take; other devices and precisions keep the plain weight."""
        packs = weight.device.type == "cpu" and weight.dtype == torch.float32
        bias = None if self.bias is None else self.bias.detach()
        self.kernel = KERNELS[self.kind](weight, bias) if packs else None
        self.plain = None if packs else weight

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each call: for code that needs the numbers, not for speed."""
        return self.plain if self.kernel is None else self.kernel.unpack()

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is None or x.dtype != torch.float32:
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        return self.kernel.multiply(x)

    def _apply(self, fn, recurse: bool = True):
        """`.cuda()`, `.half()` and the like."""
        super()._apply(fn, recurse)
        self._hold(fn(self.weight))
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, *args):
        weight = state_dict.get(prefix + "weight")
        own = {key: value for key, value in state_dict.items() if key != prefix + "weight"}
        super()._load_from_state_dict(own, prefix, metadata, strict, missing, *args)
        if weight is not None:
            self._hold(weight.detach().to(self.weight))
        elif strict:
            missing.append(prefix + "weight")

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, kind={self.kind}"


class HalfEmbedding(nn.Embedding):
    """An embedding whose table is kept in half precision, exactly, and looked up in single precision.

    Where the output projection shares its weight with the embedding, packing makes two of one: both in half
    precision they take the room that the one took.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def pack(model: nn.Module, choice: str = "auto") -> None:
    """Packs the linear layers of a model on the CPU that will only be used for inference.

    choice: `auto` is half precision for weights that are exact in it, else single; `fp32`; or `none`. A model
    in half precision (`--fp16`) is packed as it is and computes in single precision from then on.
    """
    first = next(model.parameters())
    if choice == "none" or first.device.type != "cpu" or not first.is_floating_point():
        return
    asked_for_half = first.dtype == torch.float16
    model.float()
    counts = {FP16: 0, FP32: 0}
    for parent, name, linear in packable_layers(model):
        kind = choose_kind(linear.weight, FP16 if asked_for_half else choice)
        if kind is not None:
            setattr(parent, name, PackedLinear(linear, kind))
            counts[kind] += 1
    if counts[FP16]:
        halve_embeddings(model)
    logger.info(
        f"packed {counts[FP16]} linear layers in half precision "
        f"({'as asked' if asked_for_half else 'exact for this checkpoint'}) and {counts[FP32]} in single"
    )


def packable_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Plain linear layers, except the two that EL-attention applies by themselves to queries and contexts."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and not child._forward_pre_hooks
        and not (getattr(parent, "encoder_decoder_attention", False) and name in ("k_proj", "v_proj"))
    ]


def choose_kind(weight: Tensor, choice: str) -> str | None:
    if choice != FP32 and available(FP16) and (choice == FP16 or is_exact_in_fp16(weight)):
        return FP16
    return FP32 if available(FP32) else None


def halve_embeddings(model: nn.Module) -> None:
    for embedding in {m for m in model.modules() if type(m) is nn.Embedding}:
        if is_exact_in_fp16(embedding.weight):
            embedding.__class__ = HalfEmbedding
            embedding.weight.data = embedding.weight.data.half()
