"""The plots, as SVG files that don't change unless their contents do."""

import logging
from pathlib import Path
from typing import Any

from bench import pages, paper
from bench.environment import OURS, SYSTEMS
from bench.plan import Sizes, cells_of
from bench.report import Measured
from fairseq_el.errors import UserError

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of every font it looks at
try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator
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
    for draw in (peers, table2, figure3, figure4):
        draw(folder, sizes).savefig(output / f"{draw.__name__}.svg", metadata={"Date": None})


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False).flat)


def plain_log_ticks(axis: Any) -> None:
    """1, 2, 5, 10, 20 and so on."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def peers(folder: Path, sizes: Sizes) -> Figure:
    """Seconds a text, exact systems and those of reduced precision apart in colour."""
    rows = [row for row in pages.peer_rows(Measured(folder, "peers"), pages.main_cells(sizes)) if row["seconds"]]
    rows.sort(key=lambda row: row["seconds"].median)
    figure, (ax,) = new_figure(9, 1.2 + 0.32 * max(1, len(rows)))
    for place, row in enumerate(rows):
        system, seconds = row["cell"].system, row["seconds"]
        colour = COLOURS["el" if system in OURS else "no-cache"]
        ax.barh(place, seconds.median, color=colour, alpha=0.55 if SYSTEMS[system].exact else 1.0,
                xerr=[[seconds.median - seconds.least], [seconds.most - seconds.median]])  # fmt: skip
        ax.annotate(f" {seconds.median:.3g}", (seconds.most, place), va="center")
    ax.set_yticks(range(len(rows)), [SYSTEMS[row["cell"].system].title for row in rows])
    ax.invert_yaxis()
    ax.set_xlabel("seconds per text; pale: reduced precision")
    return figure


def table2(folder: Path, sizes: Sizes) -> Figure:
    """Speed as multiples of the copied baseline's, beside the paper's."""
    measured, rows = Measured(folder, "table2"), []
    columns = ("copied", "stock", "always-fp32", "auto-fp32")
    for task in sizes.tasks:
        for search, kind in sorted(paper.planned(sizes, task.name)):
            found = paper.table2_seconds(measured, sizes, task.name, search, kind, columns)
            if found[0]:
                rows.append((task, search, kind, dict(zip(columns, found))))
    figure, (ax,) = new_figure(9, 1.6 + 0.5 * max(1, len(rows)))
    bars = ("stock", "shared", "stock 0.12"), ("always-fp32", "el", "always"), ("auto-fp32", "shared-kernel", "auto")
    for offset, (column, colour, label) in enumerate(bars):
        found = [(y, paper.ratio(own[column], own["copied"])) for y, (_, _, _, own) in enumerate(rows)]
        known = [(y, gain) for y, gain in found if gain]
        ax.barh([y + (offset - 1) * 0.25 for y, _ in known], [gain - 1 for _, gain in known], 0.25, left=1,
                color=COLOURS[colour], label=label)  # fmt: skip
    there = [(y, paper.TABLE2[t.name, s]["fp32"]) for y, (t, s, *_) in enumerate(rows) if (t.name, s) in paper.TABLE2]
    ax.plot([el / multi for _, (multi, el) in there], [y for y, _ in there], "D", color="black", markersize=5,
            label="paper: EL, V100")  # fmt: skip
    ax.axvline(1, color=COLOURS["copied"], linewidth=1.5, label="copied baseline")
    ax.set_xscale("log")
    plain_log_ticks(ax.xaxis)
    names = [f"{task.model.title}, {task.title}, {search}, {kind}" for task, search, kind, _ in rows]
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set_xlabel("times the speed of the copied baseline; fp32 weights")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def figure3(folder: Path, sizes: Sizes) -> Figure:
    (cell,) = cells_of(sizes, "figure3")
    counted = Measured(folder, "table1").of("table1/count/count")
    timed = paper.timed_works(Measured(folder, "figure3"), cell) if counted else {}
    figure, (ax,) = new_figure(8.5, 5.6)
    longest = max((seconds.median for seconds in timed.values()), default=1.0)
    for name, seconds in timed.items():
        own, (group, owner) = counted[0]["operations"][name], name.split()
        area = LARGEST_BUBBLE * seconds.median / longest
        point = own["bytes"], own["flops"]
        ax.scatter(*point, s=area, color=COLOURS.get(owner, COLOURS["no-cache"]), alpha=0.75, linewidths=0, zorder=3)
        ax.annotate(f"{group}, {owner}\n{1e3 * seconds.median:.3g} ms", point, xytext=(0, -(area**0.5) / 2 - 4),
                    textcoords="offset points", ha="center", va="top", fontsize=9)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="GB moved", ylabel="GFLOP")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value / 1e9:g}")
    ax.margins(0.2)
    ax.set_title("Attention of one layer in one decoding step; areas are times", loc="left")
    peaks = Measured(folder, "limits").of("limits/machine/peaks")
    if timed and peaks:
        draw_balance(ax, peaks[0]["peaks"]["float32"] / peaks[0]["peaks"]["memory"])
    return figure


def draw_balance(ax: Any, balance: float) -> None:
    """Below its line, a machine waits for memory; above it, for arithmetic."""
    (left, right), vertical = ax.get_xlim(), ax.get_ylim()
    low, high = paper.V100_BALANCE
    ax.fill_between([left, right], [low * left, low * right], [high * left, high * right], color="#e4e9dc", linewidth=0,
                    label=f"balance of a V100: {low} to {high} FLOP per byte, single to half precision")  # fmt: skip
    label = f"balance of this machine: {balance:.1f}. Above it arithmetic is the limit, below it memory"
    ax.plot([left, right], [balance * left, balance * right], color="black", linewidth=1, label=label)
    ax.set(xlim=(left, right), ylim=vertical)
    ax.legend(loc="upper left", fontsize=9)


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
