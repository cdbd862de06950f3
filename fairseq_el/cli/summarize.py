"""Summarises or translates a file of texts in their order: `fairseq-el summarize` and `fairseq-el translate`."""

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fairseq_el.cli import score
from fairseq_el.cli.chosen_preset import load_preset
from fairseq_el.errors import UserError, explain
from fairseq_el.jobs.atomic_file import check_writable
from fairseq_el.jobs.inputs import Texts
from fairseq_el.jobs.journal import Journal, check_same_job
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.output import Output, added_fields
from fairseq_el.jobs.presets import Preset
from fairseq_el.jobs.run import Engine, Finished, OneProcess, Run
from fairseq_el.jobs.search_checks import check_options
from fairseq_el.jobs.shards import Part, Shard
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.plugin import threads
from fairseq_el.text import rouge

LEAST_SUMMARY = 20  # bytes
BAR = (
    "{desc}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}]{postfix}"
)


def run(args: argparse.Namespace) -> None:
    if args.engine == "ray" and args.ray_address:  # before hours of reading
        importlib.import_module("fairseq_el.jobs.ray_cluster").check_address(args.ray_address)
    elif args.engine == "ray":
        importlib.import_module("fairseq_el.jobs.ray_engine")
    if args.threads:
        torch.set_num_threads(args.threads)
    files = ModelFiles.find(args.model, args.bpe_dir)
    preset = preset_of(args, files)
    check_options(preset.options, preset.name)
    json_out = is_json(args.output) if args.output != "-" else is_json(args.input, args.format)
    new_fields = added_fields(args.summary_field) if json_out else ()
    texts = Texts(args.input, is_json(args.input, args.format), args.text_field, new_fields)
    references = read_references(args.reference, texts) if args.reference else []
    form = f"jsonl {args.summary_field}" if json_out else "text"
    job = {} if args.output == "-" else job_of(args, preset, files, texts) | {"form of output": form}
    if args.resume and is_complete(args, job):
        return print(f"{args.output} is complete: nothing to resume", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        journal = None
        if args.output != "-":
            check_writable(Path(args.output), least_output(texts, json_out))
            check_free(args)
            journal = Journal(journal_path(args.output), job, args.resume, args.overwrite)
            stack.callback(journal.close)
        output = Output(args.output, json_out, args.summary_field, preset.options.get("nbest", 1))
        stack.callback(output.close)
        summaries, skipped = summarize(args, preset, texts, journal, output, keep=bool(references))
        if journal:
            part_of(args, job, texts, output, skipped).write()
        output.finish()
        if journal:
            journal.remove()
    if references:
        report(preset, references, summaries, sys.stderr if args.output == "-" else sys.stdout)


def preset_of(args: argparse.Namespace, files: ModelFiles) -> Preset:
    preset = load_preset(args, files)
    if args.nbest > 1:
        preset = preset.changed(nbest=args.nbest)
    return preset.deterministic() if args.deterministic else preset


def is_json(file: str, chosen: str | None = None) -> bool:
    return chosen == "jsonl" if chosen else Path(file).suffix in (".jsonl", ".json", ".ndjson")


def journal_path(output: str) -> Path:
    return Path(f"{output}.journal")


def is_complete(args: argparse.Namespace, job: dict[str, Any]) -> bool:
    """True if the output is the finished one of this job; raises a `UserError` if it is another's."""
    output = Path(args.output)
    if journal_path(args.output).exists() or not output.exists():
        return False
    part = Part.find(output)
    if part is None:
        raise UserError(
            f"{output} exists without a journal and without {Part.record_of(output).name}, so --resume can't tell "
            "which job it is of: give another --output, or replace it with --overwrite"
        )
    check_same_job(output, part.job | {"shard": str(part.shard)}, job)
    part.check_unchanged()
    return True


def least_output(texts: Texts, json_out: bool) -> int:
    """A lower bound of the output in bytes. An object is written with its text, which may shrink to half without its
    escapes."""
    again = texts.size // 2 if json_out and texts.is_json else 0
    return again + LEAST_SUMMARY * texts.count


def check_free(args: argparse.Namespace) -> None:
    if Path(args.output).exists() and not (args.overwrite or journal_path(args.output).exists()):
        raise UserError(f"{args.output} exists: give another --output, or replace it with --overwrite")


def job_of(args: argparse.Namespace, preset: Preset, files: ModelFiles, texts: Texts) -> dict[str, Any]:
    """What must not change when a run is resumed."""
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
    """The record of a finished output, for --resume and `fairseq-el merge`."""
    common = {name: value for name, value in job.items() if name != "shard"}
    digest = output.digest.hexdigest()
    return Part(Path(args.output), args.shard or Shard(), common, texts.count, args.window, skipped, digest)


def summarize(
    args: argparse.Namespace,
    preset: Preset,
    texts: Texts,
    journal: Journal | None,
    output: Output,
    keep: bool,
) -> tuple[list[str], int]:
    """Writes all summaries; returns them if `keep`, and how many texts were skipped."""
    kept = []
    shard = args.shard or Shard()
    count = shard.share(texts.count, args.window)
    if texts.count and not count:
        logging.warning(
            f"shard {shard} has nothing to do: {texts.count:,} texts are fewer windows of {args.window:,} than "
            "there are shards; use a smaller --window, the same for all shards"
        )
    with tqdm(total=count, unit=" sentences", bar_format=BAR, smoothing=0, mininterval=0.5) as bar:
        bar.set_postfix_str("loading")
        finished = Finished(journal, args.window)
        with open_engine(args, preset, texts, finished, shard) as engine:
            bar.set_postfix_str("", refresh=False)
            bar.reset()
            work = Run(engine, journal, finished, bar, args.on_error)
            for item, candidates in work.over(texts, args.window, shard):
                output.write(item, candidates)
                if keep:
                    kept.append(candidates[0].summary if candidates else "")
    if work.counts["cut"]:
        logging.warning(engine.batcher.describe_cut(work.counts["cut"], count))
    if work.counts["unknown"]:
        logging.warning(engine.batcher.describe_unknown(work.counts["unknown"], count))
    if skipped := work.counts["skipped"]:
        logging.warning(f"{skipped:,} of {count:,} texts were skipped because of errors: no output of them")
    return kept, work.counts["skipped"]


@contextlib.contextmanager
def open_engine(
    args: argparse.Namespace, preset: Preset, texts: Texts, finished: Finished, shard: Shard
) -> Iterator[Engine]:
    options = {
        "stock": args.stock, "fp16": args.fp16, "cpu": args.cpu, "seed": args.seed,
        "deterministic": args.deterministic,
    }  # fmt: skip
    if args.engine != "ray":
        before = threads.CpuTime.now()
        summarizer = Summarizer.load(args.model, preset, bpe_dir=args.bpe_dir, **options)
        advice = threads.describe_crowding(torch.get_num_threads(), threads.free_cores(before))
        if advice and not args.threads:
            logging.warning(advice)
        yield OneProcess(summarizer, args.window)
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
    """If standard output can't be written, Python would flush it again at exit, and fail with a second message."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(args: argparse.Namespace) -> None:
    """args: of `options.summarize` or `options.translate`."""
    logging.basicConfig(format=f"{args.command}: warning: %(message)s", level=logging.WARNING, force=True)
    try:
        args.shard = Shard.parse(args.shard) if args.shard else None
        run(args)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted" + (": continue with --resume." if journal_path(args.output).exists() else "."))
    except Exception as error:
        is_systems = isinstance(error, OSError)
        message = explain(error) or (str(getattr(error, "strerror", None) or error) if is_systems else None)
        if message is None:
            raise
        if is_systems and args.output == "-":
            drop_standard_output()
        kept = is_systems and journal_path(args.output).exists()
        hint = "; what was finished is kept, continue with --resume" if kept else ""
        sys.exit(f"{args.command}: error: {message}{hint}")
