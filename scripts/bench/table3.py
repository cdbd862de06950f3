"""The experiment `table3`: sentences per second by batch size, without cache, with cache and with EL-attention."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import estimates, extrapolate
from bench.budget import GIB, Footprint
from bench.experiment import Experiment, Loaded
from bench.generator import Record, select, spread
from bench.pool import LEFT_OUT, Pool, Timetable, tiny_and_padded, why_missing
from bench.protocol import Request
from bench.report import opening, table, times
from bench.systems import SYSTEMS
from bench.tasks import QUICK_TASKS, Task, paper_tasks

COLUMNS = {
    "no-cache": "no cache",
    "copied": "cache copied per beam",
    "stock": "cache shared by beams",
    "always": "EL",
}
SYSTEM_OF = {"no-cache": "stock", "copied": "stock", "stock": "stock", "always": "el"}

# Samples per second of BART-large on CNN/DailyMail in half precision on a V100; None did not fit.
PAPER: dict[int, dict[str, float | None]] = {
    32: {"no-cache": 1.9, "copied": 5.7, "always": 8.0},
    64: {"no-cache": 1.9, "copied": None, "always": 12.6},
    128: {"no-cache": None, "copied": None, "always": 21.3},
    320: {"no-cache": None, "copied": None, "always": 28.6},
}


@dataclass(frozen=True)
class Settings:
    tasks: tuple[Task, ...]  # one
    batches: tuple[int, ...] = (32, 64, 128, 320)
    search: str = "beam"
    budget: int = 6 * GIB
    calibration_batch: int = 8
    no_cache_batch: int = 4  # without cache a step of 32 sentences takes a minute, in proportion to their number
    seconds_per_cell: float = 6.0
    minutes: float = 5.0

    @property
    def task(self) -> Task:
        return self.tasks[0]


SETTINGS = Settings(tuple(task for task in paper_tasks() if task.name == "cnndm"))
QUICK = Settings(QUICK_TASKS[:1], batches=(4, 6), calibration_batch=3, no_cache_batch=2, seconds_per_cell=0.1)


def request(settings: Settings, column: str, batch: int) -> Request:
    attention = column if column == "always" else None
    multi_head = column if column in ("no-cache", "copied") else None
    return settings.task.request("parts", batch, settings.search, attention=attention, multi_head=multi_head)


def seconds_of(settings: Settings, column: str, batch: int) -> float:
    return estimates.request_seconds(
        settings.task.model, request(settings, column, batch), SYSTEM_OF[column] == "stock"
    )


def small_batch(settings: Settings, column: str) -> int:
    return settings.no_cache_batch if column == "no-cache" else settings.calibration_batch


def time_plan(settings: Settings, repeats: int) -> list[tuple[str, float]]:
    task, model = settings.task, settings.task.model
    sources = settings.calibration_batch * estimates.source_seconds(model, settings.task.mean_source)
    plan = [(f"loading {model.title}", 2 * estimates.loading_seconds(model)), ("sources", 2 * sources)]
    small = [(column, small_batch(settings, column)) for column in COLUMNS]
    shape = task.beam(settings.search), task.longest_source, task.output_length
    cells = []
    for column in ("copied", "stock", "always"):
        footprint = Footprint.guess(task, is_stock=column != "always")
        largest = footprint.largest(model, *shape, column, settings.budget, max(settings.batches))
        cells += [(column, batch) for batch in settings.batches if batch <= largest]
    return plan + [(f"{column}, batch {batch}", seconds_of(settings, column, batch)) for column, batch in small + cells]


def measure(settings: Settings, repeats: int, logs: Path) -> tuple[Loaded, list[Record]]:
    planned = sum(seconds for _, seconds in time_plan(settings, repeats))
    beam = settings.task.beam(settings.search)
    warm_up = {"stock": [tiny_and_padded(beam)], "el": [tiny_and_padded(beam, attention="always")]}
    kinds = [SYSTEMS["stock"], SYSTEMS["el"]]
    records = []
    with (
        Timetable(planned, 60 * settings.minutes) as timetable,
        Pool(kinds, settings.task.model.checkpoint, logs, warm_up) as pool,
    ):
        for column in COLUMNS:
            batch = small_batch(settings, column)
            records.append(ask(settings, column, batch, pool, timetable) | {"kind": "small"})
        for batch in settings.batches:
            columns = [column for column in COLUMNS if column != "no-cache" and fits(settings, column, batch, records)]
            for repeat in range(repeats):
                for column in columns:
                    if repeat == 0 or (repeat + 1) * seconds_of(settings, column, batch) <= settings.seconds_per_cell:
                        record = ask(settings, column, batch, pool, timetable)
                        records.append(record | {"kind": "cell", "repeat": repeat})
    return pool.loaded, records


def ask(settings: Settings, column: str, batch: int, pool: Pool, timetable: Timetable) -> Record:
    facts = {"column": column, "batch": batch}
    seconds = seconds_of(settings, column, batch)
    if not timetable.has_time_for(seconds):
        return facts | {"left_out": LEFT_OUT}
    timetable.begin(f"{COLUMNS[column]}, batch {batch}")
    record = pool.ask(SYSTEM_OF[column], request(settings, column, batch), facts)
    timetable.end(seconds)
    return record


def expected_peak(settings: Settings, column: str, batch: int, records: list[Record]) -> float | None:
    """Bytes, from the small batch: without cache all is in proportion to it; else the state follows its formula."""
    (small,) = select(records, kind="small", column=column)
    if why_missing(small):
        return None
    task, resident = settings.task, small["parts"]["resident_bytes"]
    if column == "no-cache":
        working = max(small["memory"]["peak"] - resident, small["parts"]["source_peak_bytes"])
        return resident + working * batch / small["batch"]
    footprint = Footprint.of(task, small, column)
    beam = task.beam(settings.search)
    return footprint.peak(task.model, batch, beam, task.longest_source, task.output_length, column)


def fits(settings: Settings, column: str, batch: int, records: list[Record]) -> bool:
    peak = expected_peak(settings, column, batch, records)
    return peak is not None and peak <= settings.budget


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    rows = [
        {"batch": batch, "cells": {column: cell_figure(settings, column, batch, records) for column in COLUMNS}}
        for batch in settings.batches
    ]
    base = rows[0]["cells"]["no-cache"]["sentences_per_second"]
    for row in rows:
        for cell in row["cells"].values():
            speed = cell["sentences_per_second"]
            cell["to_no_cache"] = speed / base if speed and base else None
    return {"rows": rows}


def cell_figure(settings: Settings, column: str, batch: int, records: list[Record]) -> dict[str, Any]:
    peak = expected_peak(settings, column, batch, records)
    kind = {"kind": "small"} if column == "no-cache" else {"kind": "cell", "batch": batch}
    found = select(records, column=column, **kind)
    timed = [record for record in found if why_missing(record) is None]
    figure = {"expected_peak_bytes": peak, "peak_bytes": None, "sentences_per_second": None, "missing": None}
    if peak is not None and peak > settings.budget:
        return figure | {"missing": "does not fit"}
    if not timed:
        return figure | {"missing": why_missing(found[0] if found else None)}
    seconds = spread([extrapolate.batch_seconds(r["parts"], r["batch"]) / r["batch"] for r in timed])
    measured = max(r["memory"]["peak"] for r in timed) if column != "no-cache" else None
    if measured is not None and measured > settings.budget:
        return figure | {"missing": "does not fit", "peak_bytes": measured}
    return figure | {"sentences_per_second": 1 / seconds["median"], "peak_bytes": measured}


def render(results: dict[str, Any]) -> str:
    settings, rows = results["settings"], results["figures"]["rows"]
    task = settings["tasks"][0]
    return "\n\n".join(
        [
            *opening("Table 3: sentences per second by batch size", results),
            "### Batch sizes\n\n"
            f"{task['model']['title']} on {task['title']}, beam search, {min(task['source_lengths'])} to "
            f"{max(task['source_lengths'])} tokens in, {task['output_length']} out, under a budget of "
            f"{settings['budget'] / GIB:g} GiB for everything, weights included. In brackets how many times the speed "
            "without cache at the smallest batch, and the peak of memory: measured, or, where it does not fit, "
            "expected from the formula and a small batch. Every number is put together from measured parts, as in "
            f"Table 2; without cache, which computes all anew for every token, from {settings['no_cache_batch']} "
            "sentences, as its time and memory are in proportion to them. EL is `--el-attention always`, with weights "
            "in half precision, which is exact for them.",
            batches_table(rows),
            paper_sentence(rows),
        ]
    )


def shown(cell: dict[str, Any]) -> str:
    peak = cell["peak_bytes"] or cell["expected_peak_bytes"]
    memory = f"{peak / GIB:.1f} GiB" if peak else ""
    if cell["missing"]:
        return f"{cell['missing']} ({memory})" if cell["missing"] == "does not fit" else cell["missing"]
    ratio = f"{times(cell['to_no_cache'])}, " if cell["to_no_cache"] else ""
    return f"{cell['sentences_per_second']:.3g} ({ratio}{memory})"


def batches_table(rows: list[dict[str, Any]]) -> str:
    header = ["batch"]
    for column, title in COLUMNS.items():
        header += [title] + ([f"paper: {title}"] if column in PAPER[32] else [])
    cells = []
    for row in rows:
        line = [str(row["batch"])]
        for column in COLUMNS:
            line.append(shown(row["cells"][column]))
            if column in PAPER[32]:
                paper = PAPER.get(row["batch"], {}).get(column, "")
                line.append("does not fit" if paper is None else f"{paper:g}" if paper != "" else "")
        cells.append(line)
    return table(header, cells)


def paper_sentence(rows: list[dict[str, Any]]) -> str:
    speeds = [(row["batch"], speed) for row in rows if (speed := row["cells"]["always"]["sentences_per_second"])]
    fitting = {c: [row["batch"] for row in rows if row["cells"][c]["sentences_per_second"]] for c in COLUMNS}
    order = "; ".join(
        f"{title} up to {max(fitting[column])}" if fitting[column] else f"{title} not at all"
        for column, title in COLUMNS.items()
    )
    fits_words = (
        f"What fits, of these batches: {order}; in the paper, in 16 GB: no cache up to 64, copied up to 32, EL up to "
        "320. "
    )
    if len(speeds) < 2:
        return fits_words
    (small, slow), (large, fast) = speeds[0], speeds[-1]
    return fits_words + (
        f"From batch {small} to {large} EL's speed changes {fast / slow:.2f} times; on the V100 it grows 3.6 times "
        "from 32 to 320. Large batches fill a GPU that small ones leave idle; two cores compute at full speed from "
        "a few dozen rows on. Single precision, in which a CPU keeps the state, takes twice the paper's room."
    )


EXPERIMENT = Experiment("table3", SETTINGS, QUICK, measure, figures, render, time_plan=time_plan)
