"""Serve a model over HTTP, with a page to try it.

    fairseq-el serve --model demo --port 8000
    fairseq-el serve --model bart.large.cnn --preset cnndm --precision auto,int8 --token-file token.txt --host 0.0.0.0

POST /v1/summaries takes {"text": "..."} or {"texts": [...]} with options such as "search", "beam", "nbest", "min_len"
and "max_len"; POST /v1/summaries/stream sends a greedy summary token by token. GET / is a page, /docs describes the
interface, /health, /ready and /metrics are for operators. Texts of concurrent requests are batched.

Listens on this machine only, unless --host says otherwise. SIGTERM or Ctrl-C finishes the accepted requests and ends.
Needs pip install 'fairseq_el[serve]'.
"""

import argparse
import math
from pathlib import Path

from fairseq_el.cli.options.parser import PRECISIONS, Parser, add_attention_argument, add_preset_arguments


def precisions(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in PRECISIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} does not exist: choose from {', '.join(PRECISIONS)}")
    if len(set(chosen)) < len(chosen):
        raise argparse.ArgumentTypeError(f"{text} names one twice")
    return chosen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_preset_arguments(parser)
    add("--precision", type=precisions, default="auto", metavar="NAME,...", help="on a CPU: auto, fp32, fp16, bf16 "
        "or int8, as in summarize; of several, each is loaded, and requests choose (default: auto)")  # fmt: skip
    add_attention_argument(parser)
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    add("--seed", type=int, default=1, metavar="N", help="for sampling (default: 1)")
    add("--threads", type=int, metavar="N", help="threads of torch (default: all cores that this process may use)")
    add("--max-tokens", metavar="N", help="source tokens in a batch, padding included (default: that of the preset, "
        "else 12000)")  # fmt: skip
    add("--batch-size", metavar="N", help="texts in a batch (default: that of the preset, else no limit)")
    add("--el-memory-budget", metavar="SIZE", help="memory for the state of a batch, such as 2G (default: no limit)")
    add_server_arguments(parser)
    add_limits(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen; 0.0.0.0 is all networks (default: "
        "127.0.0.1, this machine only)")  # fmt: skip
    add("--port", type=int, default=8000, metavar="N", help="0 is any that is free (default: 8000)")
    add("--token-file", type=Path, metavar="FILE", help="a file with a token, which clients have to send as "
        "Authorization: Bearer TOKEN (default: none)")  # fmt: skip
    add("--batch-wait", type=float, default=4, metavar="MS", help="milliseconds that a text waits for others while "
        "several clients are active (default: 4)")  # fmt: skip


def add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--limit-queue", type=int, default=512, metavar="N", help="texts that may wait; beyond, requests are answered "
        "429 (default: 512)")  # fmt: skip
    add("--limit-texts", type=int, default=64, metavar="N", help="texts of a request (default: 64)")
    add("--limit-body-bytes", type=int, default=1_000_000, metavar="N", help="size of a request (default: 1000000)")
    add("--limit-beam", type=int, default=16, metavar="N", help="beam of a request (default: 16)")
    add("--limit-max-len", type=int, default=1024, metavar="N", help="max_len of a request (default: 1024)")
    add("--limit-timeout", type=float, default=60, metavar="S", help="seconds until a request is answered 504 "
        "(default: 60)")  # fmt: skip


def check(parser: Parser, args: argparse.Namespace, words: list[str]) -> None:
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if (name.startswith("limit_") or name == "threads") and value is not None and not 0 < value < math.inf:
            parser.error(f"{option} {value} is out of range: more than 0")
    if not 0 <= args.port <= 65535:
        parser.error(f"--port {args.port} is out of range: 0 to 65535")
    if not 0 <= args.batch_wait <= 1000:
        parser.error(f"--batch-wait {args.batch_wait} is out of range: 0 to 1000")
    named = ("max_tokens", "batch_size", "el_memory_budget", "el_attention")
    args.changes = {name: value for name in named if (value := getattr(args, name)) is not None}
