"""Cost model of attention: the paper's Table 1 as code, and the measured peaks of this machine.

A `Cost` is that of one layer and one decoding step (or one build) of a whole batch. A `Machine` turns it into seconds
by the roofline model: the larger of arithmetic and memory traffic.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_el.kernels import ops
from fairseq_el.kernels.formats import Padding


@dataclass(frozen=True)
class Cost:
    flops: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Shape:
    """Encoder-decoder attention of one layer: b sentences of n source tokens, x beams, h heads, width d."""

    batch: int
    beam: int
    length: int
    heads: int
    width: int
    element_size: int = 4

    # group 1: build key and value

    def build_key_value(self) -> Cost:
        """K = H W^K and V = H W^V, for all heads: O(n d^2) arithmetic a sentence."""
        b, n, d = self.batch, self.length, self.width
        return Cost(2 * 2 * b * n * d * d, self.element_size * (3 * b * n * d + 2 * d * d))

    # group 2: build query and output; the same arithmetic in both forms, up to a constant

    def project_multi_head(self) -> Cost:
        rows, d = self.batch * self.beam, self.width
        return Cost(2 * 2 * rows * d * d, self.element_size * (4 * rows * d + 2 * d * d))

    def project_el(self) -> Cost:
        """W^Q and W^O as before, W^K and W^V on the query side, and h queries of width d a row."""
        rows, h, d = self.batch * self.beam, self.heads, self.width
        return Cost(4 * 2 * rows * d * d, self.element_size * (4 * rows * d + 2 * rows * h * d + 4 * d * d))

    # group 3: scores, and the weighted sum

    def attend_multi_head(self, copied: bool = False) -> Cost:
        """O(x n d) arithmetic; K and V are read once, or once per beam where each beam has its own copy."""
        b, x, n, h, d = self.batch, self.beam, self.length, self.heads, self.width
        read = 2 * b * n * d * (x if copied else 1)
        return Cost(2 * 2 * b * x * n * d, self.element_size * (read + 2 * b * x * (d + h * n)))

    def attend_el(self) -> Cost:
        """O(h x n d) arithmetic; H is read once, whatever x and h. (Scores and weighted sum both read it, the second
        time from a cache; where caches are too small, as on a CPU, arithmetic takes longer anyway.)"""
        b, x, n, h, d = self.batch, self.beam, self.length, self.heads, self.width
        return Cost(2 * 2 * b * x * h * n * d, self.element_size * (b * n * d + 2 * b * x * h * (d + n)))

    # bytes of source state kept in memory

    def kept_states(self) -> int:
        """H, once for all layers."""
        return self.batch * self.length * self.width * self.element_size

    def kept_key_values(self, copied: bool = False) -> int:
        """K and V of one layer."""
        return 2 * self.kept_states() * (self.beam if copied else 1)


@dataclass(frozen=True)
class Machine:
    """Peaks of this machine, reached by this package's kernels on realistic shapes."""

    flops_per_second: float
    bytes_per_second: float
    el_flops_per_second: float  # of EL-attention's products with H, which have few rows

    def seconds(self, cost: Cost) -> float:
        return max(cost.flops / self.flops_per_second, cost.bytes / self.bytes_per_second)

    def el_step(self, shape: Shape) -> float:
        attend = shape.attend_el()
        products = max(attend.flops / self.el_flops_per_second, attend.bytes / self.bytes_per_second)
        return self.seconds(shape.project_el()) + products

    def multi_head_step(self, shape: Shape) -> float:
        return self.seconds(shape.project_multi_head()) + self.seconds(shape.attend_multi_head())

    def build(self, shape: Shape) -> float:
        return self.seconds(shape.build_key_value())


def median_seconds(work: Callable[[], object], synchronise: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        synchronise()
        start = time.perf_counter()
        work()
        synchronise()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


@functools.cache
def measure_machine(device: torch.device, dtype: torch.dtype, beam: int = 4) -> Machine:
    """Measures the peaks in about 0.2 s; once per process, device, precision and beam size."""
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    b, h, x, n, d_k = 8, 16, beam, 1024, 64
    make = functools.partial(torch.ones, device=device, dtype=dtype)
    states, weight = make(b, n, h * d_k), make(h * d_k, h * d_k)
    queries, rows = make(b, h * x, h * d_k), make(b, x, h * d_k)
    # K and V together are larger than the caches of most CPUs, as the real ones are
    key_values = states.view(b, h, d_k, n), make(b, h, d_k, n)
    padding = Padding.of(states, None)

    def el() -> object:
        return ops.el_attention(queries, states, padding)

    def multi_head() -> object:
        return ops.decoder_attention(rows, h, 1.0, key_values, padding)

    def build() -> Tensor:
        return torch.bmm(weight.unsqueeze(0), states[:1].mT)

    el(), multi_head(), build()  # first calls set up threads and kernels
    el_flops = 2 * 2 * b * h * x * n * h * d_k / median_seconds(el, synchronise)
    read = 2 * states.numel() * states.element_size() / median_seconds(multi_head, synchronise)
    flops = 2 * n * (h * d_k) ** 2 / median_seconds(build, synchronise)
    return Machine(flops, read, el_flops)


def bytes_per_sentence(
    shape: Shape,
    layers: int,
    output_length: int = 0,
    form: str = "always",
    copied: bool = False,
    layers_with_states: int = 1,
) -> int:
    """State of one sentence during generation.

    form: `always` (H alone) or `never` (H, and K and V of all layers). The state of the beams counts for
    `output_length` steps. A language model keeps states of its prompt in each of `layers_with_states`, not one H
    for all layers.
    """
    one = Shape(1, shape.beam, shape.length, shape.heads, shape.width, shape.element_size)
    source = layers_with_states * one.kept_states() + (layers * one.kept_key_values(copied) if form == "never" else 0)
    return source + 2 * layers * shape.beam * output_length * shape.width * shape.element_size


def largest_batch(shape: Shape, layers: int, budget: int, output_length: int = 0, **options: Any) -> int:
    """Largest number of sentences whose state fits a budget in bytes; 0 if not even one does.

    options: of `bytes_per_sentence`.
    """
    return budget // bytes_per_sentence(shape, layers, output_length, **options)
