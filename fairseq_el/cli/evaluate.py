"""Runs `fairseq-generate` with a preset, scores its output and adds a row to a table: `fairseq-el evaluate`."""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from fairseq.data import data_utils, indexed_dataset
from tqdm import tqdm

from fairseq_el.cli import score
from fairseq_el.cli.fairseq_command import CommandFailed, fairseq, human_size
from fairseq_el.errors import UserError
from fairseq_el.jobs import presets
from fairseq_el.jobs.atomic_file import AtomicFile, check_writable
from fairseq_el.jobs.default_preset import default_preset
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.jobs.results import as_summary
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.resources import TREE, USER_DIR
from fairseq_el.text import rouge
from fairseq_el.text.sentences import one_line, read_lines
from fairseq_el.text.tokenizer import Tokenizer

STOCK = ["--user-dir", str(USER_DIR), "--task", "stock_cache_meter"]
OURS = ["--user-dir", str(USER_DIR), "--el-profile"]
PACKAGES = ("torch", "fairseq-fixed", "fairseq", "fairseq_el", "rouge-score", "sacrebleu")
BAR = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


# ---- data


@dataclass
class Data:
    folder: Path  # what fairseq-generate reads
    subset: str
    sentences: int
    references: list[str] | None  # None: the targets in the folder


def find_data(place: Path, subset: str, reference: Path | None) -> Data:
    """Binarised pairs, and their references if these are text."""
    indices = sorted(place.glob(f"{subset}.*-*.*.idx"))
    if not indices:
        raise UserError(
            f"{place} has no binarised {subset} set (no file like {subset}.source-target.source.idx): make "
            "it with fairseq-el prepare, or name another with --gen-subset"
        )
    sentences = len(data_utils.load_indexed_dataset(str(indices[0].with_suffix("")), None))
    beside = place.parent / f"{subset}.references"
    reference = reference or (beside if beside.is_file() else None)
    return Data(place, subset, sentences, read_references(reference, sentences) if reference else None)


def make_prompts(args: argparse.Namespace, preset: Preset, build: Path) -> Data:
    """The texts of a data set as prompts for a language model, in fairseq's binarised form."""
    place = args.data if (args.data / f"{args.gen_subset}.source").is_file() else args.data.parent
    path = place / f"{args.gen_subset}.source"
    if not path.is_file():
        raise UserError(f"{args.data} has no {path.name}: give the folder that fairseq-el prepare wrote")
    summarizer = Summarizer.load(args.model, preset, bpe_dir=args.bpe_dir, cpu=True)
    dictionary = summarizer.task.source_dictionary
    builder = indexed_dataset.make_builder(str(build / "test.bin"), "mmap", len(dictionary))
    sentences = 0
    for sentences, text in enumerate(tqdm(read_lines(path), desc="prompts", unit=" texts", delay=2), start=1):
        tokens = summarizer.batcher.encode(text).tokens
        if not tokens:
            raise UserError(f"line {sentences} of {path} is blank: leave out such pairs")
        builder.add_item(torch.tensor([*tokens, dictionary.eos()]))
    builder.finalize(str(build / "test.idx"))
    shutil.copyfile(ModelFiles.find(args.model, args.bpe_dir).dictionary("source"), build / "dict.txt")
    beside = (place / f"{args.gen_subset}.{kind}" for kind in ("references", "target"))
    reference = args.reference or next(filter(Path.is_file, beside), place / f"{args.gen_subset}.target")
    return Data(build, "test", sentences, read_references(reference, sentences))


def read_references(path: Path, sentences: int) -> list[str]:
    references = score.read_texts(path)
    if len(references) != sentences:
        raise UserError(
            f"{path} has {len(references):,} references, but there are {sentences:,} sentences: give its own"
        )
    return references


# ---- generating


@dataclass
class Output:
    """What `fairseq-generate` printed, in pieces, by sentence."""

    source_lengths: dict[int, int] = field(default_factory=dict)
    targets: dict[int, list[str]] = field(default_factory=dict)
    hypotheses: dict[int, list[str]] = field(default_factory=dict)
    sentences_per_second: float = 0.0
    peak_bytes: int = 0

    def read(self, line: str) -> bool:
        """True if the line was a hypothesis."""
        if match := re.match(r"S-(\d+)\t(.*)", line):
            self.source_lengths[int(match[1])] = len(match[2].split())
        elif match := re.match(r"T-(\d+)\t(.*)", line):
            self.targets[int(match[1])] = match[2].split()
        elif match := re.match(r"H-(\d+)\t\S+\t(.*)", line):
            self.hypotheses[int(match[1])] = match[2].split()
            return True
        elif match := re.search(r"Translated .* \(([\d.]+) sentences/s", line):
            self.sentences_per_second = float(match[1])
        elif match := re.match(r"(?:stock|fairseq_el) \| peak source state: (\d+) bytes", line):
            self.peak_bytes = int(match[1])
        return False


