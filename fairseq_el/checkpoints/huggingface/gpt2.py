"""GPT-2 as fairseq's `transformer_lm`: the weights, converted one by one, and the settings."""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from fairseq_el.checkpoints.huggingface.weights import (
    ACTIVATIONS,
    POSITION_OFFSET,
    VERSION,
    NamedTensors,
    Weights,
    check_config,
    contradiction,
    is_tied,
    size,
)
from fairseq_el.errors import UserError

logger = logging.getLogger(__name__)

PREFIX = "transformer."  # of names in a model with a head
DEFAULTS = {"activation_function": "gelu_new", "eos_token_id": 50256, "tie_word_embeddings": True}
NEEDS = {
    "add_cross_attention": False, "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}  # fmt: skip


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model that `transformer_lm` can express, with Transformers' defaults."""
    config = {**DEFAULTS, **config}
    check_config(config, NEEDS)
    config["n_inner"] = config.get("n_inner") or 4 * size(config, "n_embd")
    for name in ("vocab_size", "n_embd", "n_positions", "n_layer", "n_head", "n_inner"):
        size(config, name)
    end_of_text(config)
    return config


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """fairseq's settings of the model. config: as `checked` returns it."""
    width = config["n_embd"]
    return {
        "decoder_layers": config["n_layer"],
        "decoder_embed_dim": width,
        "decoder_input_dim": width,
        "decoder_output_dim": width,
        "decoder_ffn_embed_dim": config["n_inner"],
        "decoder_attention_heads": config["n_head"],
        "decoder_learned_pos": True,
        "decoder_normalize_before": True,
        "no_scale_embedding": True,
        "share_decoder_input_output_embed": is_tied(config),
        "activation_fn": ACTIVATIONS[config["activation_function"]],
        "dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "tokens_per_sample": config["n_positions"],
        "max_target_positions": config["n_positions"],
    }


def end_of_text(config: dict[str, Any]) -> int:
    end, rows = config["eos_token_id"], size(config, "vocab_size")
    if not isinstance(end, int) or not 0 <= end < rows:
        raise UserError(
            f"eos_token_id is {end} in config.json: fairseq needs one token of the vocabulary of "
            f"{rows:,} that ends a text"
        )
    return end


def convert(weights: Weights, config: dict[str, Any]) -> NamedTensors:
    """The weights of the equal `transformer_lm`. config: as `checked` returns it."""
    width = config["n_embd"]
    yield "decoder.version", torch.tensor([VERSION], dtype=weights.dtype)
    yield from embeddings(weights, config)  # first: these take the most memory to convert
    table = weights.take("wpe.weight", config["n_positions"], width)
    yield "decoder.embed_positions.weight", torch.cat([table.new_zeros(POSITION_OFFSET, width), table])
    for number in range(config["n_layer"]):
        yield from layer(weights, number, width, config["n_inner"])
    weights.check_all_taken(unneeded=r"h\.\d+\.attn\.(masked_)?bias")  # causal masks of old files


def layer(weights: Weights, number: int, width: int, inner: int) -> NamedTensors:
    """One layer. Transformers stores linear weights as [in, out], fairseq as [out, in]."""
    theirs, ours = f"h.{number}.", f"decoder.layers.{number}."
    for norm, name in {"ln_1": "self_attn_layer_norm", "ln_2": "final_layer_norm"}.items():
        for kind in ("weight", "bias"):
            yield f"{ours}{name}.{kind}", weights.take(f"{theirs}{norm}.{kind}", width)
    linear = {
        "attn.c_attn": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), width, 3 * width),
        "attn.c_proj": (("self_attn.out_proj",), width, width),
        "mlp.c_fc": (("fc1",), width, inner),
        "mlp.c_proj": (("fc2",), inner, width),
    }
    for joint, (names, inputs, outputs) in linear.items():
        weight = weights.take(f"{theirs}{joint}.weight", inputs, outputs).t()
        bias = weights.take(f"{theirs}{joint}.bias", outputs)
        parts = zip(names, weight.chunk(len(names)), bias.chunk(len(names)), strict=True)
        for name, part, part_of_bias in parts:  # copies: a view would keep all of the source alive
            yield f"{ours}{name}.weight", part.contiguous()
            yield f"{ours}{name}.bias", part_of_bias.clone()


