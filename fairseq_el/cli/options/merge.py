"""Merge the outputs of a sharded job.

The result is the file that a single run would have written.

    fairseq-el merge part.*.jsonl --output summaries.jsonl

All shards of one job must be there, each once and finished. Their records, such as part.03.jsonl.job, are read from
the same folder; a pattern may match them too.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("parts", nargs="+", type=Path, metavar="PART", help="outputs of fairseq-el summarize or translate with --shard")
    add("--output", required=True, type=Path, metavar="FILE", help="the merged file")
    add("--overwrite", action="store_true", help="replace the output if it exists")
