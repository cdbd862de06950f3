"""Loads checkpoints unchanged and safely: the one way in for fairseq's files and for Hugging Face folders.

torch >= 2.6 reads checkpoints with an unpickler that knows tensors and plain containers, and
refuses everything else (`weights_only=True`). Released fairseq checkpoints hold a few classes more.
Importing this module allow-lists those, and the protection stays on: what is not listed here, such
as a call of `os.system`, is refused before anything runs.

Besides tensors and containers a fairseq checkpoint of any age holds

- `argparse.Namespace`: the settings, as `args` (up to 0.10) or inside `cfg` (since);
- up to 0.8 the meters of `extra_state`, as objects of the module of that time, `fairseq.meters`;
- numpy arrays and numbers: the BLEU counts of `--eval-bleu`, losses.

numpy's own functions for unpickling are not safe to allow: `numpy.dtype` takes over any flags a
file gives it, and an object dtype disguised as plain data makes `scalar` and `ndarray` use bytes of
the file as pointers. So their names are bound to stand-ins that make arrays of numbers and nothing
else.
"""

import argparse
import math
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.logging import meters
from omegaconf import DictConfig
from torch import Tensor

from fairseq_el import errors
from fairseq_el.checkpoints import packed_file, validation
from fairseq_el.checkpoints.format import quiet
from fairseq_el.checkpoints.huggingface import HuggingFaceFolder, is_huggingface
from fairseq_el.errors import UserError

NUMBER = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")  # numpy's codes of plain numbers
METERS = ("AverageMeter", "SumMeter", "TimeMeter", "StopwatchMeter")
METER_MODULES = ("fairseq.meters", "fairseq.logging.meters")  # up to fairseq 0.9, and since
NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # numpy 1, numpy 2


class NumberType:
    """What stands in for `numpy.dtype` while unpickling: the code and byte order of a number."""

    def __init__(self, code: str, align: bool = False, copy: bool = True):
        if not isinstance(code, str) or not NUMBER.fullmatch(code):
            raise pickle.UnpicklingError(f"refused: numpy data of type {code!r}")
        self.code = code
        self.byte_order: Any = "="

    def __setstate__(self, state: tuple) -> None:
        # (version, byte order, base, names, fields, size, alignment, flags): with numbers, nothing
        # but the byte order says anything, and nothing else is read.
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError("refused: a malformed numpy dtype")
        self.byte_order = state[1]

    def dtype(self) -> np.dtype:
        return np.dtype(self.code).newbyteorder(self.byte_order)


