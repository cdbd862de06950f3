#!/usr/bin/env python3
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

On many machines, each does a part of the work, and scripts/merge_shards.py puts the parts together:

    python scripts/summarize.py --shard 3/16 --model ... --input news.jsonl --output part.03.jsonl

Shards share out the input by windows of --window texts, within which texts are batched by length. A shard forms
the batches of a single run, so the merged file is the one that a single run writes. To the last bit its sums are
that run's with --attention always, never or stock, on the same kind of machine with as many threads. With auto they
also depend on how fast the machine is found to be and how long its summaries have been so far, as in any two runs:
scores may then differ by rounding (about 1e-6), and a summary where two candidates are as close as that.

Further options are those of fairseq-generate that a preset can have, each with a value: --beam 2,
--lenpen 1.5, --el-attention always, --el-block-ngrams false.
"""

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for fairseq_el where it isn't installed
logging.getLogger("fairseq").setLevel(logging.WARNING)  # it lists what it could also use
import deferred  # noqa: E402, F401, I001  (first: it makes the imports below faster)
import score  # noqa: E402

from fairseq_el import presets, scoring  # noqa: E402
from fairseq_el.errors import UserError, explain  # noqa: E402
from fairseq_el.journal import Journal, WholeFile, check_folder, check_same_job  # noqa: E402
from fairseq_el.presets import Preset  # noqa: E402
from fairseq_el.shards import Part, Shard  # noqa: E402
from fairseq_el.summarizer import (  # noqa: E402
    ON_ERROR,
    ModelFiles,
    Outcome,
    Summarizer,
    report_problem,
)

WINDOW = 1024  # texts that are read at a time and sorted by length
LEAST_SUMMARY = 20  # bytes
DEEPEST = 100  # that values of a JSON object may be nested
TEXT_FIELDS = ("text", "article", "document")
BAR = (
    "{desc}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}]{postfix}"
)


# ---- reading


class Item(NamedTuple):
    text: str
    record: dict[str, Any]  # what goes out again beside the summary


class Texts:
    """The input, which is read once to find what is wrong with it, and again to be summarised."""

    def __init__(self, place: str, is_json: bool, text_field: str | None, new_field: str | None):
        """text_field: None for the first of TEXT_FIELDS that is there; new_field: must not be there."""
        self.name = "standard input" if place == "-" else place
        self.is_json = is_json
        self.fields = (text_field,) if text_field else TEXT_FIELDS
        self.new_field = new_field
        self.file = seekable(sys.stdin.buffer if place == "-" else Path(place).open("rb"))
        self.digest, self.count = self._check()

    def _check(self) -> tuple[str, int]:
        digest, count = hashlib.sha256(), 0
        self.size = self.file.seek(0, os.SEEK_END)
        self.file.seek(0)
        with tqdm(total=self.size, desc="reading", unit="B", unit_scale=True, delay=2) as bar:
            for count, line in enumerate(self.file, start=1):
                self._item(line, count)
                digest.update(line)
                bar.update(len(line))
        return digest.hexdigest(), count

    def windows(self, size: int, shard: Shard) -> Iterator[tuple[int, list[Item]]]:
        """Those that a shard takes, each with its number among all."""
        self.file.seek(0)
        for window, first in enumerate(range(0, self.count, size)):
            lines = itertools.islice(self.file, size)
            if shard.takes(window):
                yield window, [self._item(line, number) for number, line in enumerate(lines, start=first + 1)]
            else:
                collections.deque(lines, maxlen=0)  # reads on, and keeps nothing

    def describe(self, item: Item, place: int) -> str:
        """place: of a text, counted from 0."""
        given = f" (id {json.dumps(item.record['id'])[:80]})" if self.is_json and "id" in item.record else ""
        return f"line {place + 1} of {self.name}{given}"

    def _item(self, line: bytes, number: int) -> Item:
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"line {number} of {self.name} is not UTF-8 (byte {error.start + 1}): convert the file, for "
                "example with iconv -f latin1 -t utf-8"
            ) from error
        if number == 1:
            text = text.removeprefix("\ufeff")  # with which some editors begin a file
        if not self.is_json:
            return Item(text, {"id": number})
        return self._from_json(text, number) if text.strip() else Item("", {})

    def _from_json(self, line: str, number: int) -> Item:
        where = f"line {number} of {self.name}"
        try:
            record = json.loads(line, parse_float=finite)
            if line.count("[") + line.count("{") > DEEPEST and depth_of(record) > DEEPEST:
                raise ValueError(f"its values are nested more than {DEEPEST} deep")  # and might not be written again
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: write one object a line ({error})") from error
        if not isinstance(record, dict):
            raise UserError(f"{where} is not a JSON object: write one object a line")
        if self.new_field in record:
            raise UserError(
                f"{where} has a field {self.new_field!r} already: name another for summaries with "
                "--summary-field"
            )
        field = next((field for field in self.fields if field in record), None)
        if field is None or not isinstance(record[field], str):
            has = ", ".join(map(str, record)) or "none"
            raise UserError(
                f"{where} has no text in a field {' or '.join(self.fields)} (its fields: {has}): name the "
                "field with --text-field"
            )
        return Item(record[field], record)


def finite(number: str) -> float:
    """JSON has no infinity, which 1e999 would come out as."""
    if math.isinf(value := float(number)):
        raise ValueError(f"{number[:20]} is too large a number")
    return value


def depth_of(record: dict[str, Any]) -> int:
    level: list[Any] = [record]
    depth = 0
    while level := [part for value in level for part in (value.values() if isinstance(value, dict) else value)]:
        level = [value for value in level if isinstance(value, dict | list)]
        depth += 1
    return depth


def seekable(file: BinaryIO) -> BinaryIO:
    """What is piped in goes to a file first."""
    if file.seekable():
        return file
    copy = tempfile.TemporaryFile()
    shutil.copyfileobj(file, copy)
    return copy


# ---- summarising


class Finished:
    """What an earlier run has left in the journal, window by window."""

    def __init__(self, journal: Journal | None, window_size: int):
        records = journal.records() if journal else iter(())
        self.groups = itertools.groupby(records, key=lambda record: record["lines"][0] // window_size)
        self.coming = next(self.groups, None)

    def of(self, window: int) -> list[dict[str, Any]]:
        if self.coming is None or self.coming[0] != window:
            return []
        records = list(self.coming[1])
        self.coming = next(self.groups, None)
        return records


class Run:
    """Summaries in the order of the texts, each batch of them recorded in the journal once it is done."""

    def __init__(self, summarizer: Summarizer, journal: Journal | None, bar: tqdm, on_error: str):
        self.summarizer = summarizer
        self.journal = journal
        self.bar = bar
        self.on_error = on_error
        self.cut = 0
        self.skipped = 0

    def over(self, texts: Texts, window_size: int, shard: Shard) -> Iterator[tuple[Item, str]]:
        finished = Finished(self.journal, window_size)
        for number, window in texts.windows(window_size, shard):
            first = number * window_size
            done: dict[int, str] = {}
            for record in finished.of(number):
                done.update(zip(record["lines"], record["summaries"], strict=True))
                self.cut += record["cut"]
                self.skipped += record["skipped"]
            self._pass_over(len(done) + sum(not item.text.strip() for item in window))
            if any(item.text.strip() and first + place not in done for place, item in enumerate(window)):
                self._summarize(window, first, done, texts.describe)
            for place, item in enumerate(window):
                yield item, done.get(first + place, "")

    def _summarize(
        self, window: list[Item], first: int, done: dict[int, str], describe: Callable[[Item, int], str]
    ) -> None:
        """Adds what is missing. Batches are those of an undisturbed run: so are sums, to the last bit; but of
        one that went through in parts only the rest is done."""
        sources = [self.summarizer.encode(item.text) for item in window]
        for batch in self.summarizer.batches(sources):
            missing = [place for place in batch if first + place not in done]
            for part in self.summarizer.outcomes([sources[place] for place in missing]) if missing else ():
                places = [missing[place] for place in part.places]
                if part.problem:
                    self._report(describe(window[places[0]], first + places[0]), part.problem)
                cut = sum(sources[place].is_cut for place in places)
                self._keep([first + place for place in places], part, cut)
                done.update(zip((first + place for place in places), part.summaries, strict=True))

    def _report(self, where: str, problem: str) -> None:
        resume = "--resume " if self.journal else ""
        kept = "what was finished is kept, " if self.journal else ""
        report_problem(where, problem, self.on_error, f"; {kept}leave it out with {resume}--on-error skip")

    def _keep(self, lines: list[int], part: Outcome, cut: int) -> None:
        skipped = int(bool(part.problem))
        if self.journal:
            record = {"lines": lines, "summaries": part.summaries, "cut": cut, "skipped": skipped}
            self.journal.append(record)
        self.cut += cut
        self.skipped += skipped
        self.bar.update(len(lines))

    def _pass_over(self, count: int) -> None:
        """Counts texts as done without counting them as speed."""
        self.bar.initial += count
        self.bar.n += count
        self.bar.refresh()


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
    preset = presets.load(args.preset, args.variant).changed(**changes)
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
        summarizer = Summarizer.load(
            args.model, preset, bpe=args.bpe, stock=args.attention == "stock", fp16=args.fp16, cpu=args.cpu,
            seed=args.seed,
        )  # fmt: skip
        bar.set_postfix_str("", refresh=False)
        bar.reset()
        work = Run(summarizer, journal, bar, args.on_error)
        for item, summary in work.over(texts, args.window, shard):
            output.write(item, summary)
            if keep:
                kept.append(summary)
    if work.cut:
        logging.warning(summarizer.describe_cut(work.cut, count))
    if work.skipped:
        logging.warning(f"{work.skipped:,} of {count:,} texts were skipped because of errors: no summary of them")
    return kept, work.skipped


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
    scores = scoring.rouge(references, summaries, settings.rouge_lsum)
    print(f"{len(references):,} pairs: {scoring.describe(scores, settings.rouge_bootstrap)}", file=where)
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
    add("--max-tokens", metavar="N", help="of the sources in a batch, padding included (default: 12000)")
    add("--memory-budget", metavar="SIZE", help="for the state of a batch, such as 2G (--el-memory-budget)")
    add("--attention", choices=("stock", "auto", "always", "never"),
        help="stock: fairseq's own attention and generator; the others: --el-attention")  # fmt: skip
    return parser


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
    """`--beam 2 --lenpen=1.5 --el-block-ngrams` by the names in presets; without a value, one is true."""
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
    if args.window < 1:
        parser.error("--window must be at least 1")
    logging.basicConfig(format="summarize: warning: %(message)s", level=logging.WARNING, force=True)
    try:
        args.shard = Shard.parse(args.shard) if args.shard else None
        run(args, changes_of(args, words))
    except KeyboardInterrupt:
        sys.exit("\nInterrupted" + (": go on with --resume." if journal_path(args.output).exists() else "."))
    except Exception as error:
        is_systems = isinstance(error, OSError)
        message = explain(error) or (error.strerror or str(error) if is_systems else None)
        if message is None:
            raise
        if is_systems and args.output == "-":
            drop_standard_output()
        kept = is_systems and journal_path(args.output).exists()
        hint = "; what was finished is kept, go on with --resume" if kept else ""
        sys.exit(f"summarize: error: {message}{hint}")


if __name__ == "__main__":
    main()
