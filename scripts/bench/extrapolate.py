"""Extrapolates the time of a generation from the parts of it that were timed, where the whole takes too long.

Pure, so that a table can be made again from its records. Timed parts of a batch (see `parts.py`): its distinct
sources, which the rest of the batch repeats; the first step, which builds K and V; some steps after it; and some of
the last steps, with caches as long as they are by then. A step's cost grows linearly with the tokens before it:
attention to them and copies of them are proportional to their number, all else is constant.
"""

from statistics import median
from typing import Any

Parts = dict[str, Any]


def is_whole(parts: Parts) -> bool:
    """Whether every step was run."""
    return not parts["skipped"]


def step_at(parts: Parts, step: float) -> float:
    """Seconds of the step with index `step`, on the line through the timed ones."""
    ends = [line_end(parts[name]) for name in ("early", "late") if parts[name]]
    if len(ends) == 1:
        return ends[0][1]
    (first, before), (last, after) = ends
    return before + (after - before) * (step - first) / (last - first)


def line_end(timed: list[list[float]]) -> tuple[float, float]:
    """Medians of [step, seconds] pairs."""
    return median(step for step, _ in timed), median(seconds for _, seconds in timed)


def steps_seconds(parts: Parts) -> float:
    """Seconds of all steps but the first."""
    if is_whole(parts):
        return sum(seconds for name in ("early", "late") for _, seconds in parts[name])
    later = parts["steps"] - 1
    return later * step_at(parts, (later + 1) / 2)  # the mean of steps 1 to `later`, on a straight line


def source_seconds(parts: Parts, batch: int) -> float:
    """Seconds to encode the sources of a batch, or to prefill its prompts."""
    return batch * parts["source_seconds"] / parts["sources"] if parts["sources"] else 0.0


def batch_seconds(parts: Parts, batch: int) -> float:
    return source_seconds(parts, batch) + parts["first_seconds"] + steps_seconds(parts)
