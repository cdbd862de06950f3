"""Summarise a file of texts, in their order.

    python scripts/summarize.py --model demo --preset demo --input demo/test.source --output summaries.txt
    python scripts/summarize.py --model bart.large.cnn --preset cnndm --input news.jsonl --output out.jsonl
    echo "long text ..." | python scripts/summarize.py --model demo --preset xsum

A text file has a text a line. A file that ends in .jsonl has an object a line, such as
{"id": 7, "article": "..."}, and comes out as the same objects with "summary" added. Blank texts get empty
summaries, and stay in place.

Finished batches are kept in OUTPUT.journal. A run that was interrupted, killed or cut off from power goes on
where it was when it is started again with --resume, and ends with the file that an undisturbed run writes.

Where memory runs short, a batch is done in parts, down to one text. One that fails even alone, or for which the
model computes NaN, ends the run, or is skipped with --on-error skip.

With --engine ray many processes share the work, those of this machine or of a Ray cluster, with a model each; what one
was doing when it died is done again by another. Journal and --resume are the same.

Without Ray, each of many machines does a part of the work, and scripts/merge_shards.py puts the parts together:

    python scripts/summarize.py --shard 3/16 --model ... --input news.jsonl --output part.03.jsonl

Shards share out the input by windows of --window texts, within which texts are batched by length. Shards, and workers
of Ray, get the batches of a single run, so the file is the one that a single run writes. To the last bit its sums are
that run's with --attention always, never or stock, on the same kind of machine with as many threads. With auto they
also depend on how fast the machine is found to be and how long its summaries have been so far, as in any two runs:
scores may then differ by rounding (about 1e-6), and a summary where two candidates are as close as that.

Further options are those of fairseq-generate that a preset can have, each with a value: --beam 2,
--lenpen 1.5, --el-attention always, --el-stock-ngrams.
"""

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
from fairseq_el.jobs.inputs import TEXT_FIELDS, Item, Texts
from fairseq_el.jobs.journal import Journal, WholeFile, check_folder, check_same_job
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.jobs.run import Engine, Finished, OneProcess, Run
from fairseq_el.jobs.shards import Part, Shard
from fairseq_el.jobs.summarizer import ON_ERROR, Summarizer, one_by_one
from fairseq_el.text import rouge

WINDOW = 1024  # texts that are read at a time and sorted by length
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


