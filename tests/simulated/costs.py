"""What ATen's operations cost on a CUDA device: launches, host reads and bytes, for the simulated device."""

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

aten = torch.ops.aten

READS = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique,
    aten._unique2, aten.unique_consecutive, aten.is_nonzero, aten.allclose, aten.repeat_interleave, aten.bincount,
}  # fmt: skip
"""The host waits: for a number, or for the size of a result."""

WITHOUT_KERNEL = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.lift_fresh,
    aten.resize_, aten.set_, aten._unsafe_view, aten._reshape_alias, aten.detach, aten.is_pinned,
}  # fmt: skip
READ_WHAT_THEY_WRITE = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.index_put_}
"""Of their input only the rows that an index names."""
LAUNCHES = {aten.logsumexp: 9}  # amax, abs, eq, masked_fill, sub, exp, sum, log, add
INDEXING = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_, aten._unsafe_index}
CPU_ONLY_NAMESPACES = ("mkldnn", "mkl", "quantized", "onednn", "_quantized")


@dataclass(frozen=True)
class Kernel:
    """A launch: what it is, and what it costs."""

    name: str
    flops: int
    bytes: int
    launches: int = 1


@functools.cache
def launches_kernel(func) -> bool:
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not is_view and func.overloadpacket not in WITHOUT_KERNEL


def unique_bytes(tensor: Tensor) -> int:
    """Bytes in memory: an expanded dimension counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
    return math.prod(sizes) * tensor.element_size()


def moved_bytes(packet, inputs: list[Tensor], results: list[Tensor]) -> int:
    """Inputs are read and results written, once each."""
    written = sum(map(unique_bytes, results))
    if packet in READ_WHAT_THEY_WRITE:
        if packet is aten.index_put_:  # only the values and the indices, not the tensor they go to
            return 2 * sum(map(unique_bytes, inputs[1:]))
        return 2 * written + sum(map(unique_bytes, inputs[1:]))
    changed = {id(result) for result in results}
    only_written = packet in (aten.fill_, aten.zero_, aten.copy_)
    return written + sum(unique_bytes(x) for x in inputs if not (only_written and id(x) in changed))


def calling_line() -> str:
    """The innermost line of fairseq or of fairseq_el; else of whoever calls."""
    frame, outer = sys._getframe(2), None
    while frame is not None:
        name, in_project, in_torch = describe_file(frame.f_code.co_filename)
        if in_project:
            return f"{name}:{frame.f_lineno}"
        if outer is None and not in_torch:
            outer = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return outer or "?"


@functools.cache
def describe_file(file: str) -> tuple[str, bool, bool]:
    """Its folder and name; whether it is part of fairseq or fairseq_el; whether of torch or of this simulation."""
    path = Path(file)
    in_project = not {"fairseq", "fairseq_el"}.isdisjoint(path.parts)
    return f"{path.parent.name}/{path.name}", in_project, "torch" in path.parts or path.parent.name == "simulated"
