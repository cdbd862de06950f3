"""What fairseq 0.12 needs of itself, or of its requirements, and what newer releases of them have dropped."""

import types
from argparse import Namespace
from typing import Any

import numpy as np
from fairseq.data.legacy.masked_lm_dictionary import MaskedLMDictionary
from torch import nn


def restore_numpy_names() -> None:
    """Without `np.compat`, fairseq can't read a text sentence by sentence under numpy 2: `--sample-break-mode eos`, and
    fairseq-interactive with a language model."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)  # type: ignore[attr-defined]


class LoadableMaskedLMDictionary(MaskedLMDictionary):
    """Takes the argument with which `Dictionary.load` makes a dictionary, unlike its parent."""

    def __init__(self, *args, add_special_symbols: bool = True, **kwargs):
        super().__init__(*args, **kwargs)


class MaskedLMDictionaries:
    """Mixed into `translation_from_pretrained_xlm`, which can't load its dictionaries otherwise."""

    @classmethod
    def load_dictionary(cls, filename: str) -> LoadableMaskedLMDictionary:
        return LoadableMaskedLMDictionary.load(filename)


def set_missing_args(task) -> None:
    """`translation_from_pretrained_bart` reads its settings from `args`, which its parent has renamed."""
    if not hasattr(task, "args"):
        task.args = task.cfg


def add_missing_settings(settings: Any) -> None:
    """Released checkpoints of `xm_transformer` lack what was later added to the settings of its encoder."""
    if isinstance(settings, Namespace) and hasattr(settings, "w2v_path"):
        for name, value in {"freeze_regex": None, "load_ema": False}.items():
            vars(settings).setdefault(name, value)


def correct_sizes(model: nn.Module) -> None:
    """`online_backtranslation` adds rows to the output layer's weight, and not to what the layer says of its size."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.out_features, module.in_features = module.weight.shape
