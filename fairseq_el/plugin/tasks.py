"""Tasks that build EL models from stock checkpoints and generate with `ELSequenceGenerator`."""

import atexit
import functools
import logging
import os
import re
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

from fairseq_el.checkpoints import validation
from fairseq_el.checkpoints.meta_init import build_on_meta
from fairseq_el.errors import UserError
from fairseq_el.generation.generator import ELSequenceGenerator, ELSequenceGeneratorWithAlignment, take_rows
from fairseq_el.generation.language import ELLanguageGenerator
from fairseq_el.generation.non_finite import NotFinite
from fairseq_el.models.conversion import FAMILIES, has_el_form, to_el_form
from fairseq_el.text.rouge import RougeValidation

logger = logging.getLogger(__name__)


class ELGeneration:
    """What an EL task adds to a stock task: EL models in, our generator out."""

    cfg: Any  # the task's
    meta_init_dtype: torch.dtype | None = None
    """Set for models that will be packed as soon as they are loaded: the precision of the checkpoint."""
    checkpoint_size: int | None = None  # in bytes, of the largest that a command line loads

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        size = check_checkpoints(cfg)
        task = super().setup_task(cfg, **kwargs)
        task.checkpoint_size = size
        return task

    def build_model(self, cfg, from_checkpoint=False):
        if from_checkpoint:
            validation.check_settings(cfg, self.checkpoint_size)
        build = functools.partial(super().build_model, cfg, from_checkpoint)
        if from_checkpoint and self.meta_init_dtype is not None:
            model = build_on_meta(build, self.meta_init_dtype)
            model = model if has_el_form(model) else build()  # others are not packed
        else:
            model = build()
        if has_el_form(model):
            return to_el_form(model)
        logger.warning(
            f"{getattr(cfg, 'arch', type(model).__name__)} has no EL form; it runs with stock attention. "
            f"EL forms exist for the families {', '.join(FAMILIES)}"
        )
        return model

    def build_generator(self, models, args, seq_gen_cls=None, extra_gen_cls_kwargs=None, **kwargs):
        extra_gen_cls_kwargs = dict(extra_gen_cls_kwargs or {})
        if seq_gen_cls is None:
            extra_gen_cls_kwargs = self.generator_options() | extra_gen_cls_kwargs
            if getattr(args, "print_alignment", False):
                seq_gen_cls = ELSequenceGeneratorWithAlignment
                extra_gen_cls_kwargs["print_alignment"] = args.print_alignment
            elif all(hasattr(model, "encoder") for model in models):
                seq_gen_cls = ELSequenceGenerator
            else:
                seq_gen_cls = ELLanguageGenerator
                extra_gen_cls_kwargs = self.prompt_options() | extra_gen_cls_kwargs
        generator = super().build_generator(models, args, seq_gen_cls, extra_gen_cls_kwargs, **kwargs)
        if isinstance(generator, ELSequenceGenerator):
            generator.model.checks_finite = self.checkpoint_size is not None
            if getattr(self.options(), "el_profile", False):
                generator.profile.watch(models)
                atexit.register(generator.profile.print_report)
        return generator

    def inference_step(self, generator, models, sample, prefix_tokens=None, constraints=None):
        try:
            return super().inference_step(generator, models, sample, prefix_tokens, constraints)
        except NotFinite as error:
            if sample.get("id") is None:
                raise
            failed, ids = error, sample["id"].tolist()
        for row, number in enumerate(ids):  # each alone, to tell which it is
            part = [take_rows(x, slice(row, row + 1), len(ids)) for x in (sample, prefix_tokens, constraints)]
            try:
                super().inference_step(generator, models, *part)
            except NotFinite as error:
                raise NotFinite(f"sentence {number}: {error}") from error
        raise failed

    def options(self):
        """The task's settings; older tasks of fairseq keep them under another name."""
        return self.cfg if self.cfg is not None else getattr(self, "args", None)

    def prompt_options(self) -> dict:
        option = functools.partial(getattr, self.options())
        return {
            "max_new_tokens": option("max_new_tokens", None),
            "truncate_prompt": option("truncate_prompt", False),
            "score_prompts": not option("el_unscored_prompts", False),
        }

    def generator_options(self) -> dict:
        option = functools.partial(getattr, self.options())
        return {
            "el_attention": str(option("el_attention", "auto")),
            "el_memory_budget": parse_bytes(option("el_memory_budget", None)),
            "el_block_ngrams": option("el_block_ngrams", False),
        }


