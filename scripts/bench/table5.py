"""The experiment `table5`: ROUGE of stock fairseq and of fairseq_el, with weights in single and in half precision.

Measured by `fairseq-el evaluate`, which runs `fairseq-generate`: on the demo's held-out texts, or with --path and
--data on any model and data set that it takes.
"""

import contextlib
import io
import json
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.driver import progress_bar
from bench.environment import BUILD, ROOT
from bench.experiment import Experiment, Loaded
from bench.generator import Record
from bench.report import opening, table

KINDS = ("ROUGE-1", "ROUGE-2", "ROUGE-L")
ROWS = {
    "stock": ("stock fairseq", "stock", False),
    "el": ("fairseq_el", "auto", False),
    "stock-half": ("stock fairseq, fp16 weights", "stock", True),
    "el-half": ("fairseq_el, fp16 weights", "auto", True),
}
# BART-large on CNN/DailyMail.
PAPER = {
    "stock": (44.21, 21.20, 41.03),
    "el": (44.21, 21.20, 41.03),
    "stock-half": (44.22, 21.20, 41.04),
    "el-half": (44.22, 21.21, 41.05),
}


@dataclass(frozen=True)
class Settings:
    path: str | None = None  # a folder that `fairseq-el evaluate` takes as --model; None for the demo
    data: str | None = None
    preset: str = "demo"
    limit: int | None = None  # of the demo's texts


QUICK = Settings(limit=8)  # fairseq leaves out a last batch whose size is no multiple of 8


def measure(settings: Settings, repeats: int, logs: Path) -> tuple[Loaded, list[Record]]:
    """Scores don't vary: one round, whatever `repeats`."""
    place = prepare(settings)
    records = []
    with progress_bar(len(ROWS)) as bar:
        for name, (title, attention, half) in ROWS.items():
            bar.set_description_str(title)
            build = logs / f"table5-{name}"
            form = ["--stock"] if attention == "stock" else ["--el-attention", attention]
            words = [*place, *form, "--cpu", *(["--fp16"] if half else []),
                     "--results-path", build]  # fmt: skip
            records.append({"row": name} | evaluate_once([str(word) for word in words], build))
            bar.update(1)
        bar.set_description_str("done")
    versions = {"fairseq": version("fairseq-fixed"), "torch": torch.__version__, "rouge-score": version("rouge-score")}
    return {"here": {"versions": versions}}, records


def prepare(settings: Settings) -> list[Any]:
    """What --model, --data and --preset are; the demo's data are made if need be."""
    from fairseq_el.errors import UserError

    if settings.path or settings.data:
        if not (settings.path and settings.data):
            raise UserError("--path, a folder with a model, and --data, binarised data for it: give both, or none")
        preset = settings.preset if settings.preset != "demo" else "cnndm"
        return ["--preset", preset, "--model", settings.path, "--data", settings.data]
    import demo

    folder, build = ROOT / "demo", BUILD / "demo"
    with contextlib.redirect_stdout(sys.stderr):
        data = demo.prepare(folder, build, settings.limit)
    references = data / "references"
    references.write_text("\n".join(demo.read_lines(folder / "test.target", settings.limit)) + "\n", encoding="utf-8")
    return ["--preset", "demo", "--model", folder, "--data", data, "--reference", references]


def evaluate_once(words: list[str], build: Path) -> Record:
    """The row that `fairseq-el evaluate` adds to its table, and the summaries."""
    from fairseq_el.cli import evaluate, options
    from fairseq_el.cli.fairseq_command import CommandFailed

    shutil.rmtree(build, ignore_errors=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            evaluate.run(options.parse(["evaluate", *words]))
    except CommandFailed as failure:
        said = re.findall(r"^(?:fairseq_el: error|\w*Error): .*$", str(failure), re.MULTILINE)
        return {"failed": said[-1][:200] if said else "fairseq-generate failed"}
    row = json.loads((build / "results.jsonl").read_text())
    (summaries,) = build.glob("*/summaries.txt")
    kept = ("scores", "sentences", "sentences_per_second", "peak_source_bytes", "preset")
    return {name: row[name] for name in kept} | {"summaries": summaries.read_text(encoding="utf-8").splitlines()}


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    stock = next((r["summaries"] for r in records if r["row"] == "stock" and "summaries" in r), None)
    rows = []
    for record in records:
        row = {name: value for name, value in record.items() if name != "summaries"}
        if stock and "summaries" in record:
            row["equal_to_stock"] = sum(ours == theirs for ours, theirs in zip(record["summaries"], stock))
        rows.append(row)
    return {"rows": rows, "is_demo": settings.path is None}


def render(results: dict[str, Any]) -> str:
    made = results["figures"]
    what = (
        "The demo model on its held-out package descriptions"
        if made["is_demo"]
        else f"The model {Path(results['settings']['path']).name} with the preset {made['rows'][0].get('preset')}"
    )
    return "\n\n".join(
        [
            *opening("Table 5: quality of the output", results),
            "### ROUGE\n\n"
            f"{what}, `fairseq-generate` by `fairseq-el evaluate`, beam search, rouge-score with stemming. The paper's "
            "numbers are of BART-large on CNN/DailyMail, another model and task: what compares is that rows are equal. "
            "fp16 weights: stock fairseq's `--fp16`, which computes in half precision, and ours, which on a CPU keeps "
            "weights in half precision and computes in single. `equal` counts the summaries that are stock "
            "fairseq's in single precision, character for character.",
            rouge_table(made["rows"]),
            difference_sentence(made["rows"]),
        ]
    )


def rouge_table(rows: list[dict[str, Any]]) -> str:
    header = ["system", *KINDS, "equal", "sentences/s", *(f"paper: {kind}" for kind in KINDS)]
    cells = []
    for row in rows:
        paper = [f"{score:.2f}" for score in PAPER[row["row"]]]
        if "failed" in row:
            cells.append([ROWS[row["row"]][0], *["failed"] * 3, "", "", *paper])
            continue
        scores = [f"{row['scores'][kind]:.2f}" if kind in row["scores"] else "" for kind in KINDS]
        equal = f"{row['equal_to_stock']:,}/{row['sentences']:,}" if "equal_to_stock" in row else ""
        cells.append([ROWS[row["row"]][0], *scores, equal, f"{row['sentences_per_second']:.2f}", *paper])
    return table(header, cells)


def difference_sentence(rows: list[dict[str, Any]]) -> str:
    known = {row["row"]: row for row in rows if "failed" not in row}
    words = []
    for ours, theirs in (("el", "stock"), ("el-half", "stock-half"), ("el-half", "stock")):
        if ours in known and theirs in known:
            a, b = known[ours]["scores"], known[theirs]["scores"]
            largest = max(abs(a[kind] - b[kind]) for kind in KINDS if kind in a)
            words.append(f"{ROWS[ours][0]} and {ROWS[theirs][0]}: {largest:.2f}")
    return (
        f"Largest difference of a score: {'; '.join(words)}. In the paper 0.00 in single and at most 0.01 in half "
        "precision."
        if words
        else ""
    )


EXPERIMENT = Experiment("table5", Settings(), QUICK, measure, figures, render)
