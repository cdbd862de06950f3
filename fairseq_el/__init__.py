"""EL-attention for fairseq: the same hypotheses from stock checkpoints, with a fraction of the memory.

Importing this package is what `--user-dir fairseq_el` does: it registers the `el_` architectures and tasks, lets
the stock task name `translation` stand for ours, and lets torch load the classes of released checkpoints.
"""

from fairseq_el import checkpoint, errors, models, tasks
from fairseq_el.accelerate import accelerate
from fairseq_el.generator import ELSequenceGenerator
from fairseq_el.quiet import silence_library_notices

__all__ = ["ELSequenceGenerator", "accelerate", "checkpoint", "errors", "models", "tasks"]

errors.install_hook()
silence_library_notices()
