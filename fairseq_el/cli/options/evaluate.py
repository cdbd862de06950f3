"""Run fairseq-generate with a preset, and score its output.

A row with the scores is added to a table of results.

    fairseq-el evaluate --preset xsum --model bart.large.xsum --data xsum/bin
    fairseq-el evaluate --preset xsum --model bart.large.xsum --data xsum/bin --stock
    fairseq-el evaluate --preset xsum --model bart.large.xsum --data xsum/bin --precision int8 --compare exact
    fairseq-el evaluate --preset gpt2_cnndm --search topk --model gpt2 --data cnndm

--data is a folder of fairseq's binarised data, such as fairseq-el prepare writes. ROUGE compares with test.references
next to it if that exists, else with the targets in the data. For language models --data is the folder with
test.source, whose texts become prompts. A row has scores, sentences per second, the peak memory of the cached source
state, all settings and versions. --stock measures fairseq itself.

--compare exact runs the data set again in the precision that changes nothing, --compare stock with stock fairseq, and
prints how many summaries are identical, the scores of both with 95% intervals, and the texts whose summaries differ
most. --html writes a page with all of it, to be read without a network: settings, scores, plots, and every text with
its reference and summaries, to be sorted and searched.

All generation options of fairseq-generate that a preset can have are accepted too, each with a value: --batch-size 8.
"""

import argparse
from pathlib import Path

from fairseq_el.cli.options.parser import Parser, add_model_arguments, preset_changes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--data", required=True, type=Path, metavar="DIR", help="binarised data, or texts for language models")
    add("--gen-subset", default="test", metavar="NAME", help="part of the data to generate (default: test)")
    add("--reference", type=Path, metavar="FILE", help="one reference per line, <n> between its sentences (default: "
        "SUBSET.references next to the data, else the targets in the data)")  # fmt: skip
    add("--results-path", type=Path, default=Path("results"), metavar="DIR", help="folder for the table results.jsonl, "
        "summaries and logs (default: results in the current folder)")  # fmt: skip
    add("--compare", choices=("exact", "stock"), help="run the data set twice and say what differs: from exact "
        "arithmetic, or from stock fairseq (default: run it once)")  # fmt: skip
    add("--html", type=Path, metavar="FILE", help="write a page with scores, plots and all texts (default: none)")


def check(parser: Parser, args: argparse.Namespace, words: list[str]) -> None:
    args.changes = preset_changes(args, words)
