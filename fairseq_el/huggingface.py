"""Stock fairseq BART weights in the names and configuration of Hugging Face Transformers.

Pure functions over state dicts: neither library is needed to run them. Both implementations share
the layer layout and the offset of 2 in the position tables, so that only names and bookkeeping
entries differ.
"""

from typing import Any

import torch
from torch import Tensor

# fairseq's activation functions that Transformers has too, under a name of its own.
ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_new", "relu": "relu", "swish": "silu"}

# Entries of a fairseq BART that Transformers derives (tied output projection) or has no use for.
WITHOUT_COUNTERPART = (
    "encoder.version",
    "decoder.version",
    "encoder.embed_positions._float_tensor",
    "decoder.embed_positions._float_tensor",
    "decoder.output_projection.weight",
)

POSITION_OFFSET = 2  # both libraries start counting positions after the padding index, 1


def bart_to_huggingface(
    state_dict: dict[str, Tensor], args: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the state dict and the configuration of the equal `BartForConditionalGeneration`.

    state_dict: the `model` entry of a fairseq checkpoint of the BART family.
    args: its model arguments (the checkpoint's `args` or `cfg.model`).
    The returned tensors are those of state_dict, not copies. Models that Transformers' BART cannot
    express (pre-norm, separate embeddings, ...) are refused with a ValueError.
    """
    check_expressible(state_dict, args)
    embedding = state_dict["encoder.embed_tokens.weight"]
    renamed = {
        f"model.{name}": tensor
        for name, tensor in state_dict.items()
        if name not in WITHOUT_COUNTERPART and not name.startswith("classification_heads.")
    }
    renamed["model.shared.weight"] = embedding
    renamed["lm_head.weight"] = embedding
    renamed["final_logits_bias"] = torch.zeros(1, embedding.size(0), dtype=embedding.dtype)
    return renamed, configuration(state_dict, args)


def configuration(state_dict: dict[str, Tensor], args: Any) -> dict[str, Any]:
    """The `config.json` of the model; sizes are read off the weights, which cannot be out of
    date."""
    vocabulary, width = state_dict["encoder.embed_tokens.weight"].shape
    positions = state_dict["encoder.embed_positions.weight"].size(0) - POSITION_OFFSET
    config = {
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "vocab_size": vocabulary,
        "d_model": width,
        "max_position_embeddings": positions,
        "activation_function": ACTIVATIONS[args.activation_fn],
        "scale_embedding": not args.no_scale_embedding,
        "normalize_before": False,  # read by CTranslate2's converter
        "normalize_embedding": True,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    }
    for side in ("encoder", "decoder"):
        config[f"{side}_layers"] = count_layers(state_dict, side)
        config[f"{side}_ffn_dim"] = state_dict[f"{side}.layers.0.fc1.weight"].size(0)
        config[f"{side}_attention_heads"] = getattr(args, f"{side}_attention_heads")
    return config


def count_layers(state_dict: dict[str, Tensor], side: str) -> int:
    prefix = f"{side}.layers."
    return len({name.split(".")[2] for name in state_dict if name.startswith(prefix)})


def check_expressible(state_dict: dict[str, Tensor], args: Any) -> None:
    """Raises a ValueError that names the first thing Transformers' BART has no counterpart for."""
    tied = [
        name
        for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
        if name in state_dict
    ]
    tables = [state_dict.get(f"{side}.embed_positions.weight") for side in ("encoder", "decoder")]
    embedding = state_dict["encoder.embed_tokens.weight"]
    obstacles = {
        "layer normalisation before each block": args.encoder_normalize_before
        or args.decoder_normalize_before,
        "embeddings without layer normalisation": "encoder.layernorm_embedding.weight"
        not in state_dict,
        "separate embeddings": any(not torch.equal(embedding, state_dict[name]) for name in tied),
        "sinusoidal positions": any(table is None for table in tables),
        f"activation function {args.activation_fn!r}": args.activation_fn not in ACTIVATIONS,
    }
    sizes = {None if table is None else table.shape for table in tables}
    obstacles["position tables of different sizes"] = len(sizes) > 1
    for obstacle, present in obstacles.items():
        if present:
            raise ValueError(
                f"this model has {obstacle}, which Transformers' BART cannot express; "
                "convert a model of the bart_base or bart_large family"
            )
