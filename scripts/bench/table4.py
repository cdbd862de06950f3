"""The experiment `table4`: bytes of source state, by formula and measured from live tensors."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench import driver
from bench.checkpoints import Checkpoint
from bench.driver import Cell
from bench.experiment import Experiment, Loaded
from bench.generator import Record, first, select
from bench.protocol import Request
from bench.report import gigabytes, opening, table
from bench.systems import SYSTEMS
from fairseq_el.models.costs import Shape

GIB = 2**30
MEASURED = {"stock-copied": None, "stock": None, "el": "always"}  # with the form of attention


@dataclass(frozen=True)
class Settings:
    """BART-large's decoder. The encoder has no layers and the vocabulary is small: neither changes what is
    kept of a source."""

    batches: tuple[int, ...] = (32, 64, 320)
    lengths: tuple[int, ...] = (256, 1024)
    beam: int = 4
    layers: int = 12
    heads: int = 16
    width: int = 1024
    ffn_width: int = 4096
    vocabulary: int = 1000
    largest_measured: int = 14 * 10**9  # bytes; more takes minutes to fill
    share_of_memory: float = 0.7  # of what is free, for one state: the rest of a generation needs room too

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(
            "bart_large",
            {
                "encoder_layers": 0,
                "decoder_layers": self.layers,
                "encoder_embed_dim": self.width,
                "encoder_ffn_embed_dim": self.ffn_width,
                "encoder_attention_heads": self.heads,
                "decoder_attention_heads": self.heads,
            },
            vocabulary=self.vocabulary,
        )

    def formula(self, system: str, batch: int, length: int, element_size: int) -> int:
        shape = Shape(batch, self.beam, length, self.heads, self.width, element_size)
        if system == "el":
            return shape.kept_states()
        return self.layers * shape.kept_key_values(copied=system == "stock-copied")


QUICK = Settings(batches=(2, 3), lengths=(16, 32), layers=2, heads=4, width=64, ffn_width=128)

# (multi-head, EL) in GB by (batch, n): BART-large in half precision, a cache for every beam.
PAPER = {
    (32, 256): ("1.5", "0.02"),
    (32, 1024): ("6", "0.06"),
    (64, 256): ("3", "0.03"),
    (64, 1024): ("12", "0.13"),
    (320, 256): ("15", "0.15"),
    (320, 1024): ("60", "0.63"),
}


def plan(settings: Settings, limit: int) -> list[Cell]:
    """All that fits: a request for one token, whose step builds what is kept."""
    cells = []
    for batch, length in product(settings.batches, settings.lengths):
        requests = [
            (system, Request("source_state", batch, length, settings.beam, 1, form))
            for system, form in MEASURED.items()
            if settings.formula(system, batch, length, element_size=4) <= limit
        ]
        cells.append(Cell("source_state", requests, repeats=1))
    return cells


def measure(settings: Settings, repeats: int, logs: Path) -> tuple[Loaded, list[Record]]:
    """Bytes don't vary: one round, whatever `repeats`."""
    settings.checkpoint.ensure()
    limit = min(settings.largest_measured, int(settings.share_of_memory * free_memory()))
    kinds = [SYSTEMS[name] for name in MEASURED]
    loaded, records = driver.run(kinds, plan(settings, limit), 1, settings.checkpoint, logs)
    return loaded, [*records, {"figure": "limit", "bytes": limit}]


def free_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    return int(facts["MemAvailable"].split()[0]) * 1024


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    rows = [
        {
            "batch": batch,
            "length": length,
            "half": {system: settings.formula(system, batch, length, element_size=2) for system in MEASURED},
            "single": {system: settings.formula(system, batch, length, element_size=4) for system in MEASURED},
            "measured": {system: measured(records, system, batch, length) for system in MEASURED},
        }
        for batch, length in product(settings.batches, settings.lengths)
    ]
    return {"rows": rows, "limit": first(select(records, figure="limit"), "bytes")}


