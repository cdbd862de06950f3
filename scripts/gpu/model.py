"""A prediction of the paper's GPU figures from counted kernels and a roofline. No GPU is used.

A kernel takes as long as its launch, its arithmetic or its memory traffic, whichever is longest. How much of a device's
peaks kernels reach, and how long a launch takes the host, is fitted to the paper's baseline column alone: three numbers
for a precision, and one for the Python loop that GPT-2's baseline spends on each beam. The EL column is then a
prediction, and so are devices that the paper did not use.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.paper import TABLE2 as PAPER
from bench.paper import TABLE3 as PAPER_BATCHES
from bench.tasks import Task, all_lengths
from gpu.counts import EARLY, LATE, Generation, Phase, count_generation

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Device:
    """Peaks from NVIDIA's datasheets: matrix products (tensor cores in fp16, none in fp32), and memory."""

    name: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    source: str
    runs_triton: bool = True  # for EL-attention to H of width 1,024


DEVICES = (
    Device("V100 PCIe 16 GB", {"fp16": 112e12, "fp32": 14e12}, 900e9, 16e9, "V100 datasheet, January 2020", False),
    Device("A100 SXM 40 GB", {"fp16": 312e12, "fp32": 19.5e12}, 1555e9, 40e9, "A100 datasheet, June 2021"),
    Device("H100 SXM 80 GB", {"fp16": 989e12, "fp32": 67e12}, 3350e9, 80e9, "H100 datasheet, 2023"),
)
V100 = DEVICES[0]

# Mean tokens of sources and outputs, and the longest source that its settings allow (section 4 of the paper).
LENGTHS = {"squad": (149, 11.5, 512), "xsum": (359, 21.1, 1024), "cnndm": (822, 57.9, 1024)}
SPREAD = {"squad": "xsum_output", "xsum": "xsum_output", "cnndm": "cnndm_output"}  # how outputs differ in length
PROMPT, NEW_TOKENS = 512, 200  # of GPT-2: articles are longer than the 512 tokens they are cut to, and few outputs end
TIMES_BASELINE = 10
USABLE = 0.93  # of a device's memory: the rest is the driver's, and gaps between blocks
LEVELS = 16  # into which the steps of a batch are divided by how many sentences are still under way


@dataclass(frozen=True)
class Efficiency:
    """Of a precision on one software stack."""

    launch: float  # seconds of the host for each kernel, read and upload
    arithmetic: float  # of the peak
    bandwidth: float
    beam_loop: float  # seconds of the host for each beam and step, in GPT-2's baseline and with more than one beam


def source_lengths(task: Task) -> tuple[int, int]:
    """Mean and longest."""
    return (PROMPT, PROMPT) if task.model.is_language_model else (LENGTHS[task.name][0], LENGTHS[task.name][2])


def unfinished(task: Task, batch: int) -> list[tuple[float, float]]:
    """Steps of a batch as (how many, which share of its sentences is unfinished then). fairseq drops those that have
    finished; GPT-2's baseline keeps them."""
    if task.model.is_language_model:
        return [(NEW_TOKENS, 1.0)]
    spread = np.array(all_lengths(SPREAD[task.name]), dtype=float)
    outputs = np.quantile(spread * LENGTHS[task.name][1] / spread.mean(), (np.arange(batch) + 0.5) / batch)
    ends = np.concatenate([[0.0], outputs])
    # until the i-th shortest output ends, batch - i sentences are under way
    levels = [(ends[i + 1] - ends[i], (batch - i) / batch) for i in range(batch)]
    merged = np.array_split(np.array(levels), min(LEVELS, batch))
    return [(part[:, 0].sum(), float(np.average(part[:, 1], weights=part[:, 0] + 1e-9))) for part in merged]


# ---- memory


