"""The experiment `generator`: fairseq_el beside stock fairseq, CTranslate2 and Transformers.

`plan` says what is measured, `figures` what is made of it, `targets` what it is held against. All are
pure, so that a table can be made again from a JSON file.
"""

from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

from bench.checkpoints import Checkpoint
from bench.driver import Cell
from bench.protocol import Request
from bench.systems import SYSTEMS, SystemKind

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Shapes and sizes of a run; the defaults are those of BART-large on CNN/DailyMail."""

    checkpoint: Checkpoint = Checkpoint("bart_large")
    source_length: int = 1024
    beam: int = 4
    whole_batch: int = 8
    whole_length: int = 67
    # By batch size. Peers tell no step's time: theirs is the time for the longer output less that for
    # the shorter, by the difference in tokens.
    step_lengths: dict[int, tuple[int, int]] = field(
        default_factory=lambda: {1: (4, 40), 8: (4, 24), 32: (4, 12)}
    )
    # Peers can't leave the encoder out, so that large batches would be mostly encoder.
    peer_step_batches: tuple[int, ...] = (1,)
    auto_batch: int = 2
    auto_source_lengths: tuple[int, ...] = (128, 512, 1024)
    auto_beams: tuple[int, ...] = (1, 4, 6, 12)
    step_targets: dict[str, dict[int, float]] = field(
        default_factory=lambda: {
            "el": {1: 4.0, 8: 2.0, 32: 1.8},
            "el-fp32": {1: 2.5, 8: 1.7, 32: 1.4},
        }
    )


QUICK = Settings(
    checkpoint=Checkpoint(
        "bart_large",
        {
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_embed_dim": 64,
            "encoder_ffn_embed_dim": 128,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
        },
        vocabulary=1000,
    ),
    source_length=32,
    whole_batch=2,
    whole_length=8,
    step_lengths={1: (3, 8), 2: (3, 8), 9: (3, 8)},
    peer_step_batches=(1, 2),
    auto_batch=2,
    auto_source_lengths=(16, 32),
    auto_beams=(1, 4),
    step_targets={"el": {1: 4.0, 2: 2.0, 9: 1.8}, "el-fp32": {1: 2.5, 2: 1.7, 9: 1.4}},
)

WHOLE_TARGETS = {
    "stock": 1.4,
    "stock-copied": 2.2,
    "ctranslate2-float32": 1.1,
    "ctranslate2-int8": 1.0,
    "transformers": 4.0,
}
AUTO_TARGET = 1.10
SOURCE_STATE_TARGETS = {"stock": 24, "stock-copied": 96}
MEMORY_RIVALS = ("stock", "ctranslate2-float32")
FIGURES = ("steps", "whole", "auto", "source_state")


def step_attention(kind: SystemKind) -> str | None:
    """Steps are compared like with like: in the form whose K and V are built first."""
    return "never" if kind.module == "bench.worker_el" else None


def whole_attention(kind: SystemKind) -> str | None:
    return "auto" if kind.module == "bench.worker_el" else None


def plan(settings: Settings, kinds: list[SystemKind], wanted: list[str]) -> list[Cell]:
    """The cells of the wanted figures, for the systems that run."""
    plans = {
        "source_state": plan_source_state,
        "steps": plan_steps,
        "whole": plan_whole,
        "auto": plan_auto,
    }
    return [cell for figure in wanted for cell in plans[figure](settings, kinds) if cell.requests]


def plan_steps(settings: Settings, kinds: list[SystemKind]) -> list[Cell]:
    cells = []
    for batch, (short, long) in settings.step_lengths.items():
        peers = [k for k in kinds if not k.is_fairseq and batch in settings.peer_step_batches]
        ours = [k for k in kinds if k.is_fairseq]
        for length, measured in ((short, peers), (long, ours + peers)):
            requests = [
                (
                    kind.name,
                    Request(
                        "decode" if kind.is_fairseq else "generate",
                        batch,
                        settings.source_length,
                        settings.beam,
                        length,
                        step_attention(kind),
                    ),
                )
                for kind in measured
                if kind.name != "stock-copied"
            ]
            cells.append(Cell("steps", requests))
    return cells


def plan_whole(settings: Settings, kinds: list[SystemKind]) -> list[Cell]:
    requests = [
        (
            kind.name,
            Request(
                "generate",
                settings.whole_batch,
                settings.source_length,
                settings.beam,
                settings.whole_length,
                whole_attention(kind),
            ),
        )
        for kind in kinds
        if kind.name != "el-fp32"
    ]
    # Whole generations take minutes: two rounds, and one of the slowest system, which alone takes as
    # long as all others together.
    slow = [pair for pair in requests if pair[0] == "transformers"]
    rest = [pair for pair in requests if pair not in slow]
    return [Cell("whole", rest, repeats=2), Cell("whole", slow, repeats=1)]


def plan_auto(settings: Settings, kinds: list[SystemKind]) -> list[Cell]:
    """Decoding alone: the encoder is the same for the three, and would hide their differences."""
    if not any(kind.name == "el" for kind in kinds):
        return []
    return [
        Cell(
            "auto",
            [
                ("el", Request("decode", settings.auto_batch, n, beam, settings.whole_length, form))
                for form in ("always", "never", "auto")
            ],
            repeats=2,
        )
        for n, beam in product(settings.auto_source_lengths, settings.auto_beams)
    ]


def plan_source_state(settings: Settings, kinds: list[SystemKind]) -> list[Cell]:
    attention = {"stock": None, "stock-copied": None, "el": "always"}
    requests = [
        (
            kind.name,
            Request(
                "source_state",
                settings.whole_batch,
                settings.source_length,
                settings.beam,
                2,
                attention[kind.name],
            ),
        )
        for kind in kinds
        if kind.name in attention
    ]
    return [Cell("source_state", requests, repeats=1)]


def figures(settings: Settings, loaded: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    """Everything that the tables show, computed from the records."""
    return {
        "steps": step_rows(settings, records),
        "whole": whole_rows(records),
        "auto": auto_rows(records),
        "source_state": source_state_rows(records),
        "loading": [
            {"system": name, "seconds": worker["seconds"], **worker["memory"]}
            for name, worker in loaded.items()
        ],
    }


def select(records: list[Record], **wanted: Any) -> list[Record]:
    return [r for r in records if all(r[name] == value for name, value in wanted.items())]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "most": max(values)}


def step_rows(settings: Settings, records: list[Record]) -> list[dict[str, Any]]:
    rows = []
    for batch, (short, long) in settings.step_lengths.items():
        of_batch = select(records, figure="steps", batch=batch)
        for system in unique(record["system"] for record in of_batch):
            times = [select(of_batch, system=system, length=length) for length in (short, long)]
            steps = [
                after["step_seconds"]
                for after in times[1]
                if after["step_seconds"] is not None
            ] or [
                (after["seconds"] - before["seconds"]) / (long - short)
                for before, after in zip(*times)
            ]
            rows.append({"system": system, "batch": batch, "seconds": spread(steps)})
    for row in rows:
        stock = select(rows, system="stock", batch=row["batch"])
        row["speedup_over_stock"] = speedup(stock, row)
    return rows


def whole_rows(records: list[Record]) -> list[dict[str, Any]]:
    records = select(records, figure="whole")
    rows = []
    for system in unique(record["system"] for record in records):
        own = select(records, system=system)
        encoder = [r["encoder_seconds"] for r in own if r["encoder_seconds"] is not None]
        rows.append(
            {
                "system": system,
                "seconds": spread([r["seconds"] for r in own]),
                "encoder_seconds": median(encoder) if encoder else None,
                "peak_bytes": max(r["memory"]["peak"] for r in own),
                "sentences": own[0]["batch"],
                "equal_to_stock": equal_sentences(own, select(records, system="stock")),
            }
        )
    for row in rows:
        row["speedup_of_el"] = speedup([row], *select(rows, system="el"))
    return rows


def equal_sentences(own: list[Record], stock: list[Record]) -> int | None:
    """How many best hypotheses are stock fairseq's. Random weights make for near-ties: information
    only."""
    if not stock:
        return None
    return sum(a == b for a, b in zip(own[0]["tokens"], stock[0]["tokens"]))


def auto_rows(records: list[Record]) -> list[dict[str, Any]]:
    records = select(records, figure="auto")
    rows = []
    for n, beam in unique((r["source_length"], r["beam"]) for r in records):
        cell = select(records, source_length=n, beam=beam)
        forms = {
            form: spread([r["seconds"] for r in select(cell, attention=form)])
            for form in ("always", "never", "auto")
        }
        better = min(forms["always"]["median"], forms["never"]["median"])
        ratio = forms["auto"]["median"] / better
        rows.append({"source_length": n, "beam": beam, **forms, "auto_to_better": ratio})
    return rows


def source_state_rows(records: list[Record]) -> list[dict[str, Any]]:
    rows = [
        {"system": record["system"], "bytes": record["source_state_bytes"]}
        for record in select(records, figure="source_state")
    ]
    el = select(rows, system="el")
    for row in rows:
        row["times_el"] = row["bytes"] / el[0]["bytes"] if el else None
    return rows


def speedup(slower: list[dict], *faster: dict) -> float | None:
    """How many times the median of one row is that of the other; None where either wasn't
    measured."""
    if not slower or not faster:
        return None
    return slower[0]["seconds"]["median"] / faster[0]["seconds"]["median"]


def unique(values) -> list:
    return list(dict.fromkeys(values))


def targets(settings: Settings, made: dict[str, Any]) -> list[dict[str, Any]]:
    """Each figure with what it should reach; `met` is None where it wasn't measured."""
    return [
        *step_targets(settings, made["steps"]),
        *whole_targets(made["whole"]),
        auto_target(made["auto"]),
        *source_state_targets(made["source_state"]),
        *memory_targets(made["whole"], made["loading"]),
    ]


