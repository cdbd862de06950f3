"""Stores a packed model in a file of `checkpoints.packed_file`, and loads it: no weight is copied or packed again."""

import logging
from pathlib import Path
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from fairseq_el.checkpoints import packed_file
from fairseq_el.checkpoints.packed_file import PackedFile
from fairseq_el.kernels import storage
from fairseq_el.kernels.linear import PackedLinear, PackedMatrix
from fairseq_el.kernels.packing import HalfEmbedding, finish, replace_layers_by
from fairseq_el.kernels.weights import FORMATS

logger = logging.getLogger(__name__)


# ---- storing


def store(model: BaseFairseqModel, precision: str, path: Path) -> Tensor:
    """Writes the weights of a packed model. Returns the digest for its checkpoint."""
    tensors: dict[str, Tensor] = {}
    layers = []
    for number, (matrix, names) in enumerate(matrices(model)):
        own = storage.tensors_of(matrix)
        tensors |= {f"{number}.{name}": tensor for name, tensor in own.items()}
        layers.append({"format": matrix.kind, "names": names, "tensors": list(own)})
    tensors |= plain_tensors(model)
    first: dict[tuple, str] = {}  # of tensors that are one
    shared = {}
    for name, tensor in tensors.items():
        known = first.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
        if known != name and tensor.numel():
            shared[name] = known
    written = {name: tensor for name, tensor in tensors.items() if name not in shared}
    return packed_file.write(path, written, {"precision": precision, "layers": layers, "shared": shared})


def matrices(model: nn.Module) -> list[tuple[PackedMatrix, list[str]]]:
    """Packed matrices and the layers in them, in the order of their rows."""
    found: dict[int, list[tuple[str, PackedLinear]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found.setdefault(id(module.matrix), []).append((name, module))
    in_order = [sorted(layers, key=lambda layer: layer[1].rows.start) for layers in found.values()]
    return [(layers[0][1].matrix, [name for name, _ in layers]) for layers in in_order]


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a state dict has beside the packed layers, under the same names."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, PackedLinear):
            kept = {n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set}
            for name, tensor in {**module._parameters, **kept}.items():
                if tensor is not None:
                    found[f"{prefix}.{name}" if prefix else name] = tensor.detach()
    return found


# ---- loading


def load(model: BaseFairseqModel, file: PackedFile) -> None:
    """model: with uninitialised weights or any others."""
    tensors = file.load()
    counts = dict.fromkeys(FORMATS, 0)
    try:
        fill(model, file.contents, tensors)
        for layer in file.contents["layers"]:
            counts[layer["format"]] += len(layer["names"])
        precision = str(file.contents["precision"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:  # names, shapes, types
        raise file.damaged() from error
    finish(model, precision, counts)


def fill(model: nn.Module, contents: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors |= {name: tensors[known] for name, known in contents["shared"].items()}
    own_names = set()
    for number, layer in enumerate(contents["layers"]):
        part = {name: tensors.pop(f"{number}.{name}") for name in layer["tensors"]}
        install(model, layer["format"], layer["names"], part)
        own_names |= {f"{name}.{own}" for name in layer["names"] for own in ("weight", "bias")}
    missing, unexpected = nn.Module.load_state_dict(model, tensors, strict=False, assign=True)
    if unexpected or set(missing) - own_names:
        raise ValueError("other weights than the model's")
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.dtype == torch.float16:
            module.__class__ = HalfEmbedding


def install(model: nn.Module, kind: str, names: list[str], tensors: dict[str, Tensor]) -> None:
    """Replaces the linear layers of these names, which have the same input, by one packed matrix."""
    linears: list[Any] = [model.get_submodule(name) for name in names]
    rows, shapes = [x.out_features for x in linears], {(x.in_features, x.bias is not None) for x in linears}
    (width, has_bias), out = shapes.pop(), sum(rows)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if shapes or found != storage.expected(kind, out, width, has_bias) or {type(x) for x in linears} != {nn.Linear}:
        raise ValueError("other layers than the model's")
    matrix = storage.restore(kind, tensors, out, has_bias)
    for linear, bias in zip(linears, [] if matrix.bias is None else matrix.bias.split(rows)):
        linear.bias = nn.Parameter(bias, requires_grad=False)
    parent, names = names[0].rpartition(".")[0], [name.rpartition(".")[2] for name in names]
    replace_layers_by(matrix, model.get_submodule(parent), names)