@functools.cache
def bytes_of_batch(task: Task, search: str, system: str, dtype: str) -> tuple[float, float]:
    """Peak memory with the longest sources is a * batch + b: of the source's phase, or of the last step."""
    steps = NEW_TOKENS if task.model.is_language_model else max(all_lengths(SPREAD[task.name]))
    small, large = 4, 8
    found = []
    for batch in (small, large):
        counted = count(task, search, batch, source_lengths(task)[1], system, dtype)
        last = counted.early.peak + (counted.late.peak - counted.early.peak) * (steps - EARLY) / (LATE - EARLY)
        found.append((counted.source.peak, last))
    lines = [((b - a) / (large - small), a - small * (b - a) / (large - small)) for a, b in zip(*found)]
    return max(lines)


@functools.cache
def count(task: Task, search: str, batch: int, length: int, system: str, dtype: str) -> Generation:
    """system: also `paper`, EL-attention in the implementation of the paper, which encodes sources as its baseline
    does, and GPT-2's prompts: transformers 3.0 computes logits of the whole prompt, for every beam."""
    if system != "paper":
        return count_generation(task, search, batch, length, system, DTYPES[dtype])
    counted = count_generation(task, search, batch, length, "always", DTYPES[dtype])
    return replace(counted, source=count(task, search, batch, length, "baseline", dtype).source)