def parse_bytes(text: str | None) -> int | None:
    """`2G`, `512M`, `1.5GiB` or plain bytes; binary units, as memory has."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), flags=re.IGNORECASE)
    if match is None:
        raise UserError(f"--el-memory-budget {text!r} is not a size; write for example 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


@dataclass
class ELOptions:
    el_attention: ChoiceEnum(["auto", "always", "never"]) = field(  # type: ignore[valid-type]
        default="auto",
        metadata={
            "help": "form of encoder-decoder attention while generating: always = EL-attention, only the "
            "encoder output is kept; never = multi-head, keys and values shared by the beams; auto = "
            "whichever is cheaper on this machine as generation proceeds, within the memory budget"
        },
    )
    el_memory_budget: Optional[str] = field(
        default=None,
        metadata={
            "help": "most memory for the state of a batch (encoder output, keys and values, beams), for "
            "example 2G; layers that don't fit use EL-attention, batches that don't fit are split; "
            "0 keeps the encoder output alone (default: no limit)"
        },
    )
    el_packing: ChoiceEnum(["auto", "fp32", "none"]) = field(  # type: ignore[valid-type]
        default="auto",
        metadata={
            "help": "layout of linear layers on a CPU: auto = half precision where that is exact for the "
            "checkpoint's weights (or asked for by --fp16), else single; fp32 = single; none = as loaded"
        },
    )
    el_block_ngrams: bool = field(
        default=False,
        metadata={
            "help": "make --no-repeat-ngram-size work where stock fairseq ignores it (without its CUDA "
            "extension); outputs then differ from stock's"
        },
    )
    el_profile: bool = field(
        default=False,
        metadata={"help": "print time by stage and memory of cached state at the end"},
    )


def command_of(cfg) -> Any:
    """The whole configuration of a command line, of which this is the task's; None elsewhere."""
    whole = cfg._get_parent() if OmegaConf.is_config(cfg) else None
    return whole if whole is not None and "task" in whole else None


def save_stock_name(cfg, stock_name: str) -> None:
    """Training saves the whole configuration; under the stock task's name, stock fairseq can load it."""
    whole = command_of(cfg)
    if whole is not None:
        whole.task._name = stock_name


def check_checkpoints(cfg) -> int | None:
    """Looks into the files that a command line is about to load; returns the size of the largest in bytes."""
    whole = command_of(cfg)
    path = whole.common_eval.path if whole is not None and "common_eval" in whole else None
    files = [file for file in utils.split_paths(path) if os.path.isfile(file)] if path else []
    for file in files:
        validation.check_file(file)
    return max(map(os.path.getsize, files), default=None)


@dataclass
class ELTranslationConfig(ELOptions, TranslationConfig):
    pass


class ELTranslationTask(RougeValidation, ELGeneration, TranslationTask):
    """fairseq's `translation`, generating with EL-attention."""

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        save_stock_name(cfg, "translation")
        return super().setup_task(cfg, **kwargs)


@dataclass
class ELLanguageModelingConfig(ELOptions, LanguageModelingConfig):
    max_new_tokens: Optional[int] = field(
        default=None,
        metadata={
            "help": "most tokens to generate after each prompt; --max-len-a and --max-len-b, as in stock "
            "fairseq, count the prompt too"
        },
    )
    truncate_prompt: bool = field(
        default=False,
        metadata={"help": "shorten prompts from the left that leave no room for the output"},
    )
    el_unscored_prompts: bool = field(
        default=False,
        metadata={
            "help": "leave prompts out of the scores, which saves the output layer's work on them; beams of "
            "different lengths are then ranked by their new tokens alone, unlike in stock fairseq"
        },
    )


class ELLanguageModelingTask(ELGeneration, LanguageModelingTask):
    """fairseq's `language_modeling`, generating with EL-attention on prompts that are read in one go."""

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        save_stock_name(cfg, "language_modeling")
        return super().setup_task(cfg, **kwargs)

    def get_batch_iterator(self, dataset, *args, max_positions=None, **kwargs):
        if getattr(self.args, "truncate_prompt", False):
            max_positions = None  # the generator shortens what is too long
        return super().get_batch_iterator(dataset, *args, max_positions=max_positions, **kwargs)


def generate_with_el(task: FairseqTask) -> None:
    """Makes one task object, in place, build `ELSequenceGenerator`s from now on."""
    if not isinstance(task, ELGeneration):
        task.__class__ = type("EL" + type(task).__name__, (ELGeneration, type(task)), {})
