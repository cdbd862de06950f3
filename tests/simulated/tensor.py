"""Tensors of the simulated device."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CUDA = torch.device("cuda", 0)


class SimulatedTensor(Tensor):
    """Says that it is on the device. `data_on_host` holds its numbers."""

    data_on_host: Tensor
    lease: "Lease"

    @staticmethod
    def __new__(cls, data: Tensor) -> "SimulatedTensor":
        wrapper = Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype, device=CUDA
        )
        wrapper.data_on_host = data
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on a tensor of a simulated device, outside of its `with` block")

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"SimulatedTensor({self.data_on_host})"

    def __deepcopy__(self, memo: dict) -> "SimulatedTensor":
        copy = SimulatedTensor(self.data_on_host.clone())
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy


class Lease:
    """Lives as long as the tensor that has it."""


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results of an operation, with the function applied to each. Torch's own `tree_map` is slower."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(function, part) for part in value)
    if isinstance(value, dict):
        return {name: mapped(function, part) for name, part in value.items()}
    return function(value)


def leaves_of(value: Any) -> list:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in leaves_of(part)] if isinstance(value, (tuple, list)) else [value]


def on_host(tensor: Any) -> Any:
    """The numbers of a tensor of the device, without counting a read; anything else as it is."""
    return tensor.data_on_host if isinstance(tensor, SimulatedTensor) else tensor


@functools.cache
def allow_cuda_in_cpu_builds() -> None:
    """Builds of torch without CUDA have no guard that switches between its devices, and raise where one is asked for.
    The meta device's guard, which does nothing, serves: it is entered in torch's table of guards."""
    table_type = ctypes.c_void_p * 22  # by c10::DeviceType
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = table_type.in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14
    if not guards[cuda]:
        guards[cuda] = guards[meta]
