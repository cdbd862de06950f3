"""The simulated device: runs operations on host memory, and counts them."""

import warnings
import weakref
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from simulated.calls import FusedAttention, HostCalls
from simulated.costs import (
    CPU_ONLY_NAMESPACES,
    INDEXING,
    LAUNCHES,
    READS,
    Kernel,
    calling_line,
    launches_kernel,
    moved_bytes,
)
from simulated.tensor import Lease, SimulatedTensor, allow_cuda_in_cpu_builds, leaves_of, mapped, on_host

aten = torch.ops.aten


class SimulatedDevice:
    """Counts what happens on it while it is entered. One at a time."""

    def __init__(self, fuses_attention: bool = True) -> None:
        """fuses_attention: whether torch's attention is one kernel, or, as in old releases, an operation for each
        product and the softmax."""
        allow_cuda_in_cpu_builds()
        self.fuses_attention = fuses_attention
        self.modes = (HostCalls(self), Operations(self))
        self.pretence = mock.patch.multiple(
            torch.cuda, _lazy_init=lambda: None, is_available=lambda: True, device_count=lambda: 1,
            current_device=lambda: 0, synchronize=lambda *device: None, get_device_capability=lambda *device: (8, 0),
            get_device_name=lambda *device: "simulated device", set_sync_debug_mode=self.set_sync_debug_mode,
        )  # fmt: skip
        self.attention = mock.patch.object(F, "scaled_dot_product_attention", FusedAttention(self))
        self.warns = False  # where the host waits
        self.users: Counter[int] = Counter()  # tensors that share a storage
        self.allocated = self.peak = 0  # bytes
        self.reset()

    def reset(self) -> None:
        self.kernels: Counter[Kernel] = Counter()
        self.lines: Counter[tuple[str, str]] = Counter()
        self.reads = self.uploads = 0
        self.peak = self.allocated

    @property
    def launches(self) -> int:
        return sum(kernel.launches * times for kernel, times in self.kernels.items())

    @property
    def flops(self) -> int:
        return sum(kernel.flops * times for kernel, times in self.kernels.items())

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes * times for kernel, times in self.kernels.items())

    def where(self, kind: str) -> dict[str, int]:
        """How many of a kind, `launch`, `read` or `upload`, come from which line, most frequent first."""
        return {line: times for (what, line), times in self.lines.most_common() if what == kind}

    def __enter__(self) -> "SimulatedDevice":
        self.pretence.start()
        self.attention.start()
        torch.__future__.set_swap_module_params_on_conversion(True)  # parameters change their class: `.data =` can't
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)
        torch.__future__.set_swap_module_params_on_conversion(False)
        self.attention.stop()
        self.pretence.stop()

    # ---- counting

    def set_sync_debug_mode(self, mode: str) -> None:
        self.warns = mode == "warn"

    def count_read(self) -> None:
        if self.warns:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        self.reads += 1
        self.lines["read", calling_line()] += 1

    def count_upload(self, data: Tensor) -> None:
        if data.numel():
            self.uploads += 1
            self.lines["upload", calling_line()] += 1

    def count_kernel(self, name: str, flops: int, moved: int, launches: int = 1) -> None:
        self.kernels[Kernel(name, flops, moved, launches)] += 1
        self.lines["launch", calling_line()] += launches

    # ---- memory

    def hold(self, data: Tensor) -> SimulatedTensor:
        """A tensor of the device with these numbers."""
        tensor, storage = SimulatedTensor(data), data.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self.users[key]:
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        self.users[key] += 1
        tensor.lease = Lease()  # what a module's parameters are swapped with must have no weak references itself
        weakref.finalize(tensor.lease, self._release, key, size)
        return tensor

    def _release(self, key: int, size: int) -> None:
        self.users[key] -= 1
        if not self.users[key]:
            self.allocated -= size

    # ---- operations

    def run(self, func, args: tuple, kwargs: dict) -> Any:
        """One of ATen's operations, whichever device it is for."""
        packet, leaves = func.overloadpacket, leaves_of((args, kwargs))
        ours = [leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)]
        target = kwargs.get("device")
        if target is not None and packet not in (aten._to_copy, aten.is_pinned):
            if torch.device(target).type == "cuda":
                return self.compute(func, args, {**kwargs, "device": torch.device("cpu")}, ours=[])
            if not ours:
                return func(*args, **kwargs)
        if packet is aten._to_copy:
            return self._convert(func, args[0], kwargs)
        if not ours:
            return func(*args, **kwargs)
        if packet is aten.copy_ and not (isinstance(args[0], SimulatedTensor) and isinstance(args[1], SimulatedTensor)):
            return self._copy_between(*args[:2])
        self._refuse(func, args, leaves)
        if packet in READS or self._reads_mask(packet, args, leaves):
            self.count_read()
            return self.read(func, args, kwargs, ours)
        return self.compute(func, args, kwargs, ours)

    def read(self, func, args: tuple, kwargs: dict, ours: list[SimulatedTensor]) -> Any:
        return self.compute(func, args, kwargs, ours)

    def compute(self, func, args: tuple, kwargs: dict, ours: list[SimulatedTensor]) -> Any:
        """ours: tensors among the arguments, which results of operations in place are."""
        data = self.numbers_of(func, leaves_of((args, kwargs)))

        def unwrapped(x: Any) -> Any:
            return data.get(id(x), x)

        host_args, host_kwargs = mapped(unwrapped, args), mapped(unwrapped, kwargs)
        out = host_operation(func, host_args, host_kwargs)
        results = [leaf for leaf in leaves_of(out) if isinstance(leaf, Tensor)]
        if launches_kernel(func) and any(result.numel() for result in results):
            count = flop_registry.get(func.overloadpacket)
            flops = count(*host_args, **host_kwargs, out_val=out) if count else 0
            moved = moved_bytes(func.overloadpacket, [data[id(t)] for t in ours], results)
            self.count_kernel(str(func.overloadpacket), flops, moved, LAUNCHES.get(func.overloadpacket, 1))
        known = {id(data[id(tensor)]): tensor for tensor in ours}

        def wrapped(x: Any) -> Any:
            return known[id(x)] if id(x) in known else self.hold(x) if isinstance(x, Tensor) else x

        return mapped(wrapped, out)

    def numbers_of(self, func, leaves: list) -> dict[int, Tensor]:
        """The host's tensors with which an operation is computed, by the id of those it is called with."""
        return {id(leaf): on_host(leaf) for leaf in leaves if isinstance(leaf, Tensor)}

    def _convert(self, func, x: Tensor, kwargs: dict) -> Tensor:
        """`to`: another precision, another device, or both."""
        is_ours = isinstance(x, SimulatedTensor)
        target = kwargs.pop("device", None) or x.device
        if torch.device(target).type == "cuda":
            if not is_ours:
                self.count_upload(x)
                return self.hold(func(x, **kwargs))
            return self.compute(func, (x,), kwargs, [x])
        if not is_ours:
            return func(x, **kwargs, device=target)
        self.count_read()
        return self.download(func(x.data_on_host, **kwargs))

    def download(self, data: Tensor) -> Tensor:
        return data.clone()

    def _copy_between(self, to: Tensor, source: Tensor) -> Tensor:
        if isinstance(to, SimulatedTensor):
            self.count_upload(source)
            to.data_on_host.copy_(source)
        else:
            self.count_read()
            to.copy_(self.download(on_host(source)))
        return to

    def _reads_mask(self, packet, args: tuple, leaves: list) -> bool:
        """Indexing by a mask on the device, except where ATen turns it into `masked_fill`."""
        masks = [x for x in leaves if isinstance(x, SimulatedTensor) and x.dtype in (torch.bool, torch.uint8)]
        if packet not in INDEXING or not any(mask is index for mask in masks for index in leaves_of(args[1])):
            return False
        value = args[2] if len(args) > 2 else None
        return not (isinstance(value, Tensor) and value.numel() == 1 and not isinstance(value, SimulatedTensor))

    def _refuse(self, func, args: tuple, leaves: list) -> None:
        if func.namespace in CPU_ONLY_NAMESPACES:
            raise RuntimeError(f"{func} has no CUDA kernel")
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, SimulatedTensor)]
        others = [tensor for tensor in others if tensor.dim() > 0]
        if others and func.overloadpacket in INDEXING and isinstance(args[0], SimulatedTensor):
            indices = {id(index) for index in leaves_of(args[1])}
            for index in [tensor for tensor in others if id(tensor) in indices]:
                self.count_upload(index)
            others = [tensor for tensor in others if id(tensor) not in indices]
        if others:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in others)
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} on cuda:0 with {shapes} on cpu")


class Operations(TorchDispatchMode):
    def __init__(self, device: SimulatedDevice):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.device.run(func, args, dict(kwargs or {}))


def host_operation(func, args: tuple, kwargs: dict) -> Any:
    """Runs an operation on host memory; those in half precision that only CUDA has, in single."""
    if func.overloadpacket in (aten._softmax, aten._log_softmax) and args[2]:  # half in, single out
        return func(args[0].float(), args[1], False)
    return func(*args, **kwargs)
