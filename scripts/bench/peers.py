"""The experiment `peers`: the paper's tasks in stock fairseq, Transformers, CTranslate2 and fairseq_el.

Whole generations where they are short enough, which also shows whether outputs are equal. Others are put together:
those of fairseq from parts (`parts.py`), those of Transformers from a few steps, those of CTranslate2, whose steps
can't be timed, from two lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import estimates, extrapolate
from bench.budget import GIB, PAPERS_LARGEST
from bench.experiment import Experiment, Loaded
from bench.generator import Record, equal_sentences, first, select, target, unique
from bench.generator_report import targets_table
from bench.pool import LEFT_OUT, Pool, Timetable, tiny, tiny_and_padded, why_missing
from bench.protocol import Request
from bench.report import gigabytes, opening, table, times
from bench.systems import LANGUAGE_INT8, LANGUAGE_SYSTEMS, SYSTEMS, SystemKind
from bench.tasks import QUICK_TASKS, Model, Task, paper_tasks

OURS = "el"
INT8 = "ctranslate2-int8"
TARGET_BATCH = 8
TELLS_STEPS = "transformers"
# How many times as long as stock fairseq's steps others take, roughly: for the time plan alone.
STEPS = {"transformers": 5.0, "ctranslate2-float32": 0.6, INT8: 0.6}
LANGUAGE_STEPS = {"transformers": 3.0, "ctranslate2-float32": 2.0, INT8: 2.0}


@dataclass(frozen=True)
class Settings:
    tasks: tuple[Task, ...]
    batches: tuple[int, ...] = (TARGET_BATCH, 1)
    systems: tuple[str, ...] = ("stock", "el", "ctranslate2-float32", INT8, "transformers")
    budget: int = 6 * GIB
    largest_batch: int = PAPERS_LARGEST
    whole_seconds: float = 50.0  # longer generations are put together
    whole_prompted_seconds: float = 15.0  # the same for language models, whose experiment `gpt2` compares outputs
    two_lengths: tuple[int, int] = (2, 8)
    minutes: float = 12.0


ORDER = ("xsum", "cnndm", "squad", "gpt2-small", "gpt2-medium")  # of importance: the last may have to be left out
SETTINGS = Settings(tuple(sorted(paper_tasks(), key=lambda task: ORDER.index(task.name))))
QUICK = Settings(QUICK_TASKS[:1], batches=(8, 1), systems=("stock", "el"), largest_batch=10, minutes=2.0)


def kinds_of(model: Model, settings: Settings) -> dict[str, SystemKind]:
    """By the names in `settings.systems`. The Transformer of SQuAD is one that only fairseq has."""
    if model.is_language_model:
        known = {**LANGUAGE_SYSTEMS, "el": LANGUAGE_SYSTEMS["el-unscored"], INT8: LANGUAGE_INT8}
    else:
        known = dict(SYSTEMS)
    kinds = {name: known[name] for name in settings.systems}
    return {name: kind for name, kind in kinds.items() if is_convertible(model) or not kind.needs_peers}


def is_convertible(model: Model) -> bool:
    return model.is_language_model or model.checkpoint.arch.startswith(("bart", "released"))


@dataclass(frozen=True)
class Cell:
    """One number: a task in a system at a batch size."""

    task: Task
    system: str
    kind: SystemKind
    batch: int
    at: str  # the batch in words: "8", "1" or "largest"

    @property
    def attention(self) -> str | None:
        return "auto" if self.system == OURS else None

    @property
    def key(self) -> Record:
        return {"task": self.task.name, "peer": self.system, "at": self.at}

    def records_in(self, records: Sequence[Record]) -> list[Record]:
        return select(list(records), **self.key)

    def whole(self) -> Request:
        return self.task.request("generate", self.batch, "beam", attention=self.attention)

    def requests(self, settings: Settings) -> list[Request]:
        whole, model = self.whole(), self.task.model
        limit = settings.whole_prompted_seconds if model.is_language_model else settings.whole_seconds
        if self.seconds_of(whole) <= limit or self.task.output_length <= max(settings.two_lengths):
            return [whole]
        if not self.kind.needs_peers:
            return [replace(whole, op="parts")]
        short = [replace(whole, length=length) for length in settings.two_lengths]
        if self.system == TELLS_STEPS:
            short = short[-1:]
        return min(short, [whole], key=lambda requests: sum(map(self.seconds_of, requests)))

    def seconds_of(self, request: Request) -> float:
        """Other systems are taken to be as fast at reading sources as we are."""
        model = self.task.model
        if self.system in ("stock", OURS):
            sources = 0.0
            if request.op == "parts" and not (self.system == "stock" and model.is_language_model):
                sources = min(8, self.batch) * estimates.source_seconds(model, self.task.mean_source)
            return sources + estimates.request_seconds(model, request, is_stock=self.system == "stock")
        as_stock = replace(request, op="decode", source_length=request.source_length)
        slower = (LANGUAGE_STEPS if model.is_language_model else STEPS)[self.system]
        steps = request.length * estimates.step_seconds(model, as_stock, True, request.length)
        return self.batch * 1.2 * estimates.source_seconds(model, self.task.mean_source) + slower * steps

    def seconds(self, settings: Settings) -> float:
        return sum(map(self.seconds_of, self.requests(settings)))


def cells_of(model: Model, settings: Settings) -> list[Cell]:
    """Of the given batches."""
    kinds = kinds_of(model, settings)
    tasks = [task for task in settings.tasks if task.model == model]
    return [
        Cell(task, name, kind, batch, str(batch))
        for batch in settings.batches
        for task in tasks
        for name, kind in kinds.items()
    ]


def models_of(settings: Settings) -> list[Model]:
    return unique(task.model for task in settings.tasks)


def time_plan(settings: Settings, repeats: int) -> list[tuple[str, float]]:
    """The largest batches depend on what the others take, and get what time is left."""
    plan = []
    for model in models_of(settings):
        plan.append((f"loading {model.title}", len(kinds_of(model, settings)) * 0.7 * estimates.loading_seconds(model)))
        for cell in cells_of(model, settings):
            name = f"{model.title}, {cell.task.title}: {cell.kind.title}, batch {cell.batch}"
            plan.append((name, cell.seconds(settings)))
    return plan


def measure(
    settings: Settings, repeats: int, logs: Path, known: Sequence[Record] = ()
) -> tuple[Loaded, list[Record]]:
    """One round, whatever `repeats`: whole generations take long enough. known: of an earlier run, to go on from."""
    later = sum(seconds for _, seconds in time_plan(settings, repeats))
    loaded: Loaded = {}
    records = list(known)
    with Timetable(later, 60 * settings.minutes) as timetable:
        for model in models_of(settings):
            kinds = kinds_of(model, settings)
            with Pool(kinds.values(), model.checkpoint, logs, warm_ups(model, kinds)) as pool:
                later -= len(kinds) * 0.7 * estimates.loading_seconds(model)
                for cell in cells_of(model, settings):
                    later -= cell.seconds(settings)
                    if not cell.records_in(known):
                        records += ask(cell, settings, pool, timetable, reserved=0.0)
                for cell in largest_cells(model, settings, records):
                    if not cell.records_in(known):
                        records += ask(cell, settings, pool, timetable, reserved=0.0 if known else later)
                loaded |= pool.loaded
    return loaded, records


def warm_ups(model: Model, kinds: dict[str, SystemKind]) -> dict[str, list[Request]]:
    small = tiny if model.is_language_model else tiny_and_padded
    return {kind.name: [small(4, attention="auto" if name == OURS else None)] for name, kind in kinds.items()}


def ask(cell: Cell, settings: Settings, pool: Pool, timetable: Timetable, reserved: float) -> list[Record]:
    """reserved: seconds that are needed for what is more important and comes later."""
    facts = cell.key
    if cell.batch == 0:
        return [facts | {"left_out": "memory"}]
    loading = 0.0 if cell.kind.name in pool.workers else estimates.loading_seconds(cell.task.model)
    if not timetable.has_time_for(loading + cell.seconds(settings) + reserved):
        return [facts | {"left_out": LEFT_OUT, "batch": cell.batch}]
    timetable.begin(f"{cell.task.model.title}, {cell.task.title}: {cell.kind.title}, batch {cell.batch}")
    found = []
    for request in cell.requests(settings):
        found.append(pool.ask(cell.kind.name, request, facts))
    if cell.at != "largest":
        timetable.end(cell.seconds(settings))
    return found


def largest_cells(model: Model, settings: Settings, records: list[Record]) -> list[Cell]:
    """Short ones first: then what is left out for time is as little as can be."""
    cells = []
    for cell in cells_of(model, settings):
        if cell.batch == min(settings.batches):
            of_system = select(records, task=cell.task.name, peer=cell.system)
            batch = largest_batch(cell.task, of_system, settings)
            if batch is not None:
                cells.append(replace(cell, batch=batch, at="largest"))
    return sorted(cells, key=lambda cell: cell.seconds(settings) if cell.batch else 0.0)


def largest_batch(task: Task, records: list[Record], settings: Settings) -> int | None:
    """From the peaks of two batches, on a straight line; None if one of them was not measured."""
    peaks = {}
    for batch in settings.batches:
        at = [r for r in select(records, at=str(batch)) if why_missing(r) is None]
        if not at:
            return None
        peaks[batch] = max(peak_bytes(task, record) for record in at)
    small, large = min(peaks), max(peaks)
    for_each = (peaks[large] - peaks[small]) / (large - small)
    if for_each <= 0:
        return settings.largest_batch
    return max(0, min(settings.largest_batch, small + int((settings.budget - peaks[small]) / for_each)))


def peak_bytes(task: Task, record: Record) -> float:
    """With what the beams' own tokens would add, had the output been whole."""
    missing = task.output_length - record["length"]
    model = task.model
    return record["memory"]["peak"] + 8 * model.layers * model.width * record["batch"] * record["beam"] * missing


