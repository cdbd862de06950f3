"""Summarises a file of texts in their order: `fairseq-el summarize`."""

import argparse
import contextlib
import hashlib
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_el.cli import score
from fairseq_el.errors import UserError, explain
from fairseq_el.jobs import presets
from fairseq_el.jobs.inputs import Item, Texts
from fairseq_el.jobs.journal import Journal, WholeFile, check_folder, check_same_job
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.jobs.run import Engine, Finished, OneProcess, Run
from fairseq_el.jobs.shards import Part, Shard
from fairseq_el.jobs.summarizer import Summarizer, one_by_one
from fairseq_el.text import rouge

LEAST_SUMMARY = 20  # bytes
BAR = (
    "{desc}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}]{postfix}"
)


# ---- writing


class Output:
    """The file of summaries, or standard output."""

    def __init__(self, place: str, is_json: bool, summary_field: str):
        self.whole = None if place == "-" else WholeFile(Path(place))
        self.is_json = is_json
        self.summary_field = summary_field
        self.file = sys.stdout.buffer if self.whole is None else self.whole.file
        self.digest = hashlib.sha256()

    def write(self, item: Item, summary: str) -> None:
        line = as_json(item.record | {self.summary_field: summary}) if self.is_json else summary
        encoded = line.encode("utf-8") + b"\n"
        self.file.write(encoded)
        self.digest.update(encoded)
        if self.whole is None:
            self.file.flush()

    def form(self) -> str:
        return f"jsonl {self.summary_field}" if self.is_json else "text"

    def finish(self) -> None:
        if self.whole is not None:
            self.whole.finish()

    def close(self) -> None:
        """What is unfinished goes: the journal has it."""
        if self.whole is not None:
            self.whole.discard()


def as_json(record: dict[str, Any]) -> str:
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:  # half a character, which JSON can name and UTF-8 can't
        line = json.dumps(record)
    return line


# ---- the command


