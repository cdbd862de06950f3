"""The experiment `table2`: sentences per second of the paper's models and tasks under one budget of memory.

Each column runs at the largest batch that the budget holds, and once more at the batch that all of them hold.
`Plan` says what is measured, `figures` what is made of it; words and tables are in `table2_report.py`.
"""
# Over 400 lines: plan and figures of one experiment, which know each other's parts.

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import estimates, extrapolate
from bench.budget import GIB, PAPERS_LARGEST, Footprint
from bench.experiment import Experiment, Loaded
from bench.generator import Record, select, spread, target, unique
from bench.pool import LEFT_OUT, Pool, Timetable, tiny, tiny_and_padded, why_missing
from bench.protocol import Request
from bench.systems import LANGUAGE_SYSTEMS, STOCK_HALF, SYSTEMS, SystemKind
from bench.table2_report import COLUMNS, draw, render
from bench.tasks import QUICK_TASKS, Model, Task, paper_tasks

SEARCHES = ("beam", "greedy", "diverse")  # in the order of their importance
CALIBRATION = {"stock": "stock", "el": "always"}  # the form in which a worker's footprint is measured

# How many times as fast as multi-head attention with a cache for every beam `auto` should be.
TARGETS = {
    ("cnndm", "beam"): 2.0, ("xsum", "beam"): 2.0, ("squad", "beam"): 1.5,
    ("cnndm", "greedy"): 1.5, ("xsum", "greedy"): 1.5, ("squad", "greedy"): 1.3,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    tasks: tuple[Task, ...]
    precisions: tuple[str, ...] = ("fp32", "fp16")  # of the weights
    budget: int = 6 * GIB
    largest_batch: int = PAPERS_LARGEST
    calibration_batch: int = 8
    seconds_per_cell: float = 4.0  # cells that take less are measured in several rounds
    rounds_of_targets: int = 2  # at least, of cells that a target compares
    minutes: float = 32.0
    model_order: tuple[str, ...] = ("BART-large", "Transformer 270M", "GPT-2 small", "GPT-2 medium")

    def models(self) -> list[Model]:
        found = unique(task.model for task in self.tasks)
        return sorted(found, key=lambda m: self.model_order.index(m.title) if m.title in self.model_order else 0)


SETTINGS = Settings(paper_tasks())
QUICK = Settings(
    QUICK_TASKS, precisions=("fp32",), largest_batch=5, calibration_batch=3, seconds_per_cell=0.1, minutes=2.0
)


@dataclass(frozen=True)
class Cell:
    """One number of the table. Where two are the same by construction, only one of them is measured."""

    task: Task
    search: str
    precision: str
    column: str
    at: str  # "largest" or "equal" batch

    @property
    def key(self) -> dict[str, str]:
        return {"task": self.task.name, "search": self.search, "precision": self.precision,
                "column": self.column, "at": self.at}  # fmt: skip

    def measured_as(self) -> "Cell":
        """Stock fairseq computes in single precision whatever the checkpoint's weights, and where beams share
        nothing, or are one, its cache is the copied one."""
        if self.column not in ("copied", "stock"):
            return self
        shares = self.task.model.shares_cache and self.task.beam(self.search) > 1
        return replace(self, precision="fp32", column=self.column if shares else "copied")

    @property
    def kind(self) -> SystemKind:
        return system(self.task.model, self.column, self.precision)

    def request(self, batch: int) -> Request:
        return request(self.task, self.search, self.column, batch)


def system(model: Model, column: str, precision: str) -> SystemKind:
    systems = LANGUAGE_SYSTEMS if model.is_language_model else SYSTEMS
    if column in ("copied", "stock"):
        return systems["stock"]
    names = {"fp32": "el-unscored", "fp16": "el-fp16"} if model.is_language_model else {"fp32": "el-fp32", "fp16": "el"}
    return systems[names[precision]]


def request(task: Task, search: str, column: str, batch: int) -> Request:
    attention = column if column in ("always", "auto") else None
    copied = "copied" if column == "copied" and not task.model.is_language_model else None
    return task.request("parts", batch, search, attention=attention, multi_head=copied)


def rows_of(task: Task, settings: Settings) -> Iterator[tuple[str, str]]:
    for search in SEARCHES:
        if search in task.searches:
            for precision in settings.precisions:
                yield search, precision


def cells_of(task: Task, settings: Settings) -> list[Cell]:
    """In the order in which they are measured: what is compared stands together."""
    every = [
        Cell(task, search, precision, column, at).measured_as()
        for search, precision in rows_of(task, settings)
        for at in ("equal", "largest")
        for column in COLUMNS
    ]
    return unique(every)


def estimated_batch(cell: Cell, settings: Settings) -> int:
    """For time plans."""
    footprint = Footprint.guess(cell.task, is_stock=cell.column in ("copied", "stock"))
    column = "copied" if cell.at == "equal" else cell.column
    return max(1, largest(footprint, replace(cell, column=column), settings))


def largest(footprint: Footprint, cell: Cell, settings: Settings) -> int:
    task = cell.task
    shape = task.beam(cell.search), task.longest_source, task.output_length
    return footprint.largest(task.model, *shape, cell.column, settings.budget, settings.largest_batch)


def cell_seconds(cell: Cell, batch: int) -> float:
    is_stock = cell.column in ("copied", "stock")
    return estimates.request_seconds(cell.task.model, cell.request(batch), is_stock)


def rounds(cell: Cell, seconds: float, settings: Settings, repeats: int) -> int:
    compared = (cell.task.name, cell.search) in TARGETS and cell.column in ("copied", "auto")
    wanted = max(settings.rounds_of_targets if compared else 1, int(settings.seconds_per_cell / max(seconds, 1e-3)))
    return min(repeats, wanted)


def time_plan(settings: Settings, repeats: int) -> list[tuple[str, float]]:
    """What is going to be measured, and about how many seconds it takes."""
    plan = []
    for model in settings.models():
        workers = len(workers_of(model, settings))
        plan.append((f"loading {model.title}", workers * estimates.loading_seconds(model)))
        for task in (task for task in settings.tasks if task.model == model):
            sources = settings.calibration_batch * estimates.source_seconds(model, task.mean_source)
            again = 0 if model.is_language_model else (repeats - 1) * sources
            plan.append((f"{model.title}, {task.title}: sources, footprints", workers * (sources + again + 3)))
            asked = set()
            for cell in cells_of(task, settings):
                batch = estimated_batch(cell, settings)
                seconds = cell_seconds(cell, batch)
                question = (cell.search, cell.column, cell.precision, batch)
                if question in asked:
                    continue
                asked.add(question)
                name = f"{model.title}, {task.title}: {cell.search}, {cell.precision}, {cell.column}, batch {batch}"
                plan.append((name, seconds * rounds(cell, seconds, settings, repeats)))
    return plan


def measure(settings: Settings, repeats: int, logs: Path) -> tuple[Loaded, list[Record]]:
    planned = sum(seconds for _, seconds in time_plan(settings, repeats))
    loaded: Loaded = {}
    records: list[Record] = []
    with Timetable(planned, 60 * settings.minutes) as timetable:
        for model in settings.models():
            tasks = [task for task in settings.tasks if task.model == model]
            kinds = workers_of(model, settings)
            with Pool(kinds, model.checkpoint, logs, warm_ups(kinds, tasks)) as pool:
                for task in tasks:
                    records += TaskRun(task, settings, repeats, pool, timetable).measure()
                loaded |= pool.loaded
        records += half_precision(settings, logs, timetable, loaded)
    return loaded, records


def workers_of(model: Model, settings: Settings) -> list[SystemKind]:
    return [system(model, "stock", "fp32"), *(system(model, "auto", precision) for precision in settings.precisions)]


def warm_ups(kinds: list[SystemKind], tasks: list[Task]) -> dict[str, list[Request]]:
    """The tasks are of one model."""
    beams = unique(task.beam(search) for task in tasks for search in task.searches)
    small = tiny if tasks[0].model.is_language_model else tiny_and_padded
    attention = {kind.name: None if kind.name == "stock" else "auto" for kind in kinds}
    return {name: [small(beam, attention=form) for beam in beams] for name, form in attention.items()}


@dataclass
class TaskRun:
    """All cells of one task: first how much memory each worker takes, then what fits, then the measurements."""

    task: Task
    settings: Settings
    repeats: int
    pool: Pool
    timetable: Timetable
    known: dict[str, list[Record]] = field(default_factory=dict)  # what was asked before, and what was found
    unusable: dict[str, Record] = field(default_factory=dict)  # workers, and why

    def measure(self) -> list[Record]:
        records = [self.calibrate(kind) for kind in workers_of(self.task.model, self.settings)]
        footprints = {r["system"]: self.footprint(r) for r in records if not why_missing(r)}
        self.unusable = {r["system"]: r for r in records if why_missing(r)}
        records += self.time_sources(list(footprints))
        planned = [(cell, self.batch(cell, footprints)) for cell in cells_of(self.task, self.settings)]
        for row in unique((cell.search, cell.precision, cell.at) for cell, _ in planned):
            compared = [pair for pair in planned if (pair[0].search, pair[0].precision, pair[0].at) == row]
            records += self.interleaved(compared)
        return records

    def calibrate(self, kind: SystemKind) -> Record:
        model, column = self.task.model, CALIBRATION["stock" if kind.name == "stock" else "el"]
        facts = {"kind": "footprint", "task": self.task.name, "column": column, "system": kind.name}
        seconds = 3 + self.settings.calibration_batch * estimates.source_seconds(model, self.task.mean_source)
        loading = 0.0 if kind.name in self.pool.workers else estimates.loading_seconds(model)
        if not self.timetable.has_time_for(loading + seconds):
            return facts | {"left_out": LEFT_OUT}
        self.timetable.begin(f"{model.title}, {self.task.title}: memory of {kind.title}")
        asked = request(self.task, "beam", column, self.settings.calibration_batch)
        record = self.pool.ask(kind.name, asked, facts)
        self.timetable.end(loading + seconds)
        return record

    def time_sources(self, systems: list[str]) -> list[Record]:
        """Further rounds: much of every number is the time of its worker's encoder, and the machine's speed moves."""
        model, records = self.task.model, []
        if model.is_language_model:
            return []
        asked = replace(request(self.task, "beam", "stock", self.settings.calibration_batch), op="sources")
        seconds = self.settings.calibration_batch * estimates.source_seconds(model, self.task.mean_source)
        for _ in range(1, self.repeats):
            for name in systems:
                if self.timetable.has_time_for(seconds):
                    self.timetable.begin(f"{model.title}, {self.task.title}: sources by {self.pool.kinds[name].title}")
                    records.append(self.pool.ask(name, asked, {"kind": "sources", "task": self.task.name}))
                    self.timetable.end(seconds)
        return records

    def footprint(self, record: Record) -> Footprint:
        return Footprint.of(self.task, record, record["column"])

    def batch(self, cell: Cell, footprints: dict[str, Footprint]) -> int:
        """0 where nothing fits, or nothing is known."""
        if cell.kind.name not in footprints:
            return 0
        if cell.at == "largest":
            return largest(footprints[cell.kind.name], cell, self.settings)
        everyone = [replace(cell, column=c, precision=p) for c in COLUMNS for p in self.settings.precisions]
        known = [other for other in everyone if other.kind.name in footprints]
        return min(largest(footprints[other.kind.name], other, self.settings) for other in known)

    def interleaved(self, compared: list[tuple[Cell, int]]) -> list[Record]:
        """In rounds, each over all cells; nothing is asked of a worker that it has answered for another cell."""
        found = {cell: self.known.get(self.question(cell, batch), []) for cell, batch in compared}
        new = [(cell, batch) for cell, batch in compared if not found[cell]]
        for cell, batch in new:
            found[cell] = self.known[self.question(cell, batch)] = []
        for repeat in range(self.repeats):
            for cell, batch in new:
                seconds = cell_seconds(cell, max(batch, 1))
                went_well = all(why_missing(record) is None for record in found[cell])
                if went_well and repeat < rounds(cell, seconds, self.settings, self.repeats):
                    found[cell].append(self.measure_cell(cell, batch, seconds) | {"repeat": repeat})
        return [record | {"kind": "cell", **cell.key} for cell, of_cell in found.items() for record in of_cell]

    def question(self, cell: Cell, batch: int) -> str:
        return f"{cell.kind.name} {json.dumps(asdict(cell.request(batch)))}"

    def measure_cell(self, cell: Cell, batch: int, seconds: float) -> Record:
        """With a smaller batch, should it turn out to take more than the budget after all."""
        unusable = self.unusable.get(cell.kind.name)
        if unusable:
            return {name: unusable[name] for name in ("failed", "left_out") if name in unusable}
        if batch == 0:
            return {"left_out": "memory"}
        if not self.timetable.has_time_for(seconds):
            return {"left_out": LEFT_OUT}
        self.timetable.begin(f"{self.task.title}, {cell.search}, {cell.precision}: {cell.column}, batch {batch}")
        record = self.pool.ask(cell.kind.name, cell.request(batch), {})
        self.timetable.end(seconds)
        excess = self.excess(record)
        if excess > 1 and batch > 1:
            smaller = min(batch - 1, int(batch / excess))
            return self.measure_cell(cell, max(smaller, 1), seconds)
        return record

    def excess(self, record: Record) -> float:
        """How many times the room there is for a batch it took."""
        if "failed" in record:
            return 0.0
        resident = record["parts"]["resident_bytes"]
        return (record["memory"]["peak"] - resident) / (self.settings.budget - resident)


def half_precision(settings: Settings, logs: Path, timetable: Timetable, loaded: Loaded) -> list[Record]:
    """Stock fairseq's own `--fp16`, once, to show why its columns are in single precision."""
    tasks = [task for task in settings.tasks if not task.model.is_language_model]
    if not tasks or "fp16" not in settings.precisions or not timetable.has_time_for(60):
        return []
    task = min(tasks, key=lambda task: task.model.parameters)
    timetable.begin(f"{task.title}: {STOCK_HALF.title}")
    facts = {"kind": "half", "task": task.name}
    kinds = [SYSTEMS["stock"], STOCK_HALF]
    with Pool(kinds, task.model.checkpoint, logs, {kind.name: [tiny_and_padded(4)] for kind in kinds}) as pool:
        found = [pool.ask(k.name, request(task, "beam", "stock", settings.calibration_batch), facts) for k in kinds]
        loaded |= pool.loaded
    return found


# --- what is made of it --------------------------------------------------------------------------


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    rows = [
        row_of(task, search, precision, records)
        for task in settings.tasks
        for search, precision in rows_of(task, settings)
    ]
    return {"rows": rows, "half": half_row(records), "targets": targets(rows), "lengths": {
        task.name: {"sources": task.source_lengths, "output": task.output_length} for task in settings.tasks
    }}  # fmt: skip


def row_of(task: Task, search: str, precision: str, records: list[Record]) -> dict[str, Any]:
    cells = {}
    for at in ("largest", "equal"):
        cells[at] = {
            column: cell_figure(Cell(task, search, precision, column, at), records) for column in COLUMNS
        }
    return {"task": task.name, "title": task.title, "model": task.model.title, "search": search,
            "beam": task.beam(search), "precision": precision, "cells": cells}  # fmt: skip


def cell_figure(cell: Cell, records: list[Record]) -> dict[str, Any]:
    """sentences_per_second is None where `missing` says why."""
    measured = cell.measured_as()
    found = [r for r in records if r["kind"] == "cell" and measured.key.items() <= r.items()]
    timed = [r for r in found if why_missing(r) is None]
    if not timed:
        return {"sentences_per_second": None, "missing": why_missing(found[0] if found else None)}
    batch = timed[-1]["batch"]  # where a round had to be smaller, the later ones are
    same = select(timed, batch=batch)
    rounds = [r["parts"] | source_time(records, cell.task.name, r["system"]) for r in same]
    seconds = spread([extrapolate.batch_seconds(parts, batch) for parts in rounds])
    parts = rounds[-1]
    return {
        "sentences_per_second": batch / seconds["median"],
        "slowest": batch / seconds["most"],
        "fastest": batch / seconds["least"],
        "rounds": len(same),
        "batch": batch,
        "peak_bytes": max(r["memory"]["peak"] for r in same),
        "whole": extrapolate.is_whole(parts),
        "source_seconds": extrapolate.source_seconds(parts, batch),
        "first_seconds": parts["first_seconds"],
        "steps_seconds": extrapolate.steps_seconds(parts),
        "missing": None,
    }


def source_time(records: list[Record], task: str, system: str) -> dict[str, float]:
    """The median of its rounds, where there were several."""
    timed = [r for r in records if r["kind"] in ("footprint", "sources") and why_missing(r) is None]
    rounds = [r["parts"]["source_seconds"] for r in select(timed, task=task, system=system)]
    return {"source_seconds": spread(rounds)["median"]} if len(rounds) > 1 else {}


def half_row(records: list[Record]) -> dict[str, Any] | None:
    """How many times as long stock fairseq takes in half precision."""
    found = {r["system"]: r for r in records if r["kind"] == "half" and "failed" not in r}
    if len(found) < 2:
        return None
    seconds = {name: extrapolate.batch_seconds(r["parts"], r["batch"]) for name, r in found.items()}
    return {"task": found["stock"]["task"], "batch": found["stock"]["batch"], "seconds": seconds}


def ratio(row: dict[str, Any], at: str, column: str, to: str) -> float | None:
    ours, theirs = (row["cells"][at][name]["sentences_per_second"] for name in (column, to))
    return None if ours is None or theirs is None else ours / theirs


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for (task, search), limit in TARGETS.items():
        for row in select(rows, task=task, search=search):
            name = f"{row['title']}, {search}, {row['precision']}: `auto` to copied multi-head, largest batches"
            found.append(target(name, ratio(row, "largest", "auto", "copied"), at_least=limit))
    for at in ("largest", "equal"):
        known = [(value, row) for row in rows if (value := ratio(row, at, "auto", "stock")) is not None]
        value, row = min(known, key=lambda pair: pair[0], default=(None, None))
        worst = f" ({row['model']}, {row['title']}, {row['search']}, {row['precision']})" if row else ""
        found.append(target(f"`auto` to stock fairseq, {at} batch, worst row{worst}", value, at_least=1.0))
    return found




EXPERIMENT = Experiment("table2", SETTINGS, QUICK, measure, figures, render, draw, time_plan)