class NumberArray(np.ndarray):
    """What stands in for `numpy.ndarray` while unpickling: an array that can only hold numbers.

    It is an array in all other respects, and is saved as a plain one, so that checkpoints of a
    resumed training don't refer to this class.
    """

    def __new__(cls) -> "NumberArray":
        return super().__new__(cls, (0,), np.uint8)

    def __setstate__(self, state: tuple) -> None:
        _version, shape, kind, is_fortran, data = state
        if not isinstance(kind, NumberType) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("refused: a numpy array of other things than numbers")
        fits = all(type(size) is int and size >= 0 for size in shape)
        if not fits or len(data) != math.prod(shape) * kind.dtype().itemsize:
            raise pickle.UnpicklingError("refused: a numpy array whose data are not of its shape")
        if self.size:  # refilling would leave tensors that share the memory without it
            raise pickle.UnpicklingError("refused: a numpy array that is filled twice")
        plain: Any = (1, shape, kind.dtype(), bool(is_fortran), data)
        super().__setstate__(plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def empty_array(kind: type, shape: tuple, code: bytes) -> NumberArray:
    """Stands in for numpy's `_reconstruct`: an empty array, to be filled by `__setstate__`."""
    if kind is not NumberArray:
        raise pickle.UnpicklingError("refused: a numpy array of an unknown class")
    return NumberArray()


def number(kind: NumberType, data: bytes) -> np.generic:
    """Stands in for numpy's `scalar`."""
    if not isinstance(kind, NumberType) or not isinstance(data, bytes):
        raise pickle.UnpicklingError("refused: a numpy scalar that is not a number")
    if len(data) != kind.dtype().itemsize:
        raise pickle.UnpicklingError("refused: a numpy number of the wrong size")
    return np.frombuffer(data, kind.dtype())[0]


def released_classes() -> list[tuple[Any, str]]:
    """What released checkpoints may refer to: the object that is used, the name they use for it."""
    allowed: list[tuple[Any, str]] = [
        (argparse.Namespace, "argparse.Namespace"),
        (NumberType, "numpy.dtype"),
        (NumberArray, "numpy.ndarray"),
    ]
    for module in METER_MODULES:
        allowed += [(getattr(meters, name), f"{module}.{name}") for name in METERS]
    for module in NUMPY_MODULES:
        allowed += [(empty_array, f"{module}._reconstruct"), (number, f"{module}.scalar")]
    return allowed


def allow_released_classes() -> None:
    """Let `torch.load` read stock fairseq checkpoints, in fairseq's own loading functions too.

    Of two objects with one name torch takes either. So entries that a program made before, such as
    numpy's own `dtype`, give way to the safe ones.
    """
    allowed: list[Any] = released_classes()
    names = {name for _, name in allowed}
    others = [
        entry for entry in torch.serialization.get_safe_globals() if _name(entry) not in names
    ]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(others + allowed)


def _name(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def load(source: str | os.PathLike[str] | HuggingFaceFolder) -> dict[str, Any]:
    """Returns a checkpoint in fairseq's current form, validated, with its tensors on the CPU.

    source: a file that any version of fairseq saved, or a Hugging Face folder; the weights of the latter are a
    `ConvertedWeights`. The settings are in `cfg`, whatever form the file has them in. Nothing in a file is run, and
    fairseq will do nothing with the settings but build a model. What is wrong with a file is said by a `UserError`.
    """
    if isinstance(source, HuggingFaceFolder):
        return source.state()
    if is_huggingface(Path(source)):
        return HuggingFaceFolder(Path(source)).state()
    path = str(source)
    try:
        validation.check_file(path)
        with quiet():
            state = checkpoint_utils.load_checkpoint_to_cpu(path)
    except Exception as error:
        raise UserError(errors.explain(error) or errors.unreadable(path)) from error
    settings = state.get("cfg")
    if not errors.is_from_fairseq(state) or not has_settings(settings, "task") or not has_settings(settings, "model"):
        raise UserError(errors.not_from_fairseq(path))
    validation.check_weights(state["model"])
    if packed_file.is_packed(state["model"]):
        packed_file.find([Path(path)], state["model"])  # or the settings would not fit the size
    validation.check_settings(state["cfg"].model, packed_file.size(path))
    return state


def has_settings(settings: Any, name: str) -> bool:
    part = settings.get(name) if isinstance(settings, DictConfig) else None
    return isinstance(part, argparse.Namespace) or (isinstance(part, DictConfig) and part.get("_name") is not None)


def check_dictionary(state_dict: dict[str, Tensor], prefix: str, dictionary: Dictionary) -> None:
    """Raise a `UserError` if the embedding of one side was not trained with this dictionary.

    `prefix` is the side's prefix in the state dict, "encoder" or "decoder". A last row more than
    the dictionary has entries is the `<mask>` of BART's pre-training; fairseq drops it by itself.
    """
    embedding = state_dict.get(f"{prefix}.embed_tokens.weight")
    if embedding is None:  # adaptive and character embeddings are not tables of one dictionary
        return
    rows, entries = embedding.size(0), len(dictionary)
    has_mask = "<mask>" in dictionary
    if rows == entries or (rows == entries + 1 and not has_mask):
        return
    if rows == entries - 1 and has_mask:
        raise UserError(
            f"the dictionary has an entry <mask> but the checkpoint's {prefix} embedding has no "
            f"row for it ({rows:,} rows, {entries:,} entries): delete the line of <mask> from the "
            "dictionary file"
        )
    raise UserError(errors.dictionary_mismatch(prefix, rows, entries))
