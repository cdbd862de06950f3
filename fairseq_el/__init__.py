"""EL-attention for fairseq: the same hypotheses from stock checkpoints, with a fraction of the memory.

Importing this package is what `--user-dir fairseq_el` does; `fairseq_el.plugin.register` lists the effects. The command
`fairseq-el` leaves them to its subcommands, so that it can print its help at once.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq_el.generation.generator import ELSequenceGenerator
    from fairseq_el.jobs.summarizer import Summarizer
    from fairseq_el.jobs.translator import Translator
    from fairseq_el.plugin.accelerate import accelerate

__version__ = "0.2.0"
HOMES = {
    "ELSequenceGenerator": "fairseq_el.generation.generator",
    "Summarizer": "fairseq_el.jobs.summarizer",
    "Translator": "fairseq_el.jobs.translator",
    "accelerate": "fairseq_el.plugin.accelerate",
}
__all__ = ["ELSequenceGenerator", "Summarizer", "Translator", "__version__", "accelerate"]


def __getattr__(name: str) -> object:
    """Imports the public names when they are first used."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def _is_command() -> bool:
    """True for `fairseq-el` and `python -m fairseq_el`. The latter's name is not in `sys.argv` yet, but stands in
    `sys.orig_argv` before the arguments that both have."""
    started = sys.orig_argv[-len(sys.argv)] if sys.argv[0] == "-m" else Path(sys.argv[0]).stem
    return started.removeprefix("-m") in ("fairseq-el", "fairseq_el")


if not _is_command():
    from fairseq_el.plugin.register import register

    register()
