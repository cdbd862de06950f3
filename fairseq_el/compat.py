"""Names that fairseq 0.12 uses and newer releases of its requirements have dropped."""

import types

import numpy as np

if not hasattr(np, "compat"):
    # Without it, fairseq can't read a text sentence by sentence (`--sample-break-mode eos`, fairseq-interactive
    # with a language model) under numpy 2.
    np.compat = types.SimpleNamespace(long=int)  # type: ignore[attr-defined]