def embeddings(weights: Weights, config: dict[str, Any]) -> NamedTensors:
    """The embeddings and the layer normalisation before the output, whose bias they depend on."""
    rows, width, end = config["vocab_size"], config["n_embd"], end_of_text(config)
    words = weights.take("wte.weight", rows, width)
    output = weights.take("lm_head.weight", rows, width) if "lm_head.weight" in weights else words
    if is_tied(config) and not torch.equal(words, output):
        raise contradiction("wte.weight", "lm_head.weight")
    gain, bias = (weights.take(f"ln_f.{kind}", width) for kind in ("weight", "bias"))
    row, bias = impossible_row(output, gain, bias)
    yield "decoder.layer_norm.weight", gain
    yield "decoder.layer_norm.bias", bias
    projection = with_special_rows(output, end, row, row, row)
    yield "decoder.output_projection.weight", projection
    if is_tied(config):
        yield "decoder.embed_tokens.weight", projection
    else:  # what goes in as <s> or <unk> may then be the nearest GPT-2 has
        table = with_special_rows(words, end, words[end], torch.zeros_like(row), words[end])
        yield "decoder.embed_tokens.weight", table


def with_special_rows(words: Tensor, end: int, bos: Tensor, pad: Tensor, unk: Tensor) -> Tensor:
    """The table in fairseq's order, the end of text as </s>: see `vocabularies.gpt2_symbols`. [rows + 3, width]"""
    special = torch.stack([bos, pad, words[end], unk])
    return torch.cat([special, words[:end], words[end + 1 :]])


GAP = 40.0  # between the logits of an impossible row and of the likeliest word: e**-40 is nothing
# Relative errors of stored rows, or of the arithmetic, whichever is larger.
ROUNDING = {torch.float32: 2.0**-19, torch.float16: 2.0**-11}


def impossible_row(words: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A row of the output table that never gets probability, and the bias to use with it. [width]

    GPT-2 has no <s>, <pad> and <unk>. fairseq's softmax counts them, and has no bias to rule them
    out: a row of zeros has the logit 0, and the best words of the released GPT-2 are far below that,
    about -50. But what is projected is gain * n + bias with a normalised n, whose entries sum to
    zero. So the row c / gain has the logit c * sum(bias / gain) whatever the input: as low as we like.

    Where that sum is too near zero for the precision, as in models without biases, the bias is
    moved as little as will do; the logits of words then change by that times a word's row.
    """
    width, lowest = gain.numel(), lowest_best_logit(words, gain, bias)
    depth = 2 * max(GAP, GAP - lowest)
    g, b = gain.double(), bias.double()
    largest_entry = torch.finfo(gain.dtype).max / 2
    needed = max(2 * width * ROUNDING[gain.dtype], float(depth / largest_entry / g.abs().min()))
    total = (b / g).sum()
    if total.abs() < needed < math.inf:
        b = (b + g * (math.copysign(needed, total) - total) / width).to(bias.dtype).double()
        total = (b / g).sum()
        warn_of_shift(words, b - bias.double())
    row = -depth / total / g
    if not highest_logit(row.to(gain.dtype), gain, b) <= lowest - GAP:
        raise UserError(
            "the last layer normalisation (ln_f) has gains too near zero to rule out fairseq's <s>, "
            "<pad> and <unk> in this precision: use --precision fp32, or weights without such gains"
        )
    if not highest_logit(row.half(), gain.half(), b.half()) <= lowest - GAP:
        logger.warning(
            "the checkpoint will be for single precision: convert with --precision fp16 what is to run "
            "with --fp16"
        )
    return row.to(gain.dtype), b.to(bias.dtype)


def lowest_best_logit(words: Tensor, gain: Tensor, bias: Tensor) -> float:
    """A bound for the likeliest word's logit, whatever is normalised: n is sqrt(width) long."""
    scaled = words.float() * gain.float()
    scaled -= scaled.mean(dim=1, keepdim=True)  # of no effect on n
    reach = math.sqrt(gain.numel()) * torch.linalg.vector_norm(scaled, dim=1)
    return float((words.float() @ bias.float() - reach).max())


def highest_logit(row: Tensor, gain: Tensor, bias: Tensor) -> float:
    """The most that the row can get, whatever is normalised."""
    row = row.double()
    scaled = row * gain.double()
    reach = math.sqrt(gain.numel()) * torch.linalg.vector_norm(scaled - scaled.mean())
    return float(row @ bias.double() + reach)


def warn_of_shift(words: Tensor, shift: Tensor) -> None:
    largest = float((words.float() @ shift.float()).abs().max())
    if largest > 1e-4:
        logger.warning(
            f"logits will differ from the original's by up to {largest:.1g}: its last layer "
            "normalisation has next to no bias, which is needed to rule out fairseq's <s>, <pad> and <unk>"
        )