# --- what is made of it --------------------------------------------------------------------------


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    rows = []
    for task in settings.tasks:
        for at in [*map(str, sorted(settings.batches)), "largest"]:
            of_row = select(records, task=task.name, at=at)
            rows += [row_of(task, at, system, of_row) for system in kinds_of(task.model, settings)]
    for row in rows:
        ours = first(select(rows, task=row["task"], at=row["at"], system=OURS), "seconds_per_sentence")
        row["el_faster"] = row["seconds_per_sentence"] / ours if row["seconds_per_sentence"] and ours else None
    return {"rows": rows, "targets": targets(rows)}


def row_of(task: Task, at: str, system: str, of_row: list[Record]) -> dict[str, Any]:
    own = select(of_row, peer=system)
    row = {"task": task.name, "title": task.title, "model": task.model.title, "at": at, "system": system,
           "batch": own[0].get("batch") if own else None, "missing": None}  # fmt: skip
    broken = next((why for r in own if (why := why_missing(r))), None if own else why_missing(None))
    if broken:
        return row | {"missing": broken, "seconds_per_sentence": None}
    how = way_of(task, own)
    stock = [r for r in select(of_row, peer="stock") if r.get("op") == "generate" and r.get("tokens")]
    batch = own[0]["batch"]
    return row | {
        "seconds_per_sentence": cell_seconds(task, own) / batch,
        "peak_bytes": max(record["memory"]["peak"] for record in own),
        "how": how,
        "equal_to_stock": equal_sentences(own, stock) if how == "whole" and stock else None,
    }


