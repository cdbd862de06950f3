"""BART and mBART as fairseq's `bart`, M2M-100 and NLLB as its `transformer`: the weights, converted one by one, and
the settings.

The two libraries share the layer layout and the offset of 2 in the position tables, so that only bookkeeping entries
and the embeddings' names differ. mBART normalises before each block, and once more after the last. So do M2M-100 and
NLLB, which compute their positions and don't normalise embeddings.
"""

from typing import Any

import torch

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

PREFIX = "model."  # of names in a model with a head
DEFAULTS = {"activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True}
DEFAULTS_OF = {"m2m_100": {"activation_function": "relu", "scale_embedding": True}}
NEEDS: dict[str, Any] = {
    "normalize_embedding": True, "static_position_embeddings": False, "bos_token_id": 0, "pad_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
NEEDS_OF: dict[str, dict[str, Any]] = {
    "bart": {"normalize_before": False, "add_final_layer_norm": False, "decoder_start_token_id": 2},
    "mbart": {"normalize_before": True, "add_final_layer_norm": True},
    "m2m_100": {
        "normalize_before": True, "add_final_layer_norm": True, "normalize_embedding": False,
        "static_position_embeddings": True, "decoder_start_token_id": 2,
    },
}  # fmt: skip
PRE_NORM = ("mbart", "m2m_100")
ATTENTIONS = {"encoder": ("self_attn",), "decoder": ("self_attn", "encoder_attn")}
# The embeddings of a fairseq BART; the last is the output's.
ENCODER_WORDS, DECODER_WORDS = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
OUTPUT_WORDS = "decoder.output_projection.weight"


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model that fairseq's BART can express, with Transformers' defaults."""
    config = {**DEFAULTS, **DEFAULTS_OF.get(config["model_type"], {}), **config}
    check_config(config, NEEDS | NEEDS_OF[config["model_type"]])
    for name in ("vocab_size", "d_model", "max_position_embeddings"):
        size(config, name)
    for side in ATTENTIONS:
        for name in ("layers", "ffn_dim", "attention_heads"):
            size(config, f"{side}_{name}")
    return config


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """fairseq's settings of the model. config: as `checked` returns it."""
    found = {
        "max_source_positions": config["max_position_embeddings"],
        "max_target_positions": config["max_position_embeddings"],
        "activation_fn": ACTIVATIONS[config["activation_function"]],
        "no_scale_embedding": not config["scale_embedding"],
        "share_all_embeddings": is_tied(config),
        "share_decoder_input_output_embed": is_tied(config),
        "dropout": config.get("dropout", 0.1),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "activation_dropout": config.get("activation_dropout", 0.0),
    }
    for side in ATTENTIONS:
        found[f"{side}_embed_dim"] = config["d_model"]
        found[f"{side}_layers"] = config[f"{side}_layers"]
        found[f"{side}_ffn_embed_dim"] = config[f"{side}_ffn_dim"]
        found[f"{side}_attention_heads"] = config[f"{side}_attention_heads"]
        found[f"{side}_normalize_before"] = config["model_type"] in PRE_NORM
    return found


def convert(weights: Weights, config: dict[str, Any]) -> NamedTensors:
    """The weights of the equal fairseq BART. config: as `checked` returns it."""
    rows = config["vocab_size"]
    if "final_logits_bias" in weights and weights.take("final_logits_bias", 1, rows).any():
        raise UserError(
            "final_logits_bias is not zero, and fairseq's BART adds no bias to its logits: the model "
            "cannot be converted"
        )
    yield from embeddings(weights, rows, config["d_model"], is_tied(config))
    for name, shape in shapes(config).items():
        yield name, weights.take(name, *shape)
    for side in ATTENTIONS:
        yield f"{side}.version", torch.tensor([VERSION], dtype=weights.dtype)
    weights.check_all_taken(unneeded=r"(en|de)coder\.(version|embed_positions\.weights)")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights but the embeddings of tokens, by names that both libraries share."""
    width = config["d_model"]
    found: dict[str, tuple[int, ...]] = {}

    def norm(name: str) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (width,)

    def linear(name: str, inputs: int, outputs: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (outputs, inputs), (outputs,)

    for side, attentions in ATTENTIONS.items():
        if config["model_type"] != "m2m_100":
            found[f"{side}.embed_positions.weight"] = (config["max_position_embeddings"] + POSITION_OFFSET, width)
            norm(f"{side}.layernorm_embedding")
        inner = config[f"{side}_ffn_dim"]
        for number in range(config[f"{side}_layers"]):
            layer = f"{side}.layers.{number}"
            for attention in attentions:
                for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    linear(f"{layer}.{attention}.{projection}", width, width)
                norm(f"{layer}.{attention}_layer_norm")
            linear(f"{layer}.fc1", width, inner)
            linear(f"{layer}.fc2", inner, width)
            norm(f"{layer}.final_layer_norm")
        if config["model_type"] in PRE_NORM:
            norm(f"{side}.layer_norm")
    return found


def embeddings(weights: Weights, rows: int, width: int, tied: bool) -> NamedTensors:
    """The embeddings of encoder, decoder and output: one if tied, under any of its names."""
    names = ("shared.weight", ENCODER_WORDS, DECODER_WORDS, "lm_head.weight")
    present = [name for name in names if name in weights]
    if tied:
        first, *others = present or names[:1]
        table = weights.take(first, rows, width)
        for name in others:
            if not torch.equal(weights.take(name, rows, width), table):
                raise contradiction(first, name)
        for name in (ENCODER_WORDS, DECODER_WORDS, OUTPUT_WORDS):
            yield name, table
        return
    if "shared.weight" in present:  # Transformers ties those of encoder and decoder even so, up to version 4
        weights.take("shared.weight", rows, width)
    for name in (ENCODER_WORDS, DECODER_WORDS):
        yield name, weights.take(name if name in present else "shared.weight", rows, width)
    yield OUTPUT_WORDS, weights.take("lm_head.weight", rows, width)
