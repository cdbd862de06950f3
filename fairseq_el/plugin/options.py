"""The options that an EL task adds to those of its stock task."""

import re
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_el.errors import UserError
from fairseq_el.kernels.packing import PRECISIONS


@dataclass
class ELOptions(FairseqDataclass):
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
    el_precision: ChoiceEnum(list(PRECISIONS)) = field(  # type: ignore[valid-type]
        default="auto",
        metadata={
            "help": "of weights and arithmetic on a CPU: auto = exact, weights in half precision where that is "
            "exact for the checkpoint (or asked for by --fp16), else single; fp32, fp16 = of the weights; "
            "bf16, int8 = faster, but not exact: weights and activations are rounded, caches are in half precision"
        },
    )
    el_stock_ngrams: bool = field(
        default=False,
        metadata={
            "help": "ignore --no-repeat-ngram-size where stock fairseq 0.12 ignores it, that is, without its "
            "CUDA extension; for comparisons with stock"
        },
    )
    el_profile: bool = field(
        default=False,
        metadata={"help": "print time by stage and memory of cached state at the end"},
    )


@dataclass
class PromptOptions(FairseqDataclass):
    """For tasks of language models."""

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


def el_config(stock: type[FairseqDataclass]) -> type[FairseqDataclass]:
    """A stock task's options and ours."""
    return make_dataclass(f"EL{stock.__name__}", [], bases=(ELOptions, stock))


ROUNDED = {
    "fp16": "weights are rounded to half precision, unless the checkpoint has them so",
    "bf16": "not exact: weights, activations and caches are rounded",
    "int8": "not exact: weights, activations and caches are rounded",
}


def describe_rounding(precision: Any) -> str | None:
    """A line that names a reduced precision; None for one that is exact."""
    precision = str(precision)
    return f"precision {precision}, {ROUNDED[precision]}" if precision in ROUNDED else None


def parse_bytes(text: str | None) -> int | None:
    """`2G`, `512M`, `1.5GiB` or plain bytes; binary units, as memory has."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), flags=re.IGNORECASE)
    if match is None:
        raise UserError(f"--el-memory-budget {text!r} is not a size; write for example 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
