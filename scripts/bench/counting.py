"""FLOPs and bytes of a piece of work, counted while it runs."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fairseq_el.kernels import build


class Traffic(TorchDispatchMode):
    """Adds up the bytes that each operation reads and writes, as if nothing stayed in a cache.

    `products` are those of matrix products, which is what formulas count; `everything` adds softmax, scaling,
    and tensors that are sorted anew. Views move nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.everything = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read, written = tensors_in((args, kwargs)), tensors_in(out)
        if not (allocates_only(func) or is_view(func, read, written)):
            moved = sum(occupied_bytes(tensor) for tensor in read + written)
            self.everything += moved
            if func._overloadpacket in flop_registry:
                self.products += moved
        return out


def tensors_in(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def allocates_only(func) -> bool:
    return func._overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like)


def is_view(func, read: list[Tensor], written: list[Tensor]) -> bool:
    """Whether the result shares memory with an argument and nothing was written."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in read}
    shares = all(tensor.untyped_storage().data_ptr() in storages for tensor in written)
    return shares and not func._schema.is_mutable


def occupied_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension repeats the same ones."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def count(work: Callable[[], object]) -> dict[str, int]:
    """FLOPs by torch's counter, bytes by ours."""
    # torch's counter knows neither our kernels nor the fused attention of CPUs, but the products they stand for
    by_torch = mock.patch.object(build, "library", return_value=None)
    with by_torch, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops, Traffic() as traffic:
        work()
    return {
        "flops": flops.get_total_flops(),
        "bytes": traffic.products,
        "all_bytes": traffic.everything,
    }
