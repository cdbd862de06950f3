"""Tasks that build EL models from stock checkpoints and generate with `ELSequenceGenerator`.

`el_task` makes one from any stock task: `ELGeneration`, mixed in before it. `register.py` does so for all that
fairseq has.
"""

import atexit
import functools
import logging
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import BaseFairseqModel
from fairseq.search import BeamSearch, PrefixConstrainedBeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.tasks.translation_from_pretrained_xlm import TranslationFromPretrainedXLMTask
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_el.checkpoints import packed_file, validation
from fairseq_el.checkpoints.meta_init import build_on_meta
from fairseq_el.errors import UserError
from fairseq_el.generation.generator import ELSequenceGenerator, ELSequenceGeneratorWithAlignment, take_rows
from fairseq_el.generation.language import ELLanguageGenerator
from fairseq_el.generation.non_finite import NotFinite
from fairseq_el.models.conversion import has_el_form, is_accelerated, to_el_form
from fairseq_el.plugin.compatibility import (
    MaskedLMDictionaries,
    add_missing_settings,
    correct_sizes,
    set_missing_args,
)
from fairseq_el.plugin.completeness import AllSentences
from fairseq_el.plugin.options import ELOptions, PromptOptions, describe_rounding, parse_bytes
from fairseq_el.text.rouge import RougeValidation

logger = logging.getLogger(__name__)


class ELGeneration(AllSentences):
    """What an EL task adds to a stock task: EL models in, our generator out."""

    cfg: Any  # the task's
    target_dictionary: Any  # the task's
    meta_init_dtype: torch.dtype | None = None
    """Set for models that will be packed as soon as they are loaded: the precision of the checkpoint."""
    checkpoints: Sequence[Path] = ()  # that are being loaded
    checkpoint_size: int | None = None  # in bytes, of the largest that a command line loads

    @classmethod
    def add_args(cls, parser):
        super().add_args(parser)
        if getattr(cls, "__dataclass", None) is None:  # else it has our options
            gen_parser_from_dataclass(parser, ELOptions())

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        files = checked_checkpoints(cfg)
        packed = next(filter(None, map(packed_file.precision_of, files)), None)
        if rounding := describe_rounding(packed or getattr(cfg, "el_precision", "auto")):
            logger.info(rounding)  # before anything else that a run logs but its configuration
        task = super().setup_task(cfg, **kwargs)
        set_missing_args(task)
        task.checkpoints, task.checkpoint_size = files, max(map(packed_file.size, files), default=None)
        if files and all(file.with_name(packed_file.NAME).is_file() for file in files):
            task.meta_init_dtype = torch.float32
        if files:
            atexit.register(task.tally.print_report)
        return task

    def build_model(self, cfg, from_checkpoint=False):
        if from_checkpoint:
            validation.check_settings(cfg, self.checkpoint_size)
        add_missing_settings(cfg)
        build = functools.partial(super().build_model, cfg, from_checkpoint)
        if from_checkpoint and self.meta_init_dtype is not None:
            model = build_on_meta(build, self.meta_init_dtype)
            model = model if has_el_form(model) else build()  # others are not packed
        else:
            model = build()
        correct_sizes(model)
        model.checkpoints = self.checkpoints
        return to_el_form(model) if has_el_form(model) else model

    def build_generator(
        self, models, args, seq_gen_cls=None, extra_gen_cls_kwargs=None, prefix_allowed_tokens_fn=None, **kwargs
    ):
        """Has the stock task build its generator, and ours from that. So what a task decides about it (symbols to
        strip, an end of text of its own) holds here too. A generator of a `seq_gen_cls` stays as it is."""
        members = list(models.models if isinstance(models, EnsembleModel) else models)
        for model in filter(has_el_form, members):
            to_el_form(model)
        extra = dict(extra_gen_cls_kwargs or {})
        if seq_gen_cls is not None:
            return super().build_generator(models, args, seq_gen_cls=seq_gen_cls, extra_gen_cls_kwargs=extra, **kwargs)
        options = self.generator_options()
        options |= {name: extra.pop(name) for name in list(extra) if name in options}
        generator = super().build_generator(models, args, extra_gen_cls_kwargs=extra, **kwargs)
        if isinstance(generator, SequenceScorer):
            return generator
        if prefix_allowed_tokens_fn is not None:
            constrain(generator, prefix_allowed_tokens_fn)
        if type(generator) not in (SequenceGenerator, SequenceGeneratorWithAlignment):
            logger.warning(f"{type(generator).__name__} has no EL form: this task generates as in stock fairseq")
            return generator
        warn_of_stock_models(members)
        if not all(hasattr(model, "encoder") for model in members):
            options |= self.prompt_options()
        generator = el_generator(generator, options)
        generator.model.checks_finite = self.checkpoint_size is not None
        if getattr(settings_of(self), "el_profile", False):
            generator.profile.watch(models)
            atexit.register(generator.profile.print_report)
        return generator

    def inference_step(self, generator, models, sample, prefix_tokens=None, constraints=None, **kwargs):
        prefix_tokens, constraints = (rows_of_batch(x, sample) for x in (prefix_tokens, constraints))
        infer = functools.partial(super().inference_step, generator, models, **kwargs)
        numbers = sample["id"].tolist() if isinstance(sample.get("id"), Tensor) else []
        try:
            found = infer(sample, prefix_tokens=prefix_tokens, constraints=constraints)
        except NotFinite as error:
            if not numbers:
                raise
            failed = error
        else:
            self.tally.generated += len(found)
            return found
        for row, number in enumerate(numbers):  # each alone, to tell which it is
            part = [take_rows(x, slice(row, row + 1), len(numbers)) for x in (sample, prefix_tokens, constraints)]
            try:
                infer(part[0], prefix_tokens=part[1], constraints=part[2])
            except NotFinite as error:
                raise NotFinite(f"sentence {number}: {error}") from error
        raise failed

    def prompt_options(self) -> dict:
        option = functools.partial(getattr, settings_of(self))
        return {
            "max_new_tokens": option("max_new_tokens", None),
            "truncate_prompt": option("truncate_prompt", False),
            "score_prompts": not option("el_unscored_prompts", False),
        }

    def generator_options(self) -> dict:
        option = functools.partial(getattr, settings_of(self))
        return {
            "el_attention": str(option("el_attention", "auto")),
            "el_memory_budget": parse_bytes(option("el_memory_budget", None)),
            "el_stock_ngrams": option("el_stock_ngrams", False),
        }


