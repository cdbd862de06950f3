"""Loads a model and its task from a checkpoint, as a preset asks for them."""

import gc
import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import DictConfig

from fairseq_el.checkpoints import validation
from fairseq_el.checkpoints.meta_init import precision_of
from fairseq_el.errors import UserError, is_from_fairseq, not_from_fairseq
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.plugin.tasks import (
    ELLanguageModelingConfig,
    ELLanguageModelingTask,
    ELTranslationConfig,
    ELTranslationTask,
)
from fairseq_el.text.vocabulary import load_dictionary


def load_task(preset: Preset, files: ModelFiles, saved: Any, stock: bool) -> tuple[FairseqTask, Any]:
    """The task, ours or fairseq's own, and its configuration: the options that the preset has for it.

    saved: the configuration in the checkpoint.
    """
    name = preset.options.get("task", "translation").removeprefix("el_")
    trained = str(saved.task._name)
    if name not in ("translation", "language_modeling"):
        raise UserError(
            f"the preset {preset.name} is for the task {name}: only translation and language_modeling work"
        )
    if (name == "language_modeling") != ("language_modeling" in trained):
        raise UserError(
            f"{files.checkpoint} was trained for {trained}, but the preset {preset.name} is for {name}: "
            "take another preset or another model"
        )
    if name == "language_modeling":
        if stock:
            raise UserError(
                "stock fairseq can't count tokens from the end of a prompt: leave out --attention stock"
            )
        load_dictionary(files.dictionary("source"))  # says so if there is none, or it is damaged
        language = configured(ELLanguageModelingConfig, preset, files)
        return ELLanguageModelingTask.setup_task(language), language
    config = configured(TranslationConfig if stock else ELTranslationConfig, preset, files)
    named = {side: getattr(saved.task, f"{side}_lang", None) for side in ("source", "target")}
    languages = [str("" if language is None else language) or side for side, language in named.items()]
    if not all(re.fullmatch(r"[\w.@-]{1,99}", language) for language in languages):
        raise UserError(f"the settings in {files.checkpoint} are damaged, they name no languages: get the file again")
    dictionaries = [load_dictionary(files.dictionary(language)) for language in languages]
    return (TranslationTask if stock else ELTranslationTask)(config, *dictionaries), config


def configured(config_class: type, preset: Preset, files: ModelFiles) -> Any:
    known = {field.name for field in fields(config_class)}
    options = {name: value for name, value in preset.task().items() if name in known}
    return config_class(data=str(files.checkpoint.parent), **options)


def load_state(path: Path) -> dict[str, Any]:
    """A checkpoint in today's form, with which fairseq will do nothing but build a model."""
    validation.check_file(path)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    settings = state.get("cfg")
    if not is_from_fairseq(state) or not has_settings(settings, "task") or not has_settings(settings, "model"):
        raise UserError(not_from_fairseq(str(path)))
    validation.check_weights(state["model"])
    validation.check_settings(state["cfg"].model, path.stat().st_size)
    return state


def has_settings(settings: Any, name: str) -> bool:
    part = settings.get(name) if isinstance(settings, DictConfig) else None
    return isinstance(part, Namespace) or (isinstance(part, DictConfig) and part.get("_name") is not None)


def load_model(
    files: ModelFiles, preset: Preset, stock: bool, fp16: bool, cpu: bool
) -> tuple[FairseqTask, BaseFairseqModel]:
    state = load_state(files.checkpoint)
    task, config = load_task(preset, files, state["cfg"], stock)
    on_gpu = torch.cuda.is_available() and not cpu
    if not on_gpu and getattr(config, "el_packing", None) == "auto":  # packing takes either precision
        task.vacant_dtype = precision_of(state["model"])
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(files.checkpoint)], task=task, state=state
    )
    del state
    gc.collect()  # fairseq leaves it in a cycle of references, and packing takes as much again
    if fp16:
        model.half()
    if on_gpu:
        model.cuda()
    model.prepare_for_inference_(Namespace(generation=preset.generation(), task=config))
    return task, model
