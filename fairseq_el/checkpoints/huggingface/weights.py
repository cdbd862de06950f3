"""Tensors of a Transformers model handed out one by one, and checks of what config.json says about them."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq_el.checkpoints import validation
from fairseq_el.errors import UserError

# fairseq's names of Transformers' activation functions. Transformers has the tanh form of GELU under several.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate",
    "gelu_fast": "gelu_accurate", "relu": "relu",
}  # fmt: skip

POSITION_OFFSET = 2  # fairseq starts counting positions after the padding index, 1
VERSION = 3.0  # of fairseq's state dicts; earlier ones had no layer normalisation after the stack

NamedTensors = Iterator[tuple[str, Tensor]]


class ConvertedWeights:
    """The weights of a fairseq model, converted while they are iterated over: never all of them are in memory."""

    def __init__(self, convert: Callable[["Weights"], NamedTensors], weights: "Weights"):
        self.convert, self.weights, self.dtype = convert, weights, weights.dtype

    def items(self) -> NamedTensors:
        """Raises a `UserError`, at the end too, for a model that fairseq can't express."""
        for name, tensor in self.convert(self.weights):
            validation.check_weights({name: tensor})
            yield name, tensor


class Weights:
    """Tensors of a Transformers model, handed out one by one in the wanted precision.

    Names are those of the bare model: in files of models with a head they have a prefix.
    """

    def __init__(self, stored: Mapping[str, Tensor], prefix: str, dtype: torch.dtype | None = None):
        """dtype: None for half precision if the weights are stored so, else single."""
        self.stored, self.dtype = stored, dtype or precision_of(stored)
        self.full_names = {name.removeprefix(prefix): name for name in stored}
        self.untaken = set(self.full_names)

    def __contains__(self, name: str) -> bool:
        return name in self.full_names

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self:
            raise UserError(
                f"the weights lack {name}, which config.json asks for: use the config.json that belongs to them"
            )
        tensor = self.stored[self.full_names[name]]
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{name} is of shape {list(tensor.shape)}, but {list(shape)} by config.json: use the "
                "config.json that belongs to the weights"
            )
        self.untaken.discard(name)
        return in_precision(tensor, self.dtype, name)

    def check_all_taken(self, unneeded: str = "") -> None:
        """Refuses a model with parts that stock fairseq lacks; `unneeded` names what may be left."""
        parts = sorted(name for name in self.untaken if not re.fullmatch(unneeded, name))
        if parts:
            raise UserError(
                f"the model has {len(parts):,} weights that stock fairseq has no counterpart for, such as {parts[0]}: "
                "use a plain GPT2LMHeadModel, BartForConditionalGeneration or MBartForConditionalGeneration"
            )


def in_precision(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    converted = tensor.to(dtype)
    if dtype == torch.float16 != tensor.dtype and not converted.isfinite().all():
        raise UserError(f"{name} has numbers too large for half precision: use --precision fp32")
    return converted


def precision_of(stored: Mapping[str, Tensor]) -> torch.dtype:
    """Half precision where the model's embeddings are stored in it, else single."""
    tables = ("wte.weight", "shared.weight", "embed_tokens.weight", "lm_head.weight")
    words = next((name for name in stored if name.endswith(tables)), None)
    is_half = words is not None and stored[words].dtype == torch.float16
    return torch.float16 if is_half else torch.float32


# --- config.json ---------------------------------------------------------------------------------


def size(config: dict[str, Any], name: str) -> int:
    if name not in config:
        raise UserError(f"config.json does not say {name}: use the one that belongs to the weights")
    value = config[name]
    if type(value) is not int or value < 1:
        raise UserError(f"config.json says {name} = {str(value)[:40]}, which is no size: get it again")
    return value


def check_config(config: dict[str, Any], needed: dict[str, Any]) -> None:
    for name, value in needed.items():
        if config.get(name, value) != value:
            raise UserError(
                f"the model has {name} = {str(config[name])[:40]} in config.json, and stock fairseq can only "
                f"express {name} = {value}: it cannot be converted"
            )
    if str(config["activation_function"]) not in ACTIVATIONS:
        raise UserError(
            f"stock fairseq has no activation function {str(config['activation_function'])[:40]!r}: it has "
            f"{', '.join(ACTIVATIONS)}"
        )


def is_tied(config: dict[str, Any]) -> bool:
    return bool(config["tie_word_embeddings"])


def contradiction(first: str, second: str) -> UserError:
    return UserError(
        f"config.json says that {first} and {second} are one table (tie_word_embeddings), but the file "
        "of weights holds two different ones: correct config.json"
    )
