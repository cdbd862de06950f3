"""Loads a model and its task from a checkpoint, as a preset asks for them."""

import gc
import re
from argparse import Namespace
from dataclasses import fields
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_el.checkpoints.meta_init import fill, precision_of
from fairseq_el.errors import UserError
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.plugin.tasks import (
    ELLanguageModelingConfig,
    ELLanguageModelingTask,
    ELTranslationConfig,
    ELTranslationTask,
)
from fairseq_el.plugin.text_format import ELFormattedTranslationTask, FormattedTranslationTask, TextFormat


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
                "stock fairseq can't count tokens from the end of a prompt: leave out --stock"
            )
        dictionary = files.load_dictionary("source")
        language = configured(ELLanguageModelingConfig, preset, files)
        return ELLanguageModelingTask(language, dictionary, dictionary), language
    config = configured(TranslationConfig if stock else ELTranslationConfig, preset, files)
    named = {side: getattr(saved.task, f"{side}_lang", None) for side in ("source", "target")}
    languages = [str("" if language is None else language) or side for side, language in named.items()]
    if not all(re.fullmatch(r"[\w.@-]{1,99}", language) for language in languages):
        raise UserError(f"the settings in {files.checkpoint} are damaged, they name no languages: get the file again")
    source, target = (files.load_dictionary(language) for language in languages)
    if getattr(saved.task, "source_format", None) is None:
        return (TranslationTask if stock else ELTranslationTask)(config, source, target), config
    task = (FormattedTranslationTask if stock else ELFormattedTranslationTask)(config, source, target)
    task.text_format = TextFormat.parse(saved.task, preset.task(), source, target)
    special = len(task.text_format.prefix + task.text_format.suffix)
    longest = min(config.max_source_positions, saved.model.max_source_positions)
    config.max_source_positions = longest - (special - 1)  # one of them is </s>, as in any source
    return task, config


def configured(config_class: type, preset: Preset, files: ModelFiles) -> Any:
    known = {field.name for field in fields(config_class)}
    options = {name: value for name, value in preset.task().items() if name in known}
    return config_class(data=str(files.checkpoint.parent), **options)


def load_model(
    files: ModelFiles, preset: Preset, stock: bool, fp16: bool, cpu: bool
) -> tuple[FairseqTask, BaseFairseqModel]:
    state = files.load_state()
    task, config = load_task(preset, files, state["cfg"], stock)
    on_gpu = torch.cuda.is_available() and not cpu
    packs = not on_gpu and getattr(config, "el_packing", None) == "auto"  # packing takes either precision
    if files.huggingface:
        if packs:
            task.meta_init_dtype = state["model"].dtype
        model = task.build_model(state["cfg"].model, from_checkpoint=True)
        fill(model, state["model"])
    else:
        if packs:
            task.meta_init_dtype = precision_of(state["model"])
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
