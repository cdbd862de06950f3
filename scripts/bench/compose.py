"""A generation put together from parts that were timed, where the whole takes too long.

Pure, so that a table can be made again from its records. What is timed of a batch (see `parts.py`): its distinct
sources, which the rest of the batch repeats; the first step, in which K and V are built; some steps after it; some
of the last steps, with a state as large as it is by then. A step's cost grows with the tokens before it, in a
straight line: attention to them and copies of them are proportional to their number, all else is constant.
"""

from statistics import median
from typing import Any

Parts = dict[str, Any]


def is_whole(parts: Parts) -> bool:
    """Whether every step was run."""
    return not parts["skipped"]


def step_at(parts: Parts, place: float) -> float:
    """Seconds of the step that has so many steps before it."""
    ends = [line_end(parts[name]) for name in ("early", "late") if parts[name]]
    if len(ends) == 1:
        return ends[0][1]
    (first, before), (last, after) = ends
    return before + (after - before) * (place - first) / (last - first)


def line_end(timed: list[list[float]]) -> tuple[float, float]:
    """timed: [step, seconds] pairs; their medians."""
    return median(step for step, _ in timed), median(seconds for _, seconds in timed)


def steps_seconds(parts: Parts) -> float:
    """Of all steps but the first."""
    if is_whole(parts):
        return sum(seconds for name in ("early", "late") for _, seconds in parts[name])
    later = parts["steps"] - 1
    return later * step_at(parts, (later + 1) / 2)  # the mean of places 1 to `later`, on a straight line


def source_seconds(parts: Parts, batch: int) -> float:
    """To encode the sources of a batch, or to read its prompts."""
    return batch * parts["source_seconds"] / parts["sources"] if parts["sources"] else 0.0


def batch_seconds(parts: Parts, batch: int) -> float:
    return source_seconds(parts, batch) + parts["first_seconds"] + steps_seconds(parts)
