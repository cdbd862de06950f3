"""The simulated device without arithmetic, to count what a model too large for this machine would do."""

from typing import Any

import torch
from torch import Tensor

from simulated.device import SimulatedDevice, aten
from simulated.tensor import SimulatedTensor, on_host


class ShapesOnlyDevice(SimulatedDevice):
    """Tensors of floating-point numbers have a shape alone, and so has everything computed from them. Integers, such as
    tokens and lengths, are kept. A read of numbers that are not there finds a fixed answer."""

    def hold(self, data: Tensor) -> SimulatedTensor:
        return super().hold(data.to("meta") if data.is_floating_point() else data)

    def numbers_of(self, func, leaves: list) -> dict[int, Tensor]:
        numbers = super().numbers_of(func, leaves)
        if not any(tensor.is_meta for tensor in numbers.values()):
            return numbers
        if func.overloadpacket is aten.copy_ and not on_host(leaves[0]).is_meta:
            on_host(leaves[0]).zero_()  # what it gets is not known; tokens must not stay padding
        return {key: tensor if tensor.is_meta else tensor.to("meta") for key, tensor in numbers.items()}

    def read(self, func, args: tuple, kwargs: dict, ours: list[SimulatedTensor]) -> Any:
        """No condition holds for `any`, all hold for `all`, and a mask selects nothing."""
        if not any(on_host(tensor).is_meta for tensor in ours):
            return super().read(func, args, kwargs, ours)
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense:
            return getattr(args[0], "answer", 0)
        if packet is aten.equal:
            return True
        if packet in (aten.index_put_, aten.index_put):
            return args[0]
        like = on_host(args[0])
        shape = like.shape[1:] if packet is aten.index else ()
        return self.hold(torch.empty(0, *shape, dtype=like.dtype, device="meta"))

    def compute(self, func, args: tuple, kwargs: dict, ours: list[SimulatedTensor]) -> Any:
        out = super().compute(func, args, kwargs, ours)
        if func.overloadpacket in (aten.any, aten.all):
            out.answer = int(func.overloadpacket is aten.all)
        return out

    def download(self, data: Tensor) -> Tensor:
        return torch.zeros(data.shape, dtype=data.dtype) if data.is_meta else super().download(data)
