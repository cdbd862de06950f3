"""The format of fairseq's checkpoints: the settings that fairseq-train makes and what it saves with the weights."""

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from torch import Tensor

# The settings with which BART was fine-tuned for summarisation.
TRAINING: dict[str, Any] = {
    "adam_betas": "(0.9, 0.999)", "adam_eps": 1e-08, "attention_dropout": 0.1, "clip_norm": 0.1,
    "criterion": "label_smoothed_cross_entropy", "dropout": 0.1, "fp16": True,
    "label_smoothing": 0.1, "lr": [3e-05], "lr_scheduler": "polynomial_decay", "max_tokens": 2048,
    "max_update": 20000, "optimizer": "adam", "required_batch_size_multiple": 1,
    "skip_invalid_size_inputs_valid_test": True, "total_num_update": 20000, "update_freq": [4],
    "warmup_updates": 500, "weight_decay": 0.01,
}  # fmt: skip


def training_args(arch: str, task: str, seed: int, settings: dict[str, Any]) -> argparse.Namespace:
    """All settings fairseq-train would have for this architecture, as one flat namespace."""
    from fairseq import options

    words = ["data-bin", "--arch", arch, "--task", task, "--seed", str(seed)]
    if task == "translation":
        words += ["--source-lang", "source", "--target-lang", "target", "--truncate-source"]
    for choice in ("criterion", "optimizer", "lr_scheduler"):
        words += ["--" + choice.replace("_", "-"), TRAINING[choice]]
    # As defaults, since fairseq has no options that switch booleans off. The architecture fills in its own later.
    chosen = {**TRAINING, **settings}
    args = options.parse_args_and_arch(
        options.get_training_parser(default_task=task),
        words,
        modify_parser=lambda parser: parser.set_defaults(**chosen),
    )
    for name in settings_added_to(task):
        delattr(args, name)
    return args


def settings_added_to(task: str) -> set[str]:
    """Settings that a plugin adds to a stock task in this process. They do not belong into a checkpoint."""
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    registered = {field.name for field in dataclasses.fields(TASK_DATACLASS_REGISTRY[task])}
    return registered - {field.name for field in dataclasses.fields(stock_task(task)[1])}


def stock_task(task: str) -> tuple[type, type]:
    """The class and the configuration of a stock task. fairseq's registries may hold a plugin's."""
    from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    return {
        "translation": (TranslationTask, TranslationConfig),
        "language_modeling": (LanguageModelingTask, LanguageModelingConfig),
    }[task]


def configuration(args: argparse.Namespace) -> Any:
    """The same settings in the nested form that fairseq keeps since 0.10."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import open_dict

    cfg = convert_namespace_to_omegaconf(args)
    with open_dict(cfg.task):
        for name in settings_added_to(args.task):
            del cfg.task[name]
    return cfg


def current_state(cfg: Any, state_dict: dict[str, Tensor]) -> dict[str, Any]:
    """What fairseq 0.12 saves, without the optimiser's state, as in released files."""
    from omegaconf import OmegaConf

    loss = {"val": 2.0, "sum": 40.0, "count": 20, "round": 3}
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": state_dict,
        "criterion": None,
        "optimizer_history": optimizer_history(),
        "task_state": {},
        "extra_state": {
            "metrics": OrderedDict(train=[(10, "loss", "AverageMeter", loss)]),
            "previous_training_time": 3600.0,
            "train_iterator": {
                "version": 2, "epoch": 6, "iterations_in_epoch": 0, "shuffle": True,
            },
            "val_loss": 2.0,
            "best": 2.0,
        },
        "last_optimizer_state": None,
    }  # fmt: skip


def optimizer_history() -> list[dict[str, Any]]:
    return [
        {
            "criterion_name": "LabelSmoothedCrossEntropyCriterion",
            "optimizer_name": "FP16Optimizer",
            "lr_scheduler_state": {},
            "num_updates": TRAINING["max_update"],
        }
    ]


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that appears under its name once it is complete, and is removed if writing fails."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        with temporary.open("rb") as written:  # by name: the caller may have let a library write it
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except OSError:
        raise
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        raise OSError(f"{path} can't be written: {str(error).splitlines()[0]}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without fairseq's log and the deprecation warnings it causes in hydra."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