def settings_of(task: FairseqTask) -> Any:
    """Older tasks of fairseq keep them under another name."""
    return task.cfg if task.cfg is not None else getattr(task, "args", None)


def constrain(generator: SequenceGenerator, prefix_allowed_tokens_fn) -> None:
    """As `FairseqTask.build_generator` does; tasks with a method of their own don't take the function there (fairseq
    issues 3654, 3852, 5170). Any other search than beam search goes before it."""
    if not isinstance(generator, SequenceGenerator):
        raise UserError(
            f"prefix_allowed_tokens_fn is for beam search, but this task generates with {type(generator).__name__}"
        )
    if type(generator.search) is BeamSearch:
        generator.search = PrefixConstrainedBeamSearch(generator.tgt_dict, prefix_allowed_tokens_fn)


def warn_of_stock_models(models: Iterable[BaseFairseqModel]) -> None:
    names = sorted({type(model).__name__ for model in models if not is_accelerated(model)})
    if names:
        logger.warning(
            f"{', '.join(names)} has no EL form (that needs fairseq's Transformer decoder): it runs as in stock fairseq"
        )


def el_generator(stock: SequenceGenerator, options: dict) -> ELSequenceGenerator:
    """Our generator with the settings of a stock one."""
    models = list(stock.model.models)
    blocker, suppressed = stock.repeat_ngram_blocker, stock.token_indices_to_suppress
    options = options | {
        name: getattr(stock, name)
        for name in (
            "beam_size", "max_len_a", "max_len_b", "max_len", "min_len", "normalize_scores", "len_penalty",
            "unk_penalty", "temperature", "match_source_len", "eos", "symbols_to_strip_from_output", "lm_model",
            "lm_weight",
        )
    }  # fmt: skip
    options |= {
        "search_strategy": stock.search,
        "no_repeat_ngram_size": 0 if blocker is None else blocker.no_repeat_ngram_size,
        "tokens_to_suppress": () if suppressed is None else [stock.tgt_dict[index] for index in suppressed],
    }
    if isinstance(stock, SequenceGeneratorWithAlignment):
        is_hard = stock.extract_alignment is utils.extract_hard_alignment
        options |= {"left_pad_target": stock.left_pad_target, "print_alignment": "hard" if is_hard else "soft"}
        return ELSequenceGeneratorWithAlignment(models, stock.tgt_dict, **options)
    kind = ELSequenceGenerator if all(hasattr(model, "encoder") for model in models) else ELLanguageGenerator
    return kind(models, stock.tgt_dict, **options)


def rows_of_batch(value: Tensor | None, sample: dict) -> Tensor | None:
    """What concerns the sentences of a batch in a tensor with a row for each of those that a hub interface was given
    (fairseq issue 4021). Elsewhere the rows are the batch's already."""
    sentences = sample.get(GIVEN_SENTENCES)
    if value is None or sentences is None or value.size(0) != sentences:
        return value
    return value[sample["id"].to(value.device)]


GIVEN_SENTENCES = "fairseq_el.given_sentences"
"""In a sample of a hub interface: how many sentences it was given in all."""


def command_of(cfg) -> Any:
    """The whole configuration of a command line, of which this is the task's; None elsewhere."""
    whole = cfg._get_parent() if OmegaConf.is_config(cfg) else None
    return whole if whole is not None and "task" in whole else None


def save_stock_name(cfg, stock_name: str) -> None:
    """Training saves the whole configuration; under the stock task's name, stock fairseq can load it."""
    whole = command_of(cfg)
    if whole is not None:
        whole.task._name = stock_name


def checked_checkpoints(cfg) -> list[Path]:
    """The files that a command line is about to load."""
    if isinstance(cfg, Namespace):  # of a task without a data class: all options of the command line
        path = getattr(cfg, "path", None)
    else:
        whole = command_of(cfg)
        path = whole.common_eval.path if whole is not None and "common_eval" in whole else None
    files = [file for file in utils.split_paths(path) if os.path.isfile(file)] if path else []
    for file in files:
        validation.check_file(file)
    return [Path(file) for file in files]


@functools.cache
def el_task(stock: type[FairseqTask]) -> type[FairseqTask]:
    """The stock task's subclass that generates with EL-attention."""
    mixins: list[type] = [ELGeneration]
    if issubclass(stock, TranslationTask):
        mixins.insert(0, RougeValidation)
    if issubclass(stock, TranslationFromPretrainedXLMTask):
        mixins.insert(0, MaskedLMDictionaries)
    doc = f"fairseq's {stock.__name__}, generating with EL-attention."
    return type(f"EL{stock.__name__}", (*mixins, stock), {"__doc__": doc})


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
class ELLanguageModelingConfig(PromptOptions, ELOptions, LanguageModelingConfig):
    pass


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
        task.__class__ = el_task(type(task))  # type: ignore[arg-type]