def way_of(task: Task, own: list[Record]) -> str:
    """How the time of a cell was found."""
    if own[0]["op"] == "parts":
        return "parts"
    if len(own) > 1:
        return "two lengths"
    return "whole" if own[0]["length"] == task.output_length else "some steps"


def cell_seconds(task: Task, own: list[Record]) -> float:
    if own[0]["op"] == "parts":
        return extrapolate.batch_seconds(own[0]["parts"], own[0]["batch"])
    longest = own[-1]
    missing_steps = task.output_length - longest["length"]
    return longest["seconds"] + (missing_steps * step_seconds(own) if missing_steps else 0.0)


def step_seconds(own: list[Record]) -> float:
    if len(own) == 1:
        return own[0]["step_seconds"]
    short, long = own
    return (long["seconds"] - short["seconds"]) / (long["length"] - short["length"])


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """First in every row at batch 8 in float precision: the fastest rival takes at least as long."""
    found = []
    for task in unique(row["task"] for row in rows):
        cell = select(rows, task=task, at=str(TARGET_BATCH))
        rivals = [r for r in cell if r["system"] not in (OURS, INT8) and r["el_faster"] is not None]
        fastest = min(rivals, key=lambda r: r["el_faster"], default=None)
        name = f"{cell[0]['model']}, {cell[0]['title']}, batch {TARGET_BATCH}: fairseq_el to the fastest other in float"
        found.append(target(name, fastest["el_faster"] if fastest else None, at_least=1.0))
    return found


