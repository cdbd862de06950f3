"""What torch and fairseq take on trust in a checkpoint, checked before it is used.

- torch reads an archive without a look at its checksums, and inflates compressed members, whatever size they claim.
- fairseq evaluates some settings of a model as Python expressions (`adaptive_softmax_cutoff`, for instance), opens
  files that others name, and builds whatever size they ask for.

So damage to a file is noticed, and one made to do harm does none, though all in it is plain data.
"""

import ast
import errno
import math
import os
import re
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from fairseq_el import errors
from fairseq_el.errors import UserError

ARCHIVE = b"PK\x03\x04"  # how a file begins that torch takes for an archive
PART = 1 << 20  # bytes that are read at a time
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# ---- the file


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise a `UserError` for an archive that is damaged, or that holds more than it has bytes.

    Files from before torch 1.6 are no archives and have no checksums; nor have those of a program that told torch to
    leave them out, which then are all zero.
    """
    with open(path, "rb") as file:
        if file.read(len(ARCHIVE)) != ARCHIVE:
            return
        try:
            with zipfile.ZipFile(file) as archive:
                _check_archive(archive, os.path.getsize(path), str(path))
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # as places before the beginning are
                raise
            raise UserError(errors.unreadable(str(path))) from error


def _check_archive(archive: zipfile.ZipFile, size: int, path: str) -> None:
    members = archive.infolist()
    packed = any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members)
    if packed or sum(member.file_size for member in members) > size:
        raise UserError(
            f"{path} is a compressed archive, or claims to hold more than its {size:,} bytes, unlike all that torch "
            "saves: do not use it, get the file from its source"
        )
    if len({member.filename for member in members}) < len(members):
        raise UserError(errors.unreadable(path))
    if not any(member.CRC for member in members):
        return
    for member in members:
        with archive.open(member) as content:  # which checks the checksum at its end
            while content.read(PART):
                pass


# ---- the weights


def check_weights(weights: Any) -> None:
    """Raise a `UserError` unless these are tensors of finite numbers by name.

    NaN can't be left to show in what a model predicts: torch's attention on a CPU takes rows of NaN for masked ones.
    """
    if not isinstance(weights, dict):
        raise UserError("the checkpoint's weights are no tensors by name: it is damaged, get it again")
    for name, weight in weights.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor) or not _is_plain(name, weight):
            raise UserError(
                f"the checkpoint's {str(name)[:80]!r} is not a tensor of plain numbers: it is damaged, get it again"
            )
        if weight.is_floating_point() and weight.numel() and not all(map(math.isfinite, torch.aminmax(weight))):
            raise UserError(
                f"the checkpoint's {name} has NaN or infinite numbers: its training failed, or it is damaged; take "
                "another"
            )


def _is_plain(name: str, weight: Tensor) -> bool:
    if weight.layout != torch.strided or weight.is_meta or weight.is_quantized:
        return False
    if weight.nbytes > weight.untyped_storage().nbytes():  # the same numbers again and again
        return False
    is_learned = name.endswith((".weight", ".bias"))
    return weight.dtype in FLOATS or (weight.dtype in INTEGERS and not is_learned)


# ---- the settings

# Strings that no model evaluates, and that may well look like code: paths and names that people chose.
NAMES = re.compile(r"data|arch|(.*_)?(dir|file|path|logdir|project|name|suffix|host)")
HARMLESS = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Attribute, ast.List, ast.Tuple, ast.Dict, ast.Set,
    ast.UnaryOp, ast.unaryop, ast.BinOp, ast.Add, ast.Sub, ast.Div, ast.Mult, ast.BoolOp, ast.boolop, ast.Compare,
    ast.cmpop,
)  # fmt: skip
LONGEST_SETTING = 10_000  # characters
MOST_COPIES = 10_000  # which "[(512, 3)] * 20", say, may make of a list
MOST_POSITIONS = 1 << 20
# Files of embeddings that a training began with. What it ended with is in the checkpoint.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")
PROBABILITIES = re.compile(r"(.*_)?(dropout|layerdrop)")
POSITIONS = ("max_source_positions", "max_target_positions", "tokens_per_sample")


def check_settings(settings: Any, size: int | None = None) -> None:
    """Raise a `UserError` for settings of a model, from a checkpoint, with which fairseq would do something else than
    build a model for its weights. Files of embeddings, which need not exist any more, are struck out.

    size: of the checkpoint in bytes.
    """
    values = _as_dict(settings)
    for name, value in values.items():
        for part in _parts(name, value):
            if isinstance(part, str) and not NAMES.fullmatch(name) and _holds_code(part):
                raise UserError(
                    f"the checkpoint was refused and nothing in it was run: its setting {name} holds code, "
                    f"{part[:60]!r}: do not use it, get the file from its source"
                )
    _check_sizes(values, size)
    with open_dict(settings) if isinstance(settings, DictConfig) else nullcontext():
        for name in EMBEDDING_FILES:
            if values.get(name) is not None:
                setattr(settings, name, None)


def _as_dict(settings: Any) -> dict[str, Any]:
    try:
        if OmegaConf.is_config(settings):
            settings = OmegaConf.to_container(settings, resolve=True)
    except OmegaConfBaseException as error:
        raise _damaged(f"refer to nothing ({error})") from error
    values = vars(settings) if isinstance(settings, Namespace) else settings
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise _damaged("are no values by name")
    return values


def _parts(name: str, value: Any) -> Iterator[bool | int | float | str | None]:
    """The plain values in a setting."""
    if value is None or isinstance(value, bool | int | float | str):
        yield value
    elif isinstance(value, Enum):  # as fairseq's data classes have their choices
        yield from _parts(name, value.value)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _parts(name, part)
    elif isinstance(value, Mapping | Namespace):
        for pair in (vars(value) if isinstance(value, Namespace) else value).items():
            yield from _parts(name, pair)
    else:
        raise _damaged(f"have a {type(value).__name__} as {name}")


def _holds_code(text: str) -> bool:
    """True for an expression that does more than to name values, and so could run something or never end."""
    if len(text) > LONGEST_SETTING:
        return True
    try:
        nodes = list(ast.walk(ast.parse(text.lstrip(" \t"), mode="eval")))  # as `eval` does
    except (SyntaxError, ValueError):
        return False
    except (RecursionError, MemoryError):
        return True
    products = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)]
    if not all(isinstance(node, HARMLESS) for node in nodes):
        return True
    return bool(products) and math.prod(map(_factor, products)) > MOST_COPIES


def _factor(product: ast.BinOp) -> float:
    sides = (product.left, product.right)
    factors = [side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, int | float)]
    return math.prod(map(abs, factors)) if factors else math.inf


def _check_sizes(values: dict[str, Any], size: int | None) -> None:
    for side in ("encoder", "decoder"):
        names = (f"{side}_layers", f"{side}_embed_dim", f"{side}_ffn_embed_dim", f"{side}_attention_heads")
        layers, width, inner, _ = (_count(name, values.get(name)) for name in names)
        weights = layers * (4 * width * width + 2 * width * inner)  # at least, and no weight is below one byte
        if size is not None and weights > size:
            raise _damaged(f"describe a model of {weights:,} weights, which don't fit in its {size:,} bytes")
    for name, value in values.items():
        optional = name not in ("dropout", "attention_dropout", "activation_dropout") and value is None
        if PROBABILITIES.fullmatch(name) and not optional and not (_is_number(value) and 0 <= value <= 1):
            raise _damaged(f"have {str(value)[:40]!r} as {name}")
    for name in POSITIONS:
        if _count(name, values.get(name)) > MOST_POSITIONS:
            raise _damaged(f"have {values[name]:,} as {name}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(name: str, value: Any) -> int:
    """0 for what is not there, or is of another kind of model."""
    if value is None or isinstance(value, str | list):
        return 0
    least = 0 if name.endswith("_layers") else 1  # fairseq builds sides without a layer, too
    if type(value) is not int or value < least:
        raise _damaged(f"have {value!r} as {name}")
    return value


def _damaged(how: str) -> UserError:
    return UserError(f"the checkpoint's settings are damaged, they {how}: get the file again")
