"""The plots, as SVG files that don't change unless their contents do."""

import logging
from pathlib import Path
from typing import Any

from bench import pages, paper
from bench.environment import SYSTEMS
from bench.plan import Sizes, cells_of
from bench.report import Measured
from fairseq_el.errors import UserError

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of every font it looks at
try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError as error:
    raise UserError("plots need matplotlib, which is not installed: run `make install`") from error

# Colours that are told apart without red and green.
COLOURS = {"no-cache": "#999999", "copied": "#D55E00", "shared": "#E69F00", "shared-kernel": "#009E73", "el": "#0072B2"}
LARGEST_BUBBLE = 5000  # square points
matplotlib.rcParams |= {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6",
    "axes.axisbelow": True, "legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "fairseq_el",
}  # fmt: skip


def draw_all(folder: Path, sizes: Sizes, output: Path) -> None:
    """Plots of what was measured; one of which nothing was is an empty frame."""
    for draw in (peers, figure3, figure4):
        draw(folder, sizes).savefig(output / f"{draw.__name__}.svg", metadata={"Date": None})


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False).flat)


def peers(folder: Path, sizes: Sizes) -> Figure:
    """Seconds a text, exact systems and those of reduced precision apart in colour."""
    rows = [row for row in pages.peer_rows(Measured(folder, "peers"), pages.main_cells(sizes)) if row.seconds]
    rows.sort(key=lambda row: row.seconds.median)
    figure, (ax,) = new_figure(9, 1.2 + 0.32 * max(1, len(rows)))
    for place, row in enumerate(rows):
        kind, seconds = SYSTEMS[row.cell.system], row.seconds
        ax.barh(place, seconds.median, color=COLOURS["el" if kind.is_ours else "no-cache"],
                alpha=0.55 if kind.exact else 1.0,
                xerr=[[seconds.median - seconds.least], [seconds.most - seconds.median]])  # fmt: skip
        ax.annotate(f"{seconds.median:.3g}", (seconds.most, place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(rows)), [row.title for row in rows])
    ax.invert_yaxis()
    ax.set_xlabel("seconds per text; pale: reduced precision")
    return figure


def figure3(folder: Path, sizes: Sizes) -> Figure:
    from bench.operations import operation_costs

    (cell,), costs = cells_of(sizes, "figure3"), operation_costs(sizes.shape)
    timed = paper.timed_works(Measured(folder, "figure3"), cell)
    figure, (ax,) = new_figure(8.5, 5.6)
    longest = max((seconds.median for seconds in timed.values()), default=1.0)
    for name, seconds in timed.items():
        point, (group, owner) = (costs[name].bytes / 1e9, costs[name].flops / 1e9), name.split()
        area = LARGEST_BUBBLE * seconds.median / longest
        ax.scatter(*point, s=area, color=COLOURS.get(owner, COLOURS["no-cache"]), alpha=0.75, linewidths=0, zorder=3)
        ax.annotate(f"{group}, {owner}\n{1e3 * seconds.median:.3g} ms", point, xytext=(0, -(area**0.5) / 2 - 4),
                    textcoords="offset points", ha="center", va="top", fontsize=9)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="GB moved", ylabel="GFLOP")
    ax.margins(0.2)
    ax.set_title("Attention of one layer in one decoding step; areas are times", loc="left")
    return figure


def figure4(folder: Path, sizes: Sizes) -> Figure:
    rows = paper.figure4_rows(Measured(folder, "figure4"), sizes)
    figure, panels = new_figure(10, 4.6, columns=2)
    halves = ([(n, own) for n, beam, own in rows if beam == sizes.figure4[0][1]],
              sorted((beam, own) for n, beam, own in rows if n == sizes.figure4[-1][0]))  # fmt: skip
    for ax, points, title in zip(panels, halves, ("source length n (beam 4)", "beam (n = 1024)")):
        for form, label in paper.FORMS.items():
            if points:
                ax.plot([x for x, _ in points], [1e3 * own[form].median for _, own in points], "o-",
                        color=COLOURS[form], markersize=4, label=label)  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel=title)
        ax.set_xticks([x for x, _ in points], [str(x) for x, _ in points])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[0].set_ylabel("milliseconds per sentence")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
