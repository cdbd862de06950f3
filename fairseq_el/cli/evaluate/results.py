"""The table of results: a line of JSON for each run, with all that it was made with."""

import argparse
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fairseq_el.cli.evaluate.generating import Output
from fairseq_el.cli.evaluate.statistics import Estimate
from fairseq_el.cli.evaluate.variant import Variant
from fairseq_el.cli.fairseq_command import human_size
from fairseq_el.errors import UserError
from fairseq_el.jobs.atomic_file import check_writable
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.resources import TREE
from fairseq_el.text import rouge
from fairseq_el.text.sentences import read_lines

PACKAGES = ("torch", "fairseq-fixed", "fairseq", "fairseq_el", "rouge-score", "sacrebleu")


def row_of(
    args: argparse.Namespace, variant: Variant, files: ModelFiles, output: Output, estimates: dict[str, Estimate]
) -> dict[str, Any]:
    preset = variant.preset
    return {
        "preset": preset.name,
        "search": preset.search,
        "attention": variant.attention,
        "precision": variant.precision,
        "fp16": variant.fp16,
        "sentences": len(output.hypotheses),
        "scores": {name: round(estimate.value, 2) for name, estimate in estimates.items()},
        "intervals": {name: [round(end, 2) for end in estimate[1:]] for name, estimate in estimates.items()},
        "sentences_per_second": output.sentences_per_second,
        "peak_source_bytes": output.peak_bytes,
        "model": str(args.model),
        "model_digest": files.digest(),
        "data": str(args.data),
        "settings": {name: str(value) for name, value in preset.options.items()} | {"seed": str(args.seed)},
        "versions": versions(),
        "machine": {"processor": platform.machine(), "cores": rouge.available_cores()},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of this source tree, with a + if files have changed since; None where there is no git."""
    try:
        described = subprocess.run(
            ["git", "-C", str(TREE), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() if described.returncode == 0 else None


def read_results(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(line)
            as_cells(row, [])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"line {number} of {path} is not a result: move the file away or correct it"
            ) from error
        rows.append(row)
    return rows


def append_result(path: Path, row: dict[str, Any]) -> None:
    """Adds a whole row or none."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        if path.exists():
            os.truncate(path, before)
        raise


def check_results(path: Path) -> None:
    """Says what is wrong with the table, or with its folder, before hours of work and not after."""
    check_writable(path)
    read_results(path)
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def as_cells(row: dict[str, Any], kinds: list[str]) -> list[str]:
    scores = [f"{row['scores'][kind]:.2f}" if kind in row["scores"] else "" for kind in kinds]
    precision = row.get("precision", "auto")  # rows of earlier versions have none
    attention = ", ".join([row["attention"]] + [precision] * (precision != "auto") + ["fp16"] * row["fp16"])
    state = f"{row['peak_source_bytes']:,} bytes ({human_size(row['peak_source_bytes'])})"
    speed = f"{row['sentences_per_second']:.2f}"
    return [
        row["preset"],
        row["search"],
        attention,
        Path(row["model"]).name,
        f"{row['sentences']:,}",
        *scores,
        speed,
        state,
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["scores"]))
    titles = [
        "preset",
        "search",
        "attention",
        "model",
        "sentences",
        *kinds,
        "sentences/s",
        "source state at the peak",
    ]
    table = [titles, *(as_cells(row, kinds) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        left = [cell.ljust(width) for cell, width in zip(cells[:4], widths[:4], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(cells[4:], widths[4:], strict=True)]
        print("  ".join([*left, *right]).rstrip())
