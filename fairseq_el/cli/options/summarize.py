"""Summarise or complete texts: one per line, or JSON lines.

    fairseq-el summarize --model demo --preset demo --input texts.txt --output summaries.txt
    fairseq-el summarize --model bart.large.cnn --preset cnndm --input news.jsonl --output out.jsonl
    echo "long text ..." | fairseq-el summarize --model demo --preset demo

A text file has one text per line. A .jsonl file has one object per line, such as {"id": 7, "article": "..."}; the
output has the same objects with "summary" and its "score" added. Blank texts get empty summaries and keep their
position.

Finished batches are kept in OUTPUT.journal. A run that was interrupted or killed continues with --resume, and ends with
the file that an undisturbed run writes. A finished output has a small record OUTPUT.job, which tells --resume and merge
what job it is of.

Where memory runs short, a batch is split, down to one text. A text that fails even alone, or for which the model
computes NaN, ends the run, or is skipped with --on-error skip.

With --engine ray many processes share the work, on this machine or on a Ray cluster, with a model each; work of a
process that died is done again by another. The journal and --resume are the same.

Without Ray, each of many machines can do a part of the work, and fairseq-el merge puts the parts together:

    fairseq-el summarize --shard 3/16 --model ... --input news.jsonl --output part.03.jsonl

Shards take whole windows of --window texts; texts are batched by length within a window. Shards and Ray workers form
the same batches as a single run, so they write the same file. Scores are equal to the last bit with --stock or
--el-attention always or never, on the same kind of machine with as many threads. With auto the form of attention
depends on measured times, as in any two runs: scores may then differ by rounding (about 1e-6), and a summary where two
candidates are that close.

All generation options of fairseq-generate that a preset can have are accepted too, each with a value: --beam 2,
--lenpen 1.5, --el-stock-ngrams.
"""

import argparse
from pathlib import Path

from fairseq_el.cli.options.parser import Parser, add_model_arguments, preset_changes


def add_arguments(parser: argparse.ArgumentParser, result: str = "summary", results: str = "summaries") -> None:
    """result, results: what comes out, also for `translate`."""
    add_model_arguments(parser)
    add_file_arguments(parser, result, results)
    add_run_arguments(parser)
    add_engine_arguments(parser)


def add_file_arguments(parser: argparse.ArgumentParser, result: str, results: str) -> None:
    add = parser.add_argument
    add("--input", default="-", metavar="FILE", help="texts, or - for standard input (default: -)")
    add("--output", default="-", metavar="FILE", help=f"{results}, or - for standard output (default: -)")
    add("--format", choices=("text", "jsonl"), help="of the input (default: jsonl if its name ends so, else text)")
    add("--text-field", metavar="NAME", help="of JSON objects (default: the first of text, article, document)")
    add(f"--{result}-field", metavar="NAME", default=result, dest="summary_field",
        help=f"of JSON objects (default: {result})")  # fmt: skip
    add("--nbest", type=int, default=1, metavar="N", help='hypotheses per text; with more than one, JSON lines get the '
        'others as "alternatives" (default: 1)')  # fmt: skip
    add("--reference", type=Path, metavar="FILE",
        help=f"one reference per line, to score the {results} with at the end (default: none)")  # fmt: skip


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    again = parser.add_mutually_exclusive_group().add_argument
    again("--resume", action="store_true", help="continue an interrupted run that had the same options")
    again("--overwrite", action="store_true", help="replace an output, or an interrupted run, of the same name")
    add("--on-error", choices=("abort", "skip"), default="abort", help="what to do with a text that does not fit in "
        "memory even alone, or whose scores are NaN: end the run, or report it and leave its output empty (default: "
        "abort)")  # fmt: skip
    add("--deterministic", action="store_true", help="the same bytes on the same kind of machine, whatever the order "
        "of texts, engine, workers and threads: one text at a time in one thread, which is slower")  # fmt: skip
    add("--max-tokens", metavar="N", help="source tokens in a batch, padding included (default: that of the preset, "
        "else 12000)")  # fmt: skip
    add("--el-memory-budget", metavar="SIZE", help="memory for the state of a batch, such as 2G (default: no limit)")
    add("--threads", type=int, metavar="N", help="threads of torch (default: all cores that this process may use)")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Who does the work."""
    add = parser.add_argument
    add("--engine", choices=("one", "ray"), default="one", help="one: this process; ray: many, here or on a Ray "
        "cluster, with the same output (default: one)")  # fmt: skip
    add("--workers", type=int, metavar="N", help="processes of --engine ray, each with a model and its share of cores "
        "(default: one per core or GPU, as far as memory goes)")  # fmt: skip
    add("--ray-address", metavar="HOST:PORT", help="a running cluster, or auto; its machines must have the model at "
        "the same path (default: start a cluster on this machine for this run)")  # fmt: skip
    add("--shard", metavar="K/N", help="do only the K-th of N parts, for fairseq-el merge (default: all)")
    add("--window", type=int, default=1024, metavar="N", help="texts that are read at a time and batched by length; "
        "shards take whole windows (default: 1024)")  # fmt: skip


def check(parser: Parser, args: argparse.Namespace, words: list[str]) -> None:
    for name in ("window", "workers", "threads", "nbest"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value} is out of range: at least 1")
    if args.output == "-" and (args.resume or args.overwrite):
        parser.error("--resume and --overwrite need an --output")
    if args.shard and (args.output == "-" or args.reference):
        parser.error("--shard needs an --output and no --reference: score the merged file with fairseq-el score")
    if args.deterministic and (args.max_tokens or any(word.startswith("--batch-size") for word in words)):
        parser.error("--deterministic takes one text at a time: leave out --batch-size and --max-tokens")
    if args.engine == "ray" and "-" in (args.input, args.output):
        parser.error("--engine ray needs an --input and an --output that are files")
    if args.engine != "ray" and (args.workers or args.ray_address):
        parser.error("--workers and --ray-address are for --engine ray")
    args.changes = preset_changes(args, words)
