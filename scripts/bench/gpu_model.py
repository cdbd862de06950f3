"""A prediction of the paper's GPU figures from counted kernels and a roofline. No GPU is used.

A kernel takes as long as its launch, its arithmetic or its memory traffic, whichever is longest. How much of a device's
peaks kernels reach, and how long a launch takes the host, is fitted to the paper's baseline column alone: three numbers
for a precision, and one for the Python loop that GPT-2's baseline spends on each beam. The EL column is then a
prediction, and so are devices that the paper did not use.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu_counts import EARLY, LATE, Generation, Phase, count_generation
from bench.tasks import Task

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Device:
    """Peaks from NVIDIA's datasheets: matrix products (tensor cores in fp16, none in fp32), and memory."""

    name: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    source: str


DEVICES = (
    Device("V100 PCIe 16 GB", {"fp16": 112e12, "fp32": 14e12}, 900e9, 16e9, "V100 datasheet, January 2020"),
    Device("A100 SXM 40 GB", {"fp16": 312e12, "fp32": 19.5e12}, 1555e9, 40e9, "A100 datasheet, June 2021"),
    Device("H100 SXM 80 GB", {"fp16": 989e12, "fp32": 67e12}, 3350e9, 80e9, "H100 datasheet, 2023"),
)
V100 = DEVICES[0]

# Mean tokens of sources and outputs (section 4.3 of the paper), and the longest source that its settings allow.
LENGTHS = {"squad": (149, 12, 512), "xsum": (359, 21, 1024), "cnndm": (822, 58, 1024)}
PROMPT, NEW_TOKENS = 512, 200  # of GPT-2: articles are longer than the 512 tokens they are cut to
USABLE = 0.93  # of a device's memory: the rest is the driver's, and gaps between blocks
LARGEST_BATCH = 320  # the paper's largest


@dataclass(frozen=True)
class Efficiency:
    """Of a precision on one software stack."""

    launch: float  # seconds of the host for each kernel, read and upload
    arithmetic: float  # of the peak
    bandwidth: float
    beam_loop: float  # seconds of the host for each beam and step, in GPT-2's baseline and with more than one beam


def lengths_of(task: Task) -> tuple[int, int, int]:
    return (PROMPT, NEW_TOKENS, PROMPT) if task.model.is_language_model else LENGTHS[task.name]


# ---- memory


@functools.cache
def bytes_of_batch(task: Task, search: str, system: str, length: int, steps: int, dtype: str) -> tuple[float, float]:
    """Peak memory is a * batch + b; of its source's phase or of the last step, whichever is more at a large batch."""
    small, large = 4, 8
    found = []
    for batch in (small, large):
        counted = count_generation(task, search, batch, length, system, DTYPES[dtype])
        last = counted.early.peak + (counted.late.peak - counted.early.peak) * (steps - EARLY) / (LATE - EARLY)
        found.append((counted.source.peak, last))
    lines = [((b - a) / (large - small), a - small * (b - a) / (large - small)) for a, b in zip(*found)]
    return max(lines)


def largest_batch(task: Task, search: str, system: str, dtype: str, device: Device) -> int:
    """That fits with the longest sources, in steps of 32, or of 4 below."""
    _, steps, longest = lengths_of(task)
    search = "beam" if search == "diverse" else search  # the same state
    slope, fixed = bytes_of_batch(task, search, system, longest, steps, dtype)
    fits = int((USABLE * device.memory - fixed) / slope)
    step = 32 if fits >= 32 else 4
    return max(1, min(fits // step * step, LARGEST_BATCH))


# ---- time


@dataclass
class Workload:
    """Kernels of one generation as arrays, so that a fit can time it often."""

    flops: np.ndarray
    bytes: np.ndarray
    times: np.ndarray  # how often each runs
    launches: np.ndarray
    waits: float  # host reads and uploads
    beam_steps: float  # beams times steps of all sentences, where the host handles each

    @classmethod
    def of(cls, counted: Generation, steps: int, beam_steps: float) -> "Workload":
        """A step costs what the mean of an early and a late one does, at its place between them."""
        middle = (steps + 1) / 2
        late = steps * (middle - EARLY) / (LATE - EARLY)
        parts: list[tuple[Phase, float]] = [(counted.source, 1), (counted.early, steps - late), (counted.late, late)]
        kernels = [(k, n * weight) for phase, weight in parts for k, n in phase.kernels.items()]
        columns = zip(*((k.flops, k.bytes, n, k.launches) for k, n in kernels))
        flops, moved, times, launches = (np.array(column, dtype=float) for column in columns)
        return cls(flops, moved, times, launches, sum(p.reads * weight for p, weight in parts), beam_steps)

    def seconds(self, device: Device, dtype: str, reached: Efficiency) -> float:
        arithmetic = self.flops / (reached.arithmetic * device.flops[dtype])
        traffic = self.bytes / (reached.bandwidth * device.bandwidth)
        kernels = np.maximum(np.maximum(arithmetic, traffic), reached.launch * self.launches)
        return float(kernels @ self.times) + reached.launch * self.waits + reached.beam_loop * self.beam_steps


def workload(task: Task, search: str, system: str, dtype: str, batch: int) -> Workload:
    length, steps, _ = lengths_of(task)
    beam = task.beam(search)
    loops = task.model.is_language_model and beam > 1
    counted = count_generation(task, search, batch, length, system, DTYPES[dtype])
    return Workload.of(counted, steps, batch * beam * steps if loops else 0.0)


# ---- fit


def fit(error: Callable[[np.ndarray], float], start: np.ndarray, rounds: int = 60) -> np.ndarray:
    """Minimises by coordinates, in steps that shrink: three or four numbers need no more."""
    best, lowest, step = start.copy(), error(start), 1.0
    for _ in range(rounds):
        improved = False
        for place in range(len(best)):
            for direction in (-step, step):
                tried = best.copy()
                tried[place] += direction
                if (found := error(tried)) < lowest:
                    best, lowest, improved = tried, found, True
        if not improved:
            step /= 2
    return best


def fit_efficiency(rows: list[tuple[Workload, int, float]], dtype: str) -> Efficiency:
    """rows: of the baseline, the work of a batch, its sentences, and the paper's sentences per second."""

    def efficiency(logs: np.ndarray) -> Efficiency:
        launch, arithmetic, bandwidth, loop = np.exp(logs)
        return Efficiency(launch, min(arithmetic, 1.0), min(bandwidth, 1.0), loop)

    def error(logs: np.ndarray) -> float:
        reached = efficiency(logs)
        return sum(
            math.log(batch / work.seconds(V100, dtype, reached) / measured) ** 2 for work, batch, measured in rows
        )

    return efficiency(fit(error, np.log([1e-5, 0.4, 0.5, 1e-4])))
