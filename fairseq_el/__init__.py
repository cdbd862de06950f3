"""EL-attention for fairseq: the same hypotheses from stock checkpoints, with a fraction of the memory.

Importing this package is what `--user-dir fairseq_el` does: it registers the `el_` architectures and tasks and the
scorer `rouge`, lets the stock task names `translation` and `language_modeling` stand for ours, and lets torch load
the classes of released checkpoints.
"""

from fairseq_el import checkpoint, compat, errors, models, scoring, tasks
from fairseq_el.accelerate import accelerate
from fairseq_el.generator import ELSequenceGenerator
from fairseq_el.quiet import silence_library_notices
from fairseq_el.summarizer import Summarizer

__all__ = [
    "ELSequenceGenerator",
    "Summarizer",
    "accelerate",
    "checkpoint",
    "compat",
    "errors",
    "models",
    "scoring",
    "tasks",
]

errors.install_hook()
silence_library_notices()
