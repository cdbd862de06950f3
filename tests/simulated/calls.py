"""Calls of torch that don't reach the dispatcher as they would on a machine with CUDA."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from simulated.costs import unique_bytes
from simulated.tensor import CUDA, SimulatedTensor, leaves_of, mapped, on_host

if TYPE_CHECKING:
    from simulated.device import SimulatedDevice


class HostCalls(TorchFunctionMode):
    """Methods of tensors, and functions with a device among their arguments."""

    def __init__(self, device: "SimulatedDevice"):
        super().__init__()
        self.device = device
        self.own = {
            Tensor.cuda: self.cuda, Tensor.tolist: self.tolist, Tensor.numpy: self.numpy,
            Tensor.data_ptr: self.data_ptr, Tensor.pin_memory: self.pin_memory, Tensor.__getitem__: self.getitem,
            Tensor.__setitem__: self.setitem, torch.tensor: self.new_tensor,
        }  # fmt: skip

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.own:
            return self.own[func](func, *args, **kwargs)
        if any(isinstance(value, (str, torch.device)) for value in (*args[:3], *kwargs.values())):
            args, kwargs = mapped(with_index, args), mapped(with_index, kwargs)
        return func(*args, **kwargs)

    def cuda(self, func, x: Tensor, *device, **options) -> Tensor:
        return x.to(CUDA)

    def new_tensor(self, func, data: Any, device: Any = None, **options) -> Tensor:
        tensor = func(data, **options)
        return tensor if device is None else tensor.to(with_index(device))

    def tolist(self, func, x: Tensor) -> Any:
        if isinstance(x, SimulatedTensor):
            x = x.cpu()
        return func(x)

    def numpy(self, func, x: Tensor, **options) -> Any:
        if isinstance(x, SimulatedTensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return func(x, **options)

    def data_ptr(self, func, x: Tensor) -> int:
        if isinstance(x, SimulatedTensor):
            raise RuntimeError("data_ptr() of a CUDA tensor: a CPU kernel would crash")
        return func(x)

    def pin_memory(self, func, x: Tensor, *device) -> Tensor:
        return x

    def getitem(self, func, x: Tensor, index) -> Tensor:
        return func(x, self._with_tensors(x, index))

    def setitem(self, func, x: Tensor, index, value) -> None:
        func(x, self._with_tensors(x, index), value)

    def _with_tensors(self, x: Tensor, index):
        """Lists of numbers become tensors on the device."""
        if not isinstance(x, SimulatedTensor):
            return index
        if isinstance(index, tuple):
            return tuple(self._with_tensors(x, part) for part in index)
        return torch.tensor(index).to(CUDA) if isinstance(index, list) else index


class FusedAttention:
    """`F.scaled_dot_product_attention`, which torch's other functions call too: one kernel on CUDA. A mask of booleans
    is first turned into numbers (zeros, and where)."""

    def __init__(self, device: "SimulatedDevice"):
        self.device = device
        self.original = F.scaled_dot_product_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args, **options) -> Tensor:
        tensors = [query, key, value, *(t for t in leaves_of((args, options)) if isinstance(t, Tensor))]
        if not self.device.fuses_attention or not any(isinstance(t, SimulatedTensor) for t in tensors):
            return self.original(query, key, value, *args, **options)
        if not all(isinstance(t, SimulatedTensor) for t in tensors):
            raise RuntimeError("Expected all tensors to be on the same device: scaled_dot_product_attention")
        data = [on_host(t) for t in tensors]
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            out = self.original(*data[:3], *mapped(on_host, args), **mapped(on_host, options))
        for mask in (mask for mask in data[3:] if mask.dtype == torch.bool):
            self.device.count_kernel("mask of attention", 0, 5 * unique_bytes(mask), launches=2)
        moved = sum(map(unique_bytes, (*data, out)))
        self.device.count_kernel("scaled_dot_product_attention", 4 * query.numel() * key.size(-2), moved)
        return self.device.hold(out)


def with_index(value: Any) -> Any:
    """ATen asks the driver for the current device where none is named; there is no driver."""
    if isinstance(value, str) and value == "cuda":
        return CUDA
    return CUDA if isinstance(value, torch.device) and value.type == "cuda" and value.index is None else value