def measured(records: list[Record], system: str, batch: int, length: int) -> int | None:
    """None where it was too large."""
    of_figure = select(records, figure="source_state")
    return first(select(of_figure, system=system, batch=batch, source_length=length), "source_state_bytes")


def render(results: dict[str, Any]) -> str:
    settings, made = results["settings"], results["figures"]
    model = f"{settings['layers']} decoder layers, d = {settings['width']}, beam {settings['beam']}"
    return "\n\n".join(
        [
            *opening("Table 4: bytes of source state", results),
            "### Half precision, beside the paper\n\n"
            f"What is kept of the source while a batch is generated, in GiB (the paper's GB): {model}. "
            "Formulas of `fairseq_el/models/costs.py`.",
            half_table(made["rows"]),
            paper_sentence(made["rows"]),
            "### Single precision, measured\n\n"
            "A CPU computes in single precision, so its state is twice that. In GiB, by formula and summed over the "
            "live tensors during a generation: K and V of all layers in stock fairseq, the encoder's output in "
            f"fairseq_el (`--el-attention always`). States over {made['limit'] / GIB:.1f} GiB, the limit of this "
            "run, do not fit and were not measured.",
            measured_table(made["rows"]),
            measured_sentence(made["rows"]),
        ]
    )


def name_of(row: dict) -> str:
    return f"batch {row['batch']}, n = {row['length']}"


def gib(value: int | None) -> str:
    return "does not fit" if value is None else f"{value / GIB:.4g}"


def half_table(rows: list[dict]) -> str:
    header = ["batch and source", "multi-head, per beam", "paper: multi-head", "EL", "paper: EL", "per beam to EL",
              "multi-head, shared by beams", "shared to EL"]  # fmt: skip
    cells = []
    for row in rows:
        copied, shared, el = (row["half"][system] for system in MEASURED)
        paper = PAPER.get((row["batch"], row["length"]), ("", ""))
        cells.append([name_of(row), gib(copied), paper[0], gib(el), paper[1], f"{copied / el:g}x", gib(shared),
                      f"{shared / el:g}x"])  # fmt: skip
    return table(header, cells)


def paper_sentence(rows: list[dict]) -> str:
    """Which of the paper's numbers are not ours, rounded as the paper rounds."""
    apart = []
    for row in rows:
        for system, printed in zip(("stock-copied", "el"), PAPER.get((row["batch"], row["length"]), ())):
            exact = row["half"][system] / GIB
            decimals = len(printed.partition(".")[2])
            # half a unit of the last place, its ends included: ties are rounded either way
            if abs(exact - float(printed)) > 0.5 * 10**-decimals + 1e-9:
                apart.append(f"{name_of(row)}: {printed} there, {exact:.4f} here")
    shared = "The paper has no cache shared by beams, which is what stock fairseq 0.12 keeps."
    if not apart:
        return f"The paper's numbers are these, rounded. {shared}"
    return f"The paper's numbers are these, rounded, except ({'; '.join(apart)}), which it cut off. {shared}"


def measured_table(rows: list[dict]) -> str:
    header = ["batch and source"]
    for title in ("cache copied per beam", "stock fairseq", "fairseq_el"):
        header += [f"{title}: formula", f"{title}: measured"]
    cells = [
        [name_of(row)] + [gib(row[kind][system]) for system in MEASURED for kind in ("single", "measured")]
        for row in rows
    ]
    return table(header, cells)


def measured_sentence(rows: list[dict]) -> str:
    pairs = [(row["single"][s], row["measured"][s]) for row in rows for s in MEASURED if row["measured"][s] is not None]
    equal = sum(formula == found for formula, found in pairs)
    counted = f"{equal} of {len(pairs)} measured states are the formula's to the byte"
    largest = max(found for _, found in pairs)
    return f"{counted}; the largest measured was {gigabytes(largest)}."


EXPERIMENT = Experiment("table4", Settings(), QUICK, measure, figures, render)
