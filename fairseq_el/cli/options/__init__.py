"""Every option of every subcommand. Nothing here imports torch or fairseq, so that help is printed at once.

A subcommand NAME has two modules: `options/NAME.py` declares and checks its options, `cli/NAME.py` does its work and
is imported when that begins.
"""

import argparse
import sys
from collections.abc import Sequence

from fairseq_el import __version__
from fairseq_el.cli.options import convert, evaluate, info, merge, prepare, score, serve, summarize, translate
from fairseq_el.cli.options.parser import Parser
from fairseq_el.errors import UserError

COMMANDS = {
    "summarize": summarize,
    "translate": translate,
    "serve": serve,
    "evaluate": evaluate,
    "score": score,
    "prepare": prepare,
    "convert": convert,
    "merge": merge,
    "info": info,
}


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of `fairseq-el`, and those of its subcommands by name."""
    parser = Parser(
        prog="fairseq-el",
        description="EL-attention for fairseq: stock checkpoints, the same output, faster and in less memory.",
        epilog="fairseq-el COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"fairseq_el {__version__}"
    parser.add_argument("-V", "--version", action="version", version=version, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", title="commands")
    own = {}
    for name, module in COMMANDS.items():
        text = module.__doc__ or ""
        own[name] = commands.add_parser(
            name, help=text.partition("\n")[0].rstrip("."), description=text, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(own[name])
    return parser, own


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the subcommand `command`, checked. For commands that take fairseq's generation options too,
    `changes` has these, by their names in presets."""
    parser, own = build_parser()
    args, rest = parser.parse_known_args(words)
    if args.command is None:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        parser.print_help()
        parser.exit()
    module = COMMANDS[args.command]
    if hasattr(module, "check"):
        try:
            module.check(own[args.command], args, rest)
        except UserError as error:
            sys.exit(f"{args.command}: error: {error}")
    elif rest:
        own[args.command].error(f"unrecognized arguments: {' '.join(rest)}")
    return args
