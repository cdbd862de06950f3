"""The experiment `figure3`: FLOPs against bytes of each group of operations, and the time it takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import table1
from bench.experiment import Comparison, Experiment, Loaded, loaded_here, time_interleaved
from bench.forms import GROUPS, GROUPS_OF, operation_costs, operations
from bench.generator import Record, select, spread
from bench.plots import COLOURS, Figure, new_figure, plain_number
from bench.report import giga, milliseconds, opening, table
from fairseq_el.models.costs import measure_machine

OWNERS = {
    "copied": "multi-head, K and V per beam",
    "shared": "multi-head, K and V shared by beams",
    "multi-head": "multi-head",
    "el": "EL",
}
SHORT_GROUPS = {"build": "K and V", "project": "query and output", "attend": "attention"}
SHORT_OWNERS = {"copied": "per beam", "shared": "shared by beams", "multi-head": "multi-head", "el": "EL"}
# From the paper's text, at this shape in half precision.
PAPER_GFLOP = {"build copied": "more than 500"}
PAPER_GB = {"attend copied": "about 0.5", "attend el": "0.15"}
V100_BALANCE = (10, 100)  # FLOP per byte, single and half precision, as the paper quotes it
SIGNIFICANTLY = 1.2
LARGEST_BUBBLE = 5000  # square points


@dataclass(frozen=True)
class Settings(table1.Settings):
    least_seconds: float = 0.1  # for one measurement of one group


QUICK = Settings(**vars(table1.QUICK), least_seconds=0.002)


def plan(settings: Settings) -> list[Comparison]:
    shape = settings.shape()
    return [Comparison({}, operation_costs(shape), lambda: operations(shape))]


def measure(settings: Settings, repeats: int, logs: Path) -> tuple[Loaded, list[Record]]:
    records = table1.count_operations(settings.shape())
    records += time_interleaved(plan(settings), repeats, settings.least_seconds)
    return loaded_here(), [*records, peaks(settings.beam)]


def peaks(beam: int) -> Record:
    """What this machine can do, as `auto` sees it."""
    machine = measure_machine(torch.device("cpu"), torch.float32, beam)
    return {
        "kind": "peaks",
        "flops_per_second": machine.flops_per_second,
        "bytes_per_second": machine.bytes_per_second,
    }


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    rows = []
    for name in operation_costs(settings.shape()):
        counted = select(records, kind="operation", work=name)[0]
        seconds = spread([r["seconds"] for r in select(records, kind="time", work=name)])
        rows.append(
            {
                "operation": name,
                "flops": counted["flops"],
                "bytes": counted["bytes"],
                "seconds": seconds,
                "flops_per_second": counted["flops"] / seconds["median"],
                "bytes_per_second": counted["bytes"] / seconds["median"],
            }
        )
    (machine,) = select(records, kind="peaks")
    balance = machine["flops_per_second"] / machine["bytes_per_second"]
    return {"operations": rows, "peaks": machine, "balance": balance, "steps": step_seconds(rows)}


def step_seconds(rows: list[dict]) -> dict[str, float]:
    median = {row["operation"]: row["seconds"]["median"] for row in rows}
    return {form: sum(median[name] for name in names) for form, names in GROUPS_OF.items() if form != "shared-kernel"}


def title_of(operation: str) -> str:
    group, owner = operation.split()
    return f"{GROUPS[group]}: {OWNERS[owner]}"


def render(results: dict[str, Any]) -> str:
    settings, made = results["settings"], results["figures"]
    return "\n\n".join(
        [
            *opening("Figure 3: FLOPs, bytes and time of operations", results),
            "![FLOPs against bytes of each group of operations; the area of a bubble is its time](figure3.png)",
            "### Operations\n\n"
            f"One layer, one step, batch {settings['batch']}, beam {settings['beam']}, n = {settings['length']}, "
            f"{settings['heads']} heads, d = {settings['width']}; the drawing is also there as [SVG](figure3.svg). "
            "FLOPs and bytes of matrix products are counted as in Table 1, in single precision; the paper's numbers, "
            "taken from its text, are for half precision, whose bytes are half of these. Times are of torch's own "
            "products, for all forms alike; fairseq_el has kernels of its own for attention, which are in Figure 4.",
            operations_table(made["operations"]),
            counts_sentence(made["operations"]),
            time_sentence(made),
        ]
    )


def operations_table(rows: list[dict]) -> str:
    header = ["operations", "GFLOP", "paper's GFLOP", "GB", "GB in half precision", "paper's GB", "FLOP per byte",
              "ms", "GFLOP/s", "GB/s"]  # fmt: skip
    cells = [
        [
            title_of(row["operation"]),
            giga(row["flops"]),
            PAPER_GFLOP.get(row["operation"], ""),
            giga(row["bytes"]),
            giga(row["bytes"] / 2),
            PAPER_GB.get(row["operation"], ""),
            f"{row['flops'] / row['bytes']:.2f}",
            milliseconds(row["seconds"]),
            f"{row['flops_per_second'] / 1e9:.1f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
        ]
        for row in rows
    ]
    return table(header, cells)


def counts_sentence(rows: list[dict]) -> str:
    found = {row["operation"]: row for row in rows}
    copied = found["attend copied"]
    return (
        f"The paper's arithmetic intensity of group 3, \"close to 1\" in its baseline, is "
        f"{copied['flops'] / (copied['bytes'] / 2):.2f} here in half precision and "
        f"{copied['flops'] / copied['bytes']:.2f} in single. Multi-head attention whose beams share K and V, which "
        "the paper doesn't have, moves "
        f"{found['attend shared']['bytes'] / copied['bytes']:.2f} of the baseline's bytes; EL moves "
        f"{found['attend el']['bytes'] / copied['bytes']:.2f} for {found['attend el']['flops'] / copied['flops']:.0f} "
        "times its arithmetic."
    )


def time_sentence(made: dict[str, Any]) -> str:
    steps = made["steps"]
    faster = {form: steps[form] / steps["el"] for form in ("no-cache", "copied", "shared")}
    against = (
        f"A step of EL (groups 2 and 3) is {faster['no-cache']:.1f} times as fast as one without cache, "
        f"{faster['copied']:.2f} times as fast as one with the cache copied per beam, and {faster['shared']:.2f} times "
        "as fast as one with the cache shared by beams. "
    )
    if faster["copied"] > SIGNIFICANTLY:
        return against + "The paper finds EL significantly faster than its baseline, and so do we."
    low, high = V100_BALANCE
    only = "; here that holds only without cache" if faster["no-cache"] > SIGNIFICANTLY else ", which is not so here"
    return against + (
        f"The paper finds EL significantly faster than its baseline, with and without cache{only}. The reason is "
        f"the machine's balance: this one does {made['balance']:.1f} FLOPs in the time it reads a byte, a V100 {low} "
        f"to {high}, so that EL's attention, bound by memory there, is bound by arithmetic here."
    )


def draw(results: dict[str, Any]) -> Figure:
    made = results["figures"]
    figure, (axes,) = new_figure(8.5, 5.6)
    longest = max(row["seconds"]["median"] for row in made["operations"])
    for row in made["operations"]:
        draw_bubble(axes, row, LARGEST_BUBBLE * row["seconds"]["median"] / longest)
    axes.set(xscale="log", yscale="log", xlabel="GB moved", ylabel="GFLOP")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: plain_number(value / 1e9))
    axes.margins(0.2)
    draw_balance(axes, made["balance"])
    axes.set_title("Attention of one layer in one decoding step; areas are times", loc="left")
    return figure


def draw_bubble(axes, row: dict[str, Any], area: float) -> None:
    """area: in square points, of the square around it."""
    group, owner = row["operation"].split()
    point = row["bytes"], row["flops"]
    axes.scatter(*point, s=area, color=COLOURS.get(owner, COLOURS["no-cache"]), alpha=0.75, linewidths=0, zorder=3)
    axes.plot(*point, marker=".", color="black", markersize=2, zorder=4)
    axes.annotate(
        f"{SHORT_GROUPS[group]},\n{SHORT_OWNERS[owner]}\n{duration(row['seconds']['median'])}",
        point,
        xytext=(0, -(area**0.5) / 2 - 4),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=9,
        zorder=5,
    )


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def draw_balance(axes, balance: float) -> None:
    """Below its line, a machine waits for memory; above it, for arithmetic."""
    (left, right), vertical = axes.get_xlim(), axes.get_ylim()
    low, high = V100_BALANCE
    axes.fill_between(
        [left, right],
        [low * left, low * right],
        [high * left, high * right],
        color="#e4e9dc",
        linewidth=0,
        label=f"balance of a V100: {low} to {high} FLOP per byte, single to half precision",
    )
    axes.plot(
        [left, right],
        [balance * left, balance * right],
        color="black",
        linewidth=1,
        label=f"balance of this machine: {balance:.1f}. Above it arithmetic is the limit, below it memory",
    )
    axes.set(xlim=(left, right), ylim=vertical)
    axes.legend(loc="upper left", fontsize=9)


EXPERIMENT = Experiment("figure3", Settings(), QUICK, measure, figures, render, draw)