def generate(args: argparse.Namespace, preset: Preset, files: ModelFiles, data: Data, log: Path) -> Output:
    output = Output()
    with tqdm(total=data.sentences, bar_format=BAR, mininterval=0.5) as bar:
        bar.set_postfix_str("loading")

        def on_line(line: str) -> None:
            if output.read(line):
                bar.set_postfix_str("", refresh=False)
                bar.update()

        fairseq(
            ["fairseq-generate", data.folder.resolve(), "--path", files.checkpoint.resolve(),
             "--gen-subset", data.subset, "--no-progress-bar", *system_arguments(args, preset)],
            log=log,
            on_line=on_line,
        )  # fmt: skip
    if len(output.hypotheses) != data.sentences or not output.sentences_per_second or not output.peak_bytes:
        raise UserError(
            f"fairseq-generate left out {data.sentences - len(output.hypotheses):,} of {data.sentences:,} "
            f"sentences, its speed or its peak of memory: see {log}"
        )
    return output


def system_arguments(args: argparse.Namespace, preset: Preset) -> list[str]:
    """Scores are left to us: fairseq would compute them on pieces."""
    left_out = [name for name in preset.options if name == "scoring" or name.startswith("rouge_")]
    words = ["--fp16"] * args.fp16 + ["--cpu"] * args.cpu + ["--seed", str(args.seed)]
    if is_language_model(preset):
        words += ["--sample-break-mode", "eos"]
    if args.stock:
        left_out += [name for name in preset.options if name == "task" or name.startswith("el_")]
    arguments = preset.changed(**dict.fromkeys(left_out)).arguments()
    return [*words, *(STOCK if args.stock else OURS), *arguments]


def is_language_model(preset: Preset) -> bool:
    return "language_modeling" in preset.options.get("task", "translation")


# ---- scoring


def texts_of(
    output: Output, data: Data, preset: Preset, vocabulary: Tokenizer
) -> tuple[list[str], list[str]]:
    """References and summaries in the order of the data."""
    order = range(data.sentences)
    prompts = output.source_lengths if is_language_model(preset) else {}  # hypotheses begin with them
    written = [output.hypotheses[i][prompts.get(i, 0) :] for i in order]
    summaries = [as_summary(vocabulary.decode(pieces), preset) for pieces in written]
    references = data.references
    if references is None:
        references = [one_line(vocabulary.decode(output.targets[i])) for i in order]
    return references, summaries


def scores_of(references: list[str], summaries: list[str], preset: Preset) -> dict[str, float]:
    scores = rouge.rouge(references, summaries, preset.scoring().rouge_lsum)
    means = {name: round(float(column.mean()), 2) for name, column in scores.items()}
    if preset.options.get("scoring") == "sacrebleu":
        import sacrebleu

        bleu = sacrebleu.corpus_bleu(summaries, [[one_line(reference) for reference in references]])
        means["BLEU"] = round(bleu.score, 2)
    return means


# ---- results


def row_of(
    args: argparse.Namespace, preset: Preset, files: ModelFiles, output: Output, scores: dict[str, float]
) -> dict:
    return {
        "preset": preset.name,
        "search": preset.search,
        "attention": attention_of(args, preset),
        "fp16": args.fp16,
        "sentences": len(output.hypotheses),
        "scores": scores,
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
    attention = row["attention"] + (", fp16" if row["fp16"] else "")
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


# ---- the command


def run(args: argparse.Namespace) -> None:
    files = ModelFiles.find(args.model, args.bpe_dir)
    preset = presets.load(args.preset or default_preset(files), args.search).changed(**args.changes)
    table = args.results_path / "results.jsonl"
    name = "-".join([preset.name, preset.search, attention_of(args, preset)] + ["fp16"] * args.fp16)
    folder = (args.results_path / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    check_results(table)
    if args.stock:
        files.load_state()  # refuses a checkpoint whose code stock fairseq would run
    if not is_language_model(preset):
        data = find_data(args.data, args.gen_subset, args.reference)
    elif args.stock:
        raise UserError(
            "stock fairseq can't count tokens from the end of a prompt: leave out --stock"
        )
    else:
        data = make_prompts(args, preset, folder)
    output = generate(args, preset, files, data, folder / "generate.log")
    references, summaries = texts_of(output, data, preset, Tokenizer(files.build_encoding()))
    with AtomicFile(folder / "summaries.txt") as whole:
        whole.file.writelines(f"{summary}\n".encode() for summary in summaries)
    append_result(table, row_of(args, preset, files, output, scores_of(references, summaries, preset)))
    print_table(read_results(table))


def attention_of(args: argparse.Namespace, preset: Preset) -> str:
    return "stock" if args.stock else str(preset.options.get("el_attention", "auto"))


def main(args: argparse.Namespace) -> None:
    """args: of `options.evaluate`."""
    try:
        run(args)
    except CommandFailed as failure:  # the error line of fairseq-generate if it printed one
        said = re.findall(r"^fairseq_el: (error: .*)$", str(failure), re.MULTILINE)
        sys.exit(f"evaluate: {said[-1]}" if said else str(failure))