def run(args: argparse.Namespace) -> None:
    if args.engine == "ray":  # before hours of reading
        cluster = importlib.import_module("fairseq_el.jobs.ray_engine")
        if args.ray_address:
            cluster.check_address(args.ray_address)
    preset = presets.load(args.preset, args.search).changed(**args.changes)
    if args.deterministic:
        preset = one_by_one(preset)
    files = ModelFiles.find(args.model, args.bpe_dir)
    json_out = is_json(args.output) if args.output != "-" else is_json(args.input, args.format)
    texts = Texts(
        args.input,
        is_json(args.input, args.format),
        args.text_field,
        args.summary_field if json_out else None,
    )
    references = read_references(args.reference, texts) if args.reference else []
    job = {} if args.output == "-" else job_of(args, preset, files, texts)
    if args.resume and is_complete(args, job):
        return print(f"{args.output} is complete: nothing to resume", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        journal = None
        if args.output != "-":
            check_folder(Path(args.output), least_output(texts, json_out))
            check_free(args)
            journal = Journal(journal_path(args.output), job, args.resume, args.overwrite)
            stack.callback(journal.close)
        output = Output(args.output, json_out, args.summary_field)
        stack.callback(output.close)
        summaries, skipped = summarize(args, preset, texts, journal, output, keep=bool(references))
        if args.shard:
            part_of(args, job, texts, output, skipped).write()
        output.finish()
        if journal:
            journal.remove()
    if references:
        report(preset, references, summaries, sys.stderr if args.output == "-" else sys.stdout)


def is_json(place: str, chosen: str | None = None) -> bool:
    return chosen == "jsonl" if chosen else Path(place).suffix in (".jsonl", ".json", ".ndjson")


def journal_path(output: str) -> Path:
    return Path(f"{output}.journal")


def is_complete(args: argparse.Namespace, job: dict[str, Any]) -> bool:
    output = Path(args.output)
    if journal_path(args.output).exists() or not output.exists():
        return False
    if args.shard:
        part = Part.read(output)
        check_same_job(Part.record_of(output), part.job | {"shard": str(part.shard)}, job)
    return True


def least_output(texts: Texts, json_out: bool) -> int:
    """Bytes, in the journal and in the output: a summary is seldom shorter, and an object comes out with its text,
    of which escapes may have been up to half."""
    again = texts.size // 2 if json_out and texts.is_json else 0
    return again + LEAST_SUMMARY * texts.count


def check_free(args: argparse.Namespace) -> None:
    if Path(args.output).exists() and not (args.overwrite or journal_path(args.output).exists()):
        raise UserError(f"{args.output} exists: give another --output, or replace it with --overwrite")


def job_of(args: argparse.Namespace, preset: Preset, files: ModelFiles, texts: Texts) -> dict[str, Any]:
    """What must not change between the parts of an interrupted run."""
    options = {name: str(value) for name, value in preset.options.items()}
    ours = {"fp16": args.fp16, "stock": args.stock, "seed": args.seed, "window": args.window}
    reading = {"json": texts.is_json, "fields": list(texts.fields)}
    return {
        "input": texts.digest,
        "model": files.digest(),
        "set of options": options | ours | reading,
        "shard": str(args.shard or Shard()),
    }


def part_of(
    args: argparse.Namespace, job: dict[str, Any], texts: Texts, output: Output, skipped: int
) -> Part:
    """What `fairseq-el merge` has to know of a shard that is done."""
    common = {name: value for name, value in job.items() if name != "shard"}
    return Part(
        Path(args.output), args.shard, common | {"form of output": output.form()}, texts.count, args.window,
        skipped, output.digest.hexdigest(),
    )  # fmt: skip


def summarize(
    args: argparse.Namespace,
    preset: Preset,
    texts: Texts,
    journal: Journal | None,
    output: Output,
    keep: bool,
) -> tuple[list[str], int]:
    """Writes all summaries; returns them if they are to be kept, and how many texts were skipped."""
    kept = []
    shard = args.shard or Shard()
    count = shard.share(texts.count, args.window)
    if texts.count and not count:
        logging.warning(
            f"shard {shard} has nothing to do: {texts.count:,} texts are fewer windows of {args.window:,} than "
            "there are shards; a smaller --window, the same for all shards, shares them out"
        )
    with tqdm(total=count, unit=" sentences", bar_format=BAR, smoothing=0, mininterval=0.5) as bar:
        bar.set_postfix_str("loading")
        finished = Finished(journal, args.window)
        with open_engine(args, preset, texts, finished, shard) as engine:
            bar.set_postfix_str("", refresh=False)
            bar.reset()
            work = Run(engine, journal, finished, bar, args.on_error)
            for item, summary in work.over(texts, args.window, shard):
                output.write(item, summary)
                if keep:
                    kept.append(summary)
    if work.cut:
        logging.warning(engine.reader.describe_cut(work.cut, count))
    if work.skipped:
        logging.warning(f"{work.skipped:,} of {count:,} texts were skipped because of errors: no summary of them")
    return kept, work.skipped


@contextlib.contextmanager
def open_engine(
    args: argparse.Namespace, preset: Preset, texts: Texts, finished: Finished, shard: Shard
) -> Iterator[Engine]:
    options = {
        "stock": args.stock, "fp16": args.fp16, "cpu": args.cpu, "seed": args.seed,
        "deterministic": args.deterministic,
    }  # fmt: skip
    if args.engine != "ray":
        yield OneProcess(Summarizer.load(args.model, preset, bpe=args.bpe_dir, **options), args.window)
        return
    cluster = importlib.import_module("fairseq_el.jobs.ray_engine")
    files = ModelFiles.find(args.model, args.bpe_dir)
    job = cluster.Job(texts, args.window, shard, finished, files, options | {"preset": preset})
    with cluster.open_engine(job, args.ray_address, args.workers) as engine:
        yield engine


def read_references(path: Path, texts: Texts) -> list[str]:
    references = score.read_texts(path)
    if len(references) != texts.count:
        raise UserError(
            f"{path} has {len(references):,} references, {texts.name} has {texts.count:,} texts: give the "
            "file that belongs to it"
        )
    return references


def report(preset: Preset, references: list[str], summaries: list[str], where: Any) -> None:
    settings = preset.scoring()
    scores = rouge.rouge(references, summaries, settings.rouge_lsum)
    print(f"{len(references):,} pairs: {rouge.describe(scores, settings.rouge_bootstrap)}", file=where)
    if preset.options.get("scoring") == "sacrebleu":
        print(score.bleu(references, summaries), file=where)


def drop_standard_output() -> None:
    """Where it can't be written, Python would try again at its end, and complain about that too."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(args: argparse.Namespace) -> None:
    """args: of `options.summarize`."""
    logging.basicConfig(format="summarize: warning: %(message)s", level=logging.WARNING, force=True)
    try:
        args.shard = Shard.parse(args.shard) if args.shard else None
        run(args)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted" + (": go on with --resume." if journal_path(args.output).exists() else "."))
    except Exception as error:
        is_systems = isinstance(error, OSError)
        message = explain(error) or (str(getattr(error, "strerror", None) or error) if is_systems else None)
        if message is None:
            raise
        if is_systems and args.output == "-":
            drop_standard_output()
        kept = is_systems and journal_path(args.output).exists()
        hint = "; what was finished is kept, go on with --resume" if kept else ""
        sys.exit(f"summarize: error: {message}{hint}")
