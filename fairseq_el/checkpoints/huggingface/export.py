"""fairseq's BART as a `BartForConditionalGeneration` of Transformers."""

from typing import Any

import torch
from torch import Tensor

from fairseq_el.checkpoints.huggingface.bart import (
    ATTENTIONS,
    DECODER_WORDS,
    ENCODER_WORDS,
    OUTPUT_WORDS,
    shapes,
)
from fairseq_el.checkpoints.huggingface.weights import POSITION_OFFSET, in_precision
from fairseq_el.errors import UserError

# Transformers' names of fairseq's activation functions.
ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_new", "relu": "relu"}
# Entries of a fairseq BART that Transformers has no use for.
WITHOUT_COUNTERPART = (
    "encoder.version",
    "decoder.version",
    "encoder.embed_positions._float_tensor",
    "decoder.embed_positions._float_tensor",
)
OLD_OUTPUT_WORDS = "decoder.embed_out"  # the output's embedding in fairseq 0.9
# How fairseq starts and ends hypotheses; in config.json and in generation_config.json.
GENERATION = {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


def bart_to_huggingface(state_dict: dict[str, Tensor], args: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the state dict and the configuration of the equal `BartForConditionalGeneration`.

    state_dict: the `model` entry of a fairseq checkpoint of the BART family.
    args: its model arguments (the checkpoint's `args` or `cfg.model`).
    The returned tensors are those of state_dict, not copies. Models that Transformers' BART cannot
    express (pre-norm, sinusoidal positions, ...) are refused with a `UserError`.
    """
    check_expressible(state_dict, args)
    config = configuration(state_dict, args)
    encoder, decoder, output = embeddings_of(state_dict)
    renamed = {f"model.{name}": state_dict[name] for name in shapes(config)}
    renamed["model.shared.weight"] = renamed[f"model.{ENCODER_WORDS}"] = encoder
    renamed[f"model.{DECODER_WORDS}"] = decoder
    renamed["lm_head.weight"] = output
    renamed["final_logits_bias"] = torch.zeros(1, encoder.size(0), dtype=encoder.dtype)
    return renamed, config


def embeddings_of(state_dict: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The embeddings of encoder, decoder and output. A tied output may be absent from the file."""
    encoder, decoder = state_dict[ENCODER_WORDS], state_dict.get(DECODER_WORDS)
    decoder = encoder if decoder is None else decoder
    output = state_dict.get(OUTPUT_WORDS, state_dict.get(OLD_OUTPUT_WORDS, decoder))
    return encoder, decoder, output


def configuration(state_dict: dict[str, Tensor], args: Any) -> dict[str, Any]:
    """The `config.json` of the model, with the sizes of its weights."""
    encoder, decoder, output = embeddings_of(state_dict)
    vocabulary, width = encoder.shape
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
        "tie_word_embeddings": torch.equal(encoder, decoder) and torch.equal(encoder, output),
        "dropout": getattr(args, "dropout", 0.1),
        "attention_dropout": getattr(args, "attention_dropout", 0.0),
        "activation_dropout": getattr(args, "activation_dropout", 0.0),
        **GENERATION,
    }
    for side in ATTENTIONS:
        config[f"{side}_layers"] = count_layers(state_dict, side)
        config[f"{side}_ffn_dim"] = state_dict[f"{side}.layers.0.fc1.weight"].size(0)
        config[f"{side}_attention_heads"] = getattr(args, f"{side}_attention_heads")
    return config


def count_layers(state_dict: dict[str, Tensor], side: str) -> int:
    prefix = f"{side}.layers."
    return len({name.split(".")[2] for name in state_dict if name.startswith(prefix)})


def check_expressible(state_dict: dict[str, Tensor], args: Any) -> None:
    """Raises a `UserError` that names the first thing Transformers' BART has no counterpart for."""
    positions = [state_dict.get(f"{side}.embed_positions.weight") for side in ATTENTIONS]
    activation = getattr(args, "activation_fn", None)
    obstacles = {
        "no encoder": ENCODER_WORDS not in state_dict,
        "layer normalisation before each block": any(
            getattr(args, f"{side}_normalize_before", False) for side in ATTENTIONS
        ),
        "embeddings without layer normalisation": "encoder.layernorm_embedding.weight" not in state_dict,
        "sinusoidal positions": any(table is None for table in positions),
        f"activation function {activation!r}": activation not in ACTIVATIONS,
    }
    sizes = {None if table is None else table.shape for table in positions}
    obstacles["position tables of different sizes"] = len(sizes) > 1
    for obstacle, present in obstacles.items():
        if present:
            raise not_expressible(obstacle)
    if len({table.shape for table in embeddings_of(state_dict)}) > 1:
        raise not_expressible("embeddings of different sizes")
    known = shapes(configuration(state_dict, args)).keys() | {
        ENCODER_WORDS, DECODER_WORDS, OUTPUT_WORDS, OLD_OUTPUT_WORDS, *WITHOUT_COUNTERPART,
    }  # fmt: skip
    for name in state_dict:
        if name not in known and not name.startswith("classification_heads."):
            raise not_expressible(f"a part {name}")


def not_expressible(obstacle: str) -> UserError:
    return UserError(
        f"this model has {obstacle}, which Transformers' BART cannot express; "
        "convert a model of the bart_base or bart_large family"
    )


def storable(weights: dict[str, Tensor], tied: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights as safetensors stores them: without shared memory, tied embeddings once."""
    ties = (ENCODER_WORDS, DECODER_WORDS, "lm_head.weight")
    kept, seen = {}, set()
    for name, tensor in weights.items():
        if tied and name.removeprefix("model.") in ties:
            continue
        tensor = in_precision(tensor, dtype, name).contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() > tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        kept[name] = tensor
    return kept