def run(args: argparse.Namespace, changes: dict[str, str]) -> None:
    if args.engine == "ray":  # before hours of reading
        cluster = importlib.import_module("fairseq_el.jobs.ray_engine")
        if args.ray_address:
            cluster.check_address(args.ray_address)
    preset = presets.load(args.preset, args.variant).changed(**changes)
    if args.deterministic:
        preset = one_by_one(preset)
    files = ModelFiles.find(args.model, args.bpe)
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
    ours = {"fp16": args.fp16, "stock": args.attention == "stock", "seed": args.seed, "window": args.window}
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
    """What scripts/merge_shards.py has to know of a shard that is done."""
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
        "stock": args.attention == "stock", "fp16": args.fp16, "cpu": args.cpu, "seed": args.seed,
        "deterministic": args.deterministic,
    }  # fmt: skip
    if args.engine != "ray":
        yield OneProcess(Summarizer.load(args.model, preset, bpe=args.bpe, **options), args.window)
        return
    cluster = importlib.import_module("fairseq_el.jobs.ray_engine")
    files = ModelFiles.find(args.model, args.bpe)
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


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add_model_arguments(parser)
    add("--input", default="-", metavar="FILE", help="texts, or - for what is piped in (default)")
    add("--output", default="-", metavar="FILE", help="summaries, or - to print them (default)")
    add("--format", choices=("text", "jsonl"), help="of the input (default: jsonl if its name ends so)")
    add(
        "--text-field",
        metavar="NAME",
        help=f"of JSON objects (default: the first of {', '.join(TEXT_FIELDS)})",
    )
    add("--summary-field", metavar="NAME", default="summary", help="of JSON objects (default: summary)")
    add("--reference", type=Path, metavar="FILE", help="a reference a line, to score with when all is done")
    add("--shard", metavar="K/N", help="do only the K-th of N parts, for scripts/merge_shards.py to put together")
    add("--window", type=int, default=WINDOW, metavar="N", help=f"texts that are read at a time and batched by "
        f"length; shards take whole ones (default: {WINDOW})")  # fmt: skip
    again = parser.add_mutually_exclusive_group().add_argument
    again(
        "--resume", action="store_true", help="go on with an interrupted run, started with the same options"
    )
    again(
        "--overwrite", action="store_true", help="replace the output, or an interrupted run, of the same name"
    )
    add("--on-error", choices=ON_ERROR, default=ON_ERROR[0],
        help="a text for which memory doesn't suffice even alone, or whose scores are NaN: end the run (default), or "
        "report it, leave its summary empty and go on")  # fmt: skip
    add("--deterministic", action="store_true",
        help="the same bytes on the same kind of machine, whatever the order of texts, the engine, its workers and "
        "threads: one text at a time in one thread, which is slower")  # fmt: skip
    add("--max-tokens", metavar="N", help="of the sources in a batch, padding included (default: 12000)")
    add("--memory-budget", metavar="SIZE", help="for the state of a batch, such as 2G (--el-memory-budget)")
    add("--attention", choices=("stock", "auto", "always", "never"),
        help="stock: fairseq's own attention and generator; the others: --el-attention")  # fmt: skip
    add_engine_arguments(parser)
    return parser


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Who does the work."""
    add = parser.add_argument
    add("--engine", choices=("one", "ray"), default="one",
        help="one: this process (default); ray: many, here or on a Ray cluster, with the same output")  # fmt: skip
    add("--workers", type=int, metavar="N",
        help="processes of --engine ray, each with a model and its share of cores (default: one for each core or GPU, "
        "as far as memory goes)")  # fmt: skip
    add("--ray-address", metavar="HOST:PORT",
        help="a cluster that runs, or auto; its machines must have the model in the same place (default: a cluster of "
        "this machine's cores, for this run)")  # fmt: skip


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, with which settings."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="folder with model.pt, its dictionary and encoding; or demo")
    add("--bpe", metavar="DIR", help="folder with encoder.json and vocab.bpe, or with sentencepiece.model")
    add("--preset", required=True, help=f"{', '.join(presets.names())}, or a YAML file like those in configs/")
    add("--search", "--variant", dest="variant", default="beam",
        help="beam, diverse, greedy, or another of the preset's")  # fmt: skip
    add("--fp16", action="store_true", help="weights in half precision")
    add("--cpu", action="store_true", help="even where there is a GPU")
    add("--seed", type=int, default=1, help="for sampling (default: 1)")


def changes_of(args: argparse.Namespace, words: list[str]) -> dict[str, str]:
    """Options of the preset that the command line changes."""
    named = {
        "max_tokens": args.max_tokens,
        "el_memory_budget": args.memory_budget,
        "el_attention": args.attention,
    }
    changes = {name: value for name, value in named.items() if value not in (None, "stock")}
    return changes | further_options(words)


def further_options(words: list[str]) -> dict[str, str]:
    """`--beam 2 --lenpen=1.5 --el-stock-ngrams` by the names in presets; without a value, one is true."""
    options = {}
    while words:
        word, *words = words
        if not word.startswith("--"):
            raise UserError(
                f"{word!r} is not an option: options begin with --, the input is given with --input"
            )
        name, has_value, value = word[2:].partition("=")
        if not has_value:
            value, words = (
                (words[0], words[1:]) if words and not words[0].startswith("--") else ("true", words)
            )
        options[name.replace("-", "_")] = value
    return options


def drop_standard_output() -> None:
    """Where it can't be written, Python would try again at its end, and complain about that too."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    parser = command_line()
    args, words = parser.parse_known_args()
    if args.output == "-" and (args.resume or args.overwrite):
        parser.error("--resume and --overwrite are for runs with an --output")
    if args.shard and (args.output == "-" or args.reference):
        parser.error("--shard needs an --output and no --reference: score the merged file with scripts/score.py")
    if args.window < 1 or (args.workers is not None and args.workers < 1):
        parser.error("--window and --workers must be at least 1")
    if args.deterministic and (args.max_tokens or any(word.startswith("--batch-size") for word in words)):
        parser.error("--deterministic takes one text at a time: leave out --batch-size and --max-tokens")
    if args.engine == "ray" and "-" in (args.input, args.output):
        parser.error("--engine ray needs an --input and an --output that are files")
    if args.engine != "ray" and (args.workers or args.ray_address):
        parser.error("--workers and --ray-address are for --engine ray")
    logging.basicConfig(format="summarize: warning: %(message)s", level=logging.WARNING, force=True)
    try:
        args.shard = Shard.parse(args.shard) if args.shard else None
        run(args, changes_of(args, words))
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


if __name__ == "__main__":
    main()
