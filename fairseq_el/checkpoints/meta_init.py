"""Meta init: builds models with uninitialised weights in the precision of a checkpoint, to be filled from it.

fairseq initialises a model in single precision, and then loads the checkpoint into it. For BART-large these are 1.6 GB
of random numbers beside the 0.8 GB of the checkpoint, and seconds to draw them.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairseq_el.checkpoints.huggingface.weights import ConvertedWeights
from fairseq_el.errors import UserError

Model = TypeVar("Model", bound=nn.Module)


def precision_of(weights: Mapping[str, Tensor]) -> torch.dtype:
    """Half precision if all weights are stored in it, else single. Scalars, such as versions, don't count."""
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point() and tensor.numel() > 1}
    return torch.float16 if dtypes == {torch.float16} else torch.float32


def build_on_meta(build: Callable[[], Model], dtype: torch.dtype) -> Model:
    """Builds the model with uninitialised weights, on the CPU.

    Models that hold tensors which no checkpoint has, such as computed positions, are initialised as usual.
    """
    try:
        with torch.device("meta"), NoCopies():
            model = build()
    except (NotImplementedError, RuntimeError):  # its constructor reads values, which meta tensors don't have
        return build()
    make_empty_attributes_real(model)
    from_checkpoint = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    if any(tensor.is_meta and id(tensor) not in from_checkpoint for tensor in held_by(model)):
        return build()
    return model.to(dtype).to_empty(device="cpu")


class NoCopies(TorchFunctionMode):
    """BART draws its random weights on the CPU, where meta tensors can't be copied to."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.cpu and args[0].is_meta:
            return args[0]
        if func in (Tensor.normal_, nn.init.normal_):
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.is_meta:
                return tensor  # torch would import its compiler for this no-op, which takes 0.8 s
        return func(*args, **(kwargs or {}))


def make_empty_attributes_real(model: nn.Module) -> None:
    """Such as masks, which fairseq's decoder fills when it needs them."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and not value.numel():
                setattr(module, name, torch.empty_like(value, device="cpu"))


def held_by(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers and plain attributes of all its modules."""
    held = [*model.parameters(), *model.buffers()]
    return held + [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]


@torch.no_grad()
def fill(model: nn.Module, weights: ConvertedWeights) -> None:
    """Copies weights into a model one at a time, so that there is no second copy of all of them."""
    parameters = model.state_dict()
    missing = set(parameters)
    for name, tensor in weights.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise UserError(f"the model has no weight {name} {list(tensor.shape)}: use its own config.json")
        parameters[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise UserError(f"the weights lack {min(missing)}, which the model has: use its own config.json")