def render(results: dict[str, Any]) -> str:
    settings, made = results["settings"], results["figures"]
    parts = [
        *opening("Peers: the paper's tasks in other systems", results),
        "Tasks and lengths of Table 2, beam search; stock fairseq, Transformers and CTranslate2 in single precision, "
        "CTranslate2 also with int8 weights, which is not lossless, and fairseq_el with `--el-attention auto` and, but "
        "for GPT-2, the packing it chooses itself, exact for these weights. Only stock fairseq scores prompts. One "
        "round. `measured` says how: `whole` is one generation from end to end; `parts` is put together as in Table 2; "
        f"`some steps` from a generation of {settings['two_lengths'][-1]} tokens and the time of its steps; `two "
        f"lengths` from generations of {' and '.join(map(str, settings['two_lengths']))} tokens, whose difference "
        "gives the step, where a system does not tell. `equal` counts the best hypotheses that are stock fairseq's, "
        "where both ran whole: random weights make for near-ties, and CTranslate2 ranks by a last word where the "
        "others have the closing token. "
        f"The largest batch is the one that fits {settings['budget'] / GIB:g} GiB, on a straight line through the "
        f"peaks of the two others{over_budget(made['rows'], settings['budget'])}. `no time`: left out to keep to the "
        "time of this run; `peers --rest` measures that. The Transformer of SQuAD was converted for no other system.",
        "### Targets of Peers",
        targets_table(made["targets"]),
    ]
    for task in unique(row["task"] for row in made["rows"]):
        rows = select(made["rows"], task=task)
        parts += [f"### {rows[0]['model']} on {rows[0]['title']}", peers_table(rows)]
    return "\n\n".join(parts)


def over_budget(rows: list[dict[str, Any]], budget: int) -> str:
    """In words, where peaks turned out to lie above the line."""
    shares = [row["peak_bytes"] / budget for row in rows if row["at"] == "largest" and not row["missing"]]
    over = [share for share in shares if share > 1]
    if not over:
        return ""
    return f"; {len(over)} of {len(shares)} then took more than that, by up to {100 * (max(over) - 1):.0f}%"


def peers_table(rows: list[dict[str, Any]]) -> str:
    header = ["system", "batch", "seconds a sentence", "fairseq_el is faster", "peak memory", "equal", "measured"]
    cells = []
    for row in rows:
        batch = row["at"] if row["at"] != "largest" else f"largest: {row['batch']}" if row["batch"] else "largest"
        title = (SYSTEMS | {INT8: LANGUAGE_INT8})[row["system"]].title
        if row["missing"]:
            cells.append([title, batch, row["missing"], "", "", "", ""])
            continue
        equal = "" if row["equal_to_stock"] is None else f"{row['equal_to_stock']}/{row['batch']}"
        faster = "" if row["el_faster"] is None else times(row["el_faster"])
        cells.append([title, batch, f"{row['seconds_per_sentence']:.3g}", faster, gigabytes(row["peak_bytes"]), equal,
                      row["how"]])  # fmt: skip
    return table(header, cells)


EXPERIMENT = Experiment("peers", SETTINGS, QUICK, measure, figures, render, time_plan=time_plan)
