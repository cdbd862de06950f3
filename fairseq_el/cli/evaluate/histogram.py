"""Histograms of several series over common bins. No input, no output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MOST_BINS = 20
TAIL = 99  # per cent of the values; the rest is in the last bin


@dataclass(frozen=True)
class Histogram:
    """edges: of the bins, one more than there are bins. counts: of each series, by bin. is_open: if the last bin has
    all larger values too. middle: the median of each series."""

    title: str
    unit: str
    edges: list[float]
    counts: dict[str, list[int]]
    middle: dict[str, float]
    is_open: bool

    @classmethod
    def of(cls, title: str, unit: str, series: Mapping[str, Sequence[float]]) -> "Histogram":
        values = {name: np.asarray(column, dtype=float) for name, column in series.items()}
        pooled = np.concatenate(list(values.values()))
        low, high, top = pooled.min(), np.percentile(pooled, TAIL), pooled.max()
        width = round_up((high - low) / MOST_BINS)
        first, bins = np.floor(low / width), 0
        bins = max(1, int(np.floor(high / width) - first) + 1)
        if top == high == (first + bins - 1) * width and bins > 1:
            bins -= 1  # a bin for its lower edge alone, such as 100%
        edges = [float(edge) for edge in (first + np.arange(bins + 1)) * width]
        clipped = {name: np.clip(column, edges[0], edges[-1]) for name, column in values.items()}
        counts = {name: np.histogram(column, edges)[0].tolist() for name, column in clipped.items()}
        middle = {name: float(np.median(column)) for name, column in values.items()}
        return cls(title, unit, edges, counts, middle, bool(top > edges[-1]))

    @property
    def ticks(self) -> list[float]:
        """Round numbers among the edges, about six."""
        step = round_up((self.edges[-1] - self.edges[0]) / 6)
        return [edge for edge in self.edges if edge % step == 0]

    @property
    def largest(self) -> int:
        return max(max(column) for column in self.counts.values())


def round_up(width: float) -> float:
    """1, 2 or 5 times a power of ten; at least 1, for whole numbers."""
    power = 10 ** np.floor(np.log10(max(width, 1)))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= width))
