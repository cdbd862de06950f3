"""Imports fairseq without two libraries of which it uses four functions, for audio and classification.

scikit-learn and SciPy are a third of the time that a script takes to start. They are imported when one of
these functions is called.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fairseq_el.errors import UserError

NAMES = ("sklearn", "sklearn.metrics", "scipy", "scipy.stats")
INSTALL_FAIRSEQ = (
    "pip install 'cython>=3,<4' ninja 'setuptools>=77,<81' wheel && "
    "pip install --no-deps --no-build-isolation fairseq-fixed==0.12.3.1"
)


class FairseqMissing(UserError, ImportError):
    """pip can't install fairseq as a requirement of ours: it would look for a torchaudio that fits torch."""


class Deferred(ModuleType):
    """Stands for a module. What is taken from it are functions that import it when they are called."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: getattr(importlib.import_module(self.__name__), name)(
            *args, **options
        )


def import_fairseq() -> None:
    """Leaves everything else as it was: whoever imports these libraries afterwards gets them."""
    if any(name in sys.modules for name in ("fairseq", *NAMES)):
        return
    standing_in = {name: Deferred(name) for name in NAMES}
    for name, module in standing_in.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(standing_in[parent], own, module)
    sys.modules.update(standing_in)
    try:
        importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        raise FairseqMissing(f"fairseq is not installed: {INSTALL_FAIRSEQ}") from None
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)
