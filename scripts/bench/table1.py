"""The experiment `table1`: FLOPs and bytes of attention's three groups of operations, by formula and counted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiment import Experiment, Loaded, count_each, loaded_here
from bench.forms import FORMS, GROUPS, GROUPS_OF, operation_costs, operations, whole_costs, whole_steps
from bench.generator import Record, first, select
from bench.report import giga, opening, table
from fairseq_el.models.costs import Cost, Shape


@dataclass(frozen=True)
class Settings:
    """The paper's shape for its analysis on synthetic data, of which Figure 3 is."""

    batch: int = 32
    beam: int = 4
    length: int = 1024
    heads: int = 16
    width: int = 1024

    def shape(self) -> Shape:
        return Shape(self.batch, self.beam, self.length, self.heads, self.width)


QUICK = Settings(batch=2, beam=4, length=32, heads=4, width=64)


@dataclass(frozen=True)
class Line:
    """A line of the paper's table, in a form that fairseq has. `operation` is None where there is nothing to
    do; what then remains of `step`, less its other groups, is counted for it."""

    group: str
    form: str
    compute: str
    memory: str
    operation: str | None = None
    step: str | None = None


LINES = [
    Line("build", "multi-head, no cache, per beam", "n d²", "n d", "build copied"),
    Line("build", "multi-head, no cache, once for all beams", "n d²", "n d", "build shared"),
    Line("build", "multi-head, cache copied per beam, later steps", "0", "n d", step="copied"),
    Line("build", "multi-head, cache shared by beams, later steps", "0", "n d", step="shared"),
    Line("build", "EL", "0", "0", step="el"),
    Line("project", "multi-head", "d²", "d", "project multi-head"),
    Line("project", "EL", "d²", "h d", "project el"),
    Line("attend", "multi-head, cache copied per beam", "x n d", "x n d", "attend copied"),
    Line("attend", "multi-head, cache shared by beams", "x n d", "x n d", "attend shared"),
    Line("attend", "EL", "h x n d", "n d + h x d", "attend el"),
]
COUNTED_STEPS = ("no-cache", "copied", "shared", "el")  # torch sees nothing of a kernel of ours


def measure(settings: Settings, repeats: int, logs: Path) -> tuple[Loaded, list[Record]]:
    """Counting needs one run of each piece of work, whatever `repeats`."""
    return loaded_here(), count_operations(settings.shape()) + count_steps(settings.shape())


def count_operations(shape: Shape) -> list[Record]:
    return count_each("operation", operations(shape), operation_costs(shape))


def count_steps(shape: Shape) -> list[Record]:
    works = whole_steps(shape)
    return count_each("step", {form: works[form] for form in COUNTED_STEPS}, whole_costs(shape))


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    costs, steps = operation_costs(settings.shape()), whole_costs(settings.shape())
    lines = [line_row(line, costs, records) for line in LINES]
    whole = [
        {"form": form, **row_of(steps[form], *select(records, kind="step", work=form))} for form in COUNTED_STEPS
    ]
    return {"lines": lines, "steps": whole}


def line_row(line: Line, costs: dict[str, Cost], records: list[Record]) -> dict[str, Any]:
    named = {"group": line.group, "form": line.form, "paper_compute": line.compute, "paper_memory": line.memory}
    if line.operation:
        counted = select(records, kind="operation", work=line.operation)[0]
        return named | row_of(costs[line.operation], counted)
    return named | row_of(Cost(0, 0), remainder(line.step, records))


def remainder(form: str, records: list[Record]) -> Record:
    """What a whole step does beyond the groups that it is known to do."""
    step = select(records, kind="step", work=form)[0]
    groups = [select(records, kind="operation", work=name)[0] for name in GROUPS_OF[form]]
    return {name: step[name] - sum(g[name] for g in groups) for name in ("flops", "bytes")} | {"all_bytes": None}


def row_of(formula: Cost, counted: Record) -> dict[str, Any]:
    return {
        "flops": formula.flops,
        "bytes": formula.bytes,
        "counted_flops": counted["flops"],
        "counted_bytes": counted["bytes"],
        "counted_all_bytes": counted["all_bytes"],
    }


