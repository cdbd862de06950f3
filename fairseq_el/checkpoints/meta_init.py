"""Models built to be filled from a checkpoint: in its precision, and without weights of their own before.

fairseq builds a model with random weights in single precision, and then loads those of the checkpoint into it. For
BART-large these are 1.6 GB beside the 0.8 GB of the checkpoint, and seconds of drawing random numbers.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Model = TypeVar("Model", bound=nn.Module)


def precision_of(weights: Mapping[str, Tensor]) -> torch.dtype:
    """Half precision where all weights are in it, else single. Single numbers, such as versions, don't count."""
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point() and tensor.numel() > 1}
    return torch.float16 if dtypes == {torch.float16} else torch.float32


def build_vacant(build: Callable[[], Model], dtype: torch.dtype) -> Model:
    """What `build` builds, on the CPU, with room for weights but none in it; for models that hold anything that
    no checkpoint has, such as computed positions, the model as it is built."""
    try:
        with torch.device("meta"), NoCopies():
            model = build()
    except (NotImplementedError, RuntimeError):  # its constructor looks at numbers, and here are none
        return build()
    make_empty_attributes_real(model)
    from_checkpoint = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    if any(tensor.is_meta and id(tensor) not in from_checkpoint for tensor in held_by(model)):
        return build()
    return model.to(dtype).to_empty(device="cpu")


class NoCopies(TorchFunctionMode):
    """BART draws its random weights in a copy on the CPU, which tensors without numbers can't have."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.cpu and args[0].is_meta:
            return args[0]
        if func in (Tensor.normal_, nn.init.normal_):
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.is_meta:
                return tensor  # torch would import its compiler for this no-op, which takes 0.8 s
        return func(*args, **(kwargs or {}))


def make_empty_attributes_real(model: nn.Module) -> None:
    """Those that fairseq's decoder fills when it needs them, such as masks."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and not value.numel():
                setattr(module, name, torch.empty_like(value, device="cpu"))


def held_by(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers and plain attributes of all its modules."""
    held = [*model.parameters(), *model.buffers()]
    return held + [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
