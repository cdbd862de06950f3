"""Imports fairseq without scikit-learn and SciPy, which take a third of its import time.

fairseq imports four functions from them at the top of modules for audio and classification. Here these functions import
their library when they are called.
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


class LazyModule(ModuleType):
    """A module whose functions import the real module when they are called."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: getattr(importlib.import_module(self.__name__), name)(*args, **options)


def import_fairseq() -> None:
    """Imports fairseq. Code that imports scikit-learn or SciPy later gets the real modules.

    Where one of them is loaded already, there is nothing to save, and fairseq gets the real ones too.
    """
    if any(name in sys.modules for name in ("fairseq", *NAMES)):
        importlib.import_module("fairseq")
        return
    lazy = {name: LazyModule(name) for name in NAMES}
    for name, module in lazy.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(lazy[parent], own, module)
    sys.modules.update(lazy)
    try:
        importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        raise FairseqMissing(f"fairseq is not installed: {INSTALL_FAIRSEQ}") from None
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)
