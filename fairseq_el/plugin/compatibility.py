"""Names that fairseq 0.12 uses and newer releases of its requirements have dropped."""

import types

import numpy as np


def restore_numpy_names() -> None:
    """Without `np.compat`, fairseq can't read a text sentence by sentence under numpy 2: `--sample-break-mode eos`, and
    fairseq-interactive with a language model."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)  # type: ignore[attr-defined]
