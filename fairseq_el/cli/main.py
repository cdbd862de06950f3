"""The command `fairseq-el`: parses the command line, then imports the module of the subcommand and runs it."""

import importlib
import sys
from collections.abc import Sequence

from fairseq_el.cli import options
from fairseq_el.errors import explain

WITHOUT_FAIRSEQ = ("merge", "serve")


def main(words: Sequence[str] | None = None) -> None:
    """words: of the command line (default: `sys.argv[1:]`). Ends the process with one line where it fails."""
    args = options.parse(words)
    try:
        if args.command not in WITHOUT_FAIRSEQ:
            importlib.import_module("fairseq_el.plugin.register").register()
        importlib.import_module(f"fairseq_el.cli.{args.command}").main(args)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted.")
    except Exception as error:
        message = explain(error) or (str(error) if isinstance(error, OSError) else None)
        if message is None:
            raise
        sys.exit(f"{args.command}: error: {message}")