def batch_size(task: Task, search: str, system: str, dtype: str, device: Device) -> int:
    """The largest that fits with the longest sources, in steps of 32, or of 4 below. For EL-attention in the paper, ten
    times the baseline's if that fits: the ratio in its Table 3, 320 to 32."""
    search = "beam" if search == "diverse" else search
    # GPT-2 begins as its baseline does; the paper does not say how it encodes 320 sources of 1,024 tokens in 16 GB
    measured = "always" if system == "paper" and not task.model.is_language_model else system
    slope, fixed = bytes_of_batch(task, search, measured, dtype)
    fits = int((USABLE * device.memory - fixed) / slope)
    if system == "paper":
        fits = min(fits, TIMES_BASELINE * batch_size(task, search, "baseline", dtype, device))
    step = 32 if fits >= 32 else 4
    return max(1, fits // step * step)


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
    def of(cls, counted: Generation, steps: list[tuple[float, float]], beam_steps: float) -> "Workload":
        """steps: how many, and with which share of the batch. The first one is counted as it is; for the others, one
        in the middle stands, on the line through an early and a late one."""
        total = sum(n for n, _ in steps)
        late = (total / 2 - EARLY) / (LATE - EARLY)
        parts: list[tuple[Phase, float, float]] = [(counted.source, 1.0, 1.0), (counted.first, 1.0, 1.0)]
        steps = [(steps[0][0] - 1, steps[0][1]), *steps[1:]]
        for n, share in steps:
            parts += [(counted.early, n * (1 - late), share), (counted.late, n * late, share)]
        rows = [
            (kernel.flops * share, kernel.bytes * share, times * weight, kernel.launches)
            for phase, weight, share in parts
            for kernel, times in phase.kernels.items()
        ]
        flops, moved, times, launches = np.array(rows, dtype=float).T
        return cls(flops, moved, times, launches, sum(p.reads * weight for p, weight, _ in parts), beam_steps)

    def seconds(self, device: Device, dtype: str, reached: Efficiency) -> float:
        arithmetic = self.flops / (reached.arithmetic * device.flops[dtype])
        traffic = self.bytes / (reached.bandwidth * device.bandwidth)
        kernels = np.maximum(np.maximum(arithmetic, traffic), reached.launch * self.launches)
        # of the line through two steps, one may count negatively
        return float(kernels @ self.times) + reached.launch * self.waits + reached.beam_loop * self.beam_steps


def workload(task: Task, search: str, system: str, dtype: str, batch: int) -> Workload:
    beam, steps = task.beam(search), unfinished(task, batch)
    counted = count(task, search, batch, source_lengths(task)[0], system, dtype)
    loops = task.model.is_language_model and beam > 1
    return Workload.of(counted, steps, batch * beam * NEW_TOKENS if loops else 0.0)


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
        launch, arithmetic, bandwidth, loop = (float(x) for x in np.exp(logs))
        return Efficiency(launch, min(arithmetic, 1.0), min(bandwidth, 1.0), loop)

    def error(logs: np.ndarray) -> float:
        reached = efficiency(logs)
        return sum(
            math.log(batch / work.seconds(V100, dtype, reached) / measured) ** 2 for work, batch, measured in rows
        )

    return efficiency(fit(error, np.log([1e-5, 0.4, 0.5, 1e-4])))


# ---- tables


def predict(tasks: tuple[Task, ...]) -> dict[str, Any]:
    """All rows of the paper's Tables 2 and 3, and other devices."""
    by_name = {task.name: task for task in tasks}
    efficiencies: dict[str, Efficiency] = {}
    table2 = {}
    for dtype in DTYPES:
        work = {}
        for name, search in PAPER:
            for system in ("baseline", "paper"):
                print(f"counting {name}, {search}, {dtype}, {system}", flush=True)
                batch = batch_size(by_name[name], search, system, dtype, V100)
                work[name, search, system] = workload(by_name[name], search, system, dtype, batch), batch
        baseline = [(*work[n, s, "baseline"], PAPER[n, s][dtype][0]) for n, s in PAPER]
        efficiencies[dtype] = fit_efficiency(baseline, dtype)
        table2[dtype] = [table2_row(n, s, dtype, work, efficiencies[dtype]) for n, s in PAPER]
    cnndm = by_name["cnndm"]
    return {
        "peaks": [asdict(device) for device in DEVICES],
        "efficiency": {dtype: asdict(e) for dtype, e in efficiencies.items()},
        "table2": table2,
        "table3": [table3_row(cnndm, batch, efficiencies["fp16"]) for batch in PAPER_BATCHES],
        "devices": [device_row(cnndm, device, efficiencies["fp16"]) for device in DEVICES],
    }


def table2_row(name: str, search: str, dtype: str, work: dict, reached: Efficiency) -> dict[str, Any]:
    speeds, batches = [], []
    for system in ("baseline", "paper"):
        load, batch = work[name, search, system]
        speeds.append(batch / load.seconds(V100, dtype, reached))
        batches.append(batch)
    paper = PAPER[name, search][dtype]
    speed_up = speeds[1] / speeds[0]
    return {
        "task": name, "search": search, "batch": batches, "baseline": speeds[0], "el": speeds[1], "paper": paper,
        "speed_up": speed_up, "error": speed_up / (paper[1] / paper[0]) - 1,
    }  # fmt: skip


def table3_row(task: Task, batch: int, reached: Efficiency) -> dict[str, Any]:
    row: dict[str, Any] = {"batch": batch, "paper": PAPER_BATCHES[batch]}
    for name, system in (("baseline", "baseline"), ("el", "paper")):
        slope, fixed = bytes_of_batch(task, "beam", "always" if system == "paper" else system, "fp16")
        row[f"{name}_bytes"] = slope * batch + fixed
        fits = row[f"{name}_bytes"] <= USABLE * V100.memory
        load = workload(task, "beam", system, "fp16", batch) if fits else None
        row[name] = batch / load.seconds(V100, "fp16", reached) if load else None
    return row


def device_row(task: Task, device: Device, reached: Efficiency) -> dict[str, Any]:
    def speed(system: str, batch: int) -> float:
        return batch / workload(task, "beam", system, "fp16", batch).seconds(device, "fp16", reached)

    small, large = (batch_size(task, "beam", system, "fp16", device) for system in ("baseline", "always"))
    return {
        "device": device.name, "batch": [small, large], "baseline": speed("baseline", small),
        "el": speed("always", large), "triton": speed("triton", large) if device.runs_triton else None,
    }  # fmt: skip