def render(results: dict[str, Any]) -> str:
    settings, made = results["settings"], results["figures"]
    shape = (
        f"batch {settings['batch']}, beam x = {settings['beam']}, n = {settings['length']}, h = "
        f"{settings['heads']} heads, d = {settings['width']}, single precision"
    )
    return "\n\n".join(
        [
            *opening("Table 1: operations of attention", results),
            "### Three groups of operations\n\n"
            f"One layer's encoder-decoder attention in one decoding step: {shape}. `paper` is the order of growth "
            "that the paper's Table 1 gives, for one sentence. The formula is that of `fairseq_el/models/costs.py`; "
            "FLOPs are counted by torch's flop counter while the operations run, bytes from the tensors that each "
            "operation reads and writes: of matrix products alone, as in the formula, and of all operations. "
            "Lines with nothing to do are counted as what a whole step does beyond its other groups.",
            lines_table(made["lines"]),
            flops_sentence(made["lines"] + made["steps"]),
            bytes_sentence(made["lines"]),
            paper_sentence(settings, made["lines"]),
            "### A whole step\n\n"
            "The sum of its groups, beside what is counted while fairseq's own class (for EL, ours) runs.",
            steps_table(made["steps"]),
        ]
    )


def lines_table(rows: list[dict]) -> str:
    header = ["operations", "paper: compute", "GFLOP, formula", "GFLOP, counted", "paper: memory", "GB, formula",
              "GB, counted", "GB, all operations", "FLOP per byte"]  # fmt: skip
    cells = [
        [
            f"{GROUPS[row['group']]}: {row['form']}",
            order(row["paper_compute"]),
            giga(row["flops"]),
            giga(row["counted_flops"]),
            order(row["paper_memory"]),
            giga(row["bytes"]),
            giga(row["counted_bytes"]),
            "" if row["counted_all_bytes"] is None else giga(row["counted_all_bytes"]),
            f"{row['counted_flops'] / row['counted_bytes']:.2f}" if row["counted_bytes"] else "",
        ]
        for row in rows
    ]
    return table(header, cells)


def order(growth: str) -> str:
    return growth if growth == "0" else f"O({growth})"


def steps_table(rows: list[dict]) -> str:
    cells = [
        [FORMS[row["form"]]]
        + [giga(row[name]) for name in ("flops", "counted_flops", "bytes", "counted_bytes", "counted_all_bytes")]
        for row in rows
    ]
    header = ["form", "GFLOP, formula", "GFLOP, counted", "GB, formula", "GB, counted", "GB, all operations"]
    return table(header, cells)


def flops_sentence(rows: list[dict]) -> str:
    apart = [row["form"] for row in rows if row["flops"] != row["counted_flops"]]
    if not apart:
        return "Counted FLOPs equal the formula's in every line, to the last one."
    return f"Counted FLOPs differ from the formula's in: {', '.join(apart)}."


def bytes_sentence(rows: list[dict]) -> str:
    el, build = (
        first([row for row in rows if (row["group"], row["form"]) == line], "counted_bytes")
        / first([row for row in rows if (row["group"], row["form"]) == line], "bytes")
        for line in (("attend", "EL"), ("build", "multi-head, no cache, once for all beams"))
    )
    return (
        f"Counted bytes exceed the formula's where two products read the same H: {el:.2f} times in EL's attention, "
        f"{build:.2f} times in building K and V. The formula counts H once, for the second time it can come from a "
        "cache; the paper's figures count it twice."
    )


def paper_sentence(settings: dict, rows: list[dict]) -> str:
    per_beam, once = (row["counted_flops"] for row in rows[:2])
    weights = 2 * settings["width"] ** 2 * 4
    project = first([row for row in rows if row["group"] == "project"], "counted_bytes")
    return (
        "Where the paper's orders and these numbers part: group 1 has no x in the paper, but its baseline (fairseq "
        f"0.9) builds K and V for every beam, {per_beam / once:.0f} times the work, and the paper's text (more than "
        "500 GFLOPs) counts that. With beams that share K and V, as in fairseq 0.12, group 3 of multi-head attention "
        "reads O(n d), not O(x n d). Group 2 reads weights, which the paper's O(d) leaves out: "
        f"{weights / project:.0%} of what is counted for multi-head. Reading a cache, which the paper books under "
        "group 1, is counted under group 3 here."
    )


EXPERIMENT = Experiment("table1", Settings(), QUICK, measure, figures, render)
