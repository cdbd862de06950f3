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

from fairseq_el.checkpoints import packed_file
from fairseq_el.checkpoints.meta_init import fill, precision_of
from fairseq_el.errors import UserError
from fairseq_el.jobs import multilingual
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.plugin.tasks import (
    ELLanguageModelingConfig,
    ELLanguageModelingTask,
    ELTranslationConfig,
    ELTranslationTask,
)
from fairseq_el.plugin.text_format import ELFormattedTranslationTask, FormattedTranslationTask, TextFormat
from fairseq_el.text.languages import fits


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
    if trained in multilingual.TASKS:
        return multilingual.load_task(trained, preset, files, saved.task, stock)
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
    check_languages(preset, saved.task, languages)
    if getattr(saved.task, "source_format", None) is None:
        return (TranslationTask if stock else ELTranslationTask)(config, source, target), config
    task = (FormattedTranslationTask if stock else ELFormattedTranslationTask)(config, source, target)
    task.text_format = TextFormat.parse(saved.task, preset.task(), source, target)
    special = len(task.text_format.prefix + task.text_format.suffix)
    longest = min(config.max_source_positions, saved.model.max_source_positions)
    config.max_source_positions = longest - (special - 1)  # one of them is </s>, as in any source
    return task, config


def check_languages(preset: Preset, saved: Any, languages: list[str]) -> None:
    """That the model translates between the languages that a user has named, unless it is for any."""
    for side, language in zip(("source_lang", "target_lang"), languages, strict=True):
        given = preset.task().get(side)
        if given and getattr(saved, "source_format", None) is None and not fits(given, language):
            raise UserError(
                f"the model translates from {languages[0]} to {languages[1]}, not {given}: leave "
                f"out {side} (--{side.replace('_', '-')}), or take another model"
            )


def configured(config_class: type, preset: Preset, files: ModelFiles) -> Any:
    known = {field.name for field in fields(config_class)}
    options = {name: value for name, value in preset.task().items() if name in known}
    return config_class(data=str(files.checkpoint.parent), **options)


def load_model(
    files: ModelFiles, preset: Preset, stock: bool, fp16: bool, cpu: bool
) -> tuple[FairseqTask, BaseFairseqModel]:
    state = files.load_state()
    task, config = load_task(preset, files, state["cfg"], stock)
    if packed_file.is_packed(state["model"]) and (stock or fp16):
        raise UserError(
            f"{files.checkpoint.parent} is a packed model, for fairseq_el's own layers: leave out --stock and --fp16, "
            "or give the model that it was made from"
        )
    on_gpu = torch.cuda.is_available() and not cpu
    packs = not on_gpu and getattr(config, "el_precision", "fp32") != "fp32"  # packing takes either precision
    if files.huggingface:
        if packs:
            task.meta_init_dtype = state["model"].dtype
        model = task.build_model(state["cfg"].model, from_checkpoint=True)
        fill(model, state["model"])
    else:
        if packs:
            task.meta_init_dtype = precision_of(state["model"])
        task.checkpoints = [files.checkpoint]
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
