"""Checks of search settings against a model, so that a mistake is one line instead of a failure in the search."""

from collections.abc import Mapping
from typing import Any

from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator

from fairseq_el.errors import UserError
from fairseq_el.generation.generator import attention_shape
from fairseq_el.models.costs import bytes_per_sentence
from fairseq_el.plugin.tasks import parse_bytes

NEED_MORE_THAN_TEXT = ("constraints", "lm_path", "prefix_size", "score_reference")  # options of fairseq-generate


def check_options(options: Mapping[str, Any], preset: str) -> None:
    """Before a model is loaded."""
    if unusable := [name for name in NEED_MORE_THAN_TEXT if options.get(name)]:
        raise UserError(f"the preset {preset} sets {unusable[0]}, which needs more than texts: leave it out")
    check_nbest(options.get("nbest", 1), options.get("beam", GenerationConfig().beam))


def check_nbest(nbest: int, beam: int) -> None:
    if not 1 <= nbest <= beam:
        raise UserError(f"nbest {nbest} is out of range: from 1 to the beam, which is {beam}; set a larger beam")


def check_lengths(generator: SequenceGenerator, longest_text: int) -> None:
    """For models with an encoder: a language model counts its lengths from the end of the prompt."""
    longest = int(generator.max_len_a * longest_text + generator.max_len_b)
    if generator.min_len > min(longest, generator.max_len - 1):
        raise UserError(
            f"summaries of at least min_len {generator.min_len} tokens can't have at most {longest} (max_len_b) and "
            f"fit in the model's {generator.max_len - 1}: set a smaller min_len"
        )


def check_groups(generator: SequenceGenerator) -> None:
    groups = getattr(generator.search, "num_groups", 1)
    if generator.beam_size % groups:
        raise UserError(f"a beam of {generator.beam_size} can't be split into {groups} groups: set another beam")


def check_budget(budget: str | None, model: BaseFairseqModel, beam: int, length: int, new_tokens: int) -> None:
    """A budget must hold the state of one text of the model's longest length; 0 is no limit for that.

    length, new_tokens: the most tokens of a source and of an output.
    """
    if not parse_bytes(budget):
        return
    layers = len(model.decoder.layers)
    shape = attention_shape(model, 1, beam, length)
    with_encoder = hasattr(model, "encoder")
    least = bytes_per_sentence(shape, layers, new_tokens, layers_with_states=1 if with_encoder else layers)
    if parse_bytes(budget) < least:  # type: ignore[operator]
        raise UserError(
            f"el_memory_budget {budget} can't hold the state of one text, which takes {least:,} bytes (beam {beam}, "
            f"{length:,} source tokens, {new_tokens:,} new tokens): set at least {least // 1024 + 1}K, or a smaller "
            "beam, longest_source or max_len_b; 0 keeps the encoder output alone, without a limit"
        )