def target(
    figure: str,
    value: float | None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> dict[str, Any]:
    """`value` is a ratio that should be at least or at most the given one."""
    met = None
    if value is not None:
        met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return {"figure": figure, "value": value, "at_least": at_least, "at_most": at_most, "met": met}


def step_targets(settings: Settings, rows: list[dict]) -> list[dict]:
    return [
        target(
            f"one decoding step, batch {batch}: {SYSTEMS[system].title} against stock fairseq",
            first(select(rows, system=system, batch=batch), "speedup_over_stock"),
            at_least=limit,
        )
        for system, limits in settings.step_targets.items()
        for batch, limit in limits.items()
    ]


def whole_targets(rows: list[dict]) -> list[dict]:
    return [
        target(
            f"whole generation: fairseq_el against {SYSTEMS[system].title}",
            first(select(rows, system=system), "speedup_of_el"),
            at_least=limit,
        )
        for system, limit in WHOLE_TARGETS.items()
    ]


def auto_target(rows: list[dict]) -> dict:
    worst = max((row["auto_to_better"] for row in rows), default=None)
    return target(
        "time of `auto` to the better of `always` and `never`, worst case", worst, at_most=AUTO_TARGET
    )


def source_state_targets(rows: list[dict]) -> list[dict]:
    return [
        target(
            f"cached source state: {SYSTEMS[system].title} to fairseq_el `always`",
            first(select(rows, system=system), "times_el"),
            at_least=limit,
        )
        for system, limit in SOURCE_STATE_TARGETS.items()
    ]


def memory_targets(whole: list[dict], loading: list[dict]) -> list[dict]:
    generating = [
        target(
            f"peak memory while generating: fairseq_el to {SYSTEMS[rival].title}",
            ratio(whole, rival, "peak_bytes"),
            at_most=1.0,
        )
        for rival in MEMORY_RIVALS
    ]
    title = "peak memory while loading: fairseq_el to stock fairseq"
    return [*generating, target(title, ratio(loading, "stock", "peak"), at_most=1.0)]


def ratio(rows: list[dict], rival: str, name: str) -> float | None:
    ours, theirs = first(select(rows, system="el"), name), first(select(rows, system=rival), name)
    return None if ours is None or theirs is None else ours / theirs


def first(rows: list[dict], name: str) -> Any:
    return rows[0][name] if rows else None
