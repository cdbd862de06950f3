"""A stock `transformer_lm` in the shape of GPT-2 under the names of Transformers' GPT2LMHeadModel."""

from typing import Any

import torch
from torch import Tensor

POSITION_OFFSET = 2  # fairseq starts counting positions after the padding index, 1
LAYER = {
    "self_attn_layer_norm": "ln_1",
    "final_layer_norm": "ln_2",
    "self_attn.out_proj": "attn.c_proj",
    "fc1": "mlp.c_fc",
    "fc2": "mlp.c_proj",
}


def gpt2_to_huggingface(state: dict[str, Tensor], cfg: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns weights and settings. Tokens keep fairseq's numbers, special ones included.

    Transformers stores linear layers as [in, out], and query, key and value as one.
    """
    weights = {
        "transformer.wte.weight": state["decoder.embed_tokens.weight"].float(),
        "lm_head.weight": state["decoder.embed_tokens.weight"].float(),
        "transformer.wpe.weight": state["decoder.embed_positions.weight"][POSITION_OFFSET:].float(),
    }
    for kind in ("weight", "bias"):
        weights[f"transformer.ln_f.{kind}"] = state[f"decoder.layer_norm.{kind}"].float()
        for number in range(cfg.decoder_layers):
            ours, theirs = f"decoder.layers.{number}.", f"transformer.h.{number}."
            parts = {there: [f"{ours}{here}.{kind}"] for here, there in LAYER.items()}
            parts["attn.c_attn"] = [f"{ours}self_attn.{p}_proj.{kind}" for p in "qkv"]
            for name, sources in parts.items():
                joined = torch.cat([state[source].float() for source in sources])
                weights[f"{theirs}{name}.{kind}"] = joined.t().contiguous() if joined.dim() > 1 else joined
    settings = {
        "model_type": "gpt2",
        "vocab_size": state["decoder.embed_tokens.weight"].size(0),
        "n_positions": cfg.tokens_per_sample,
        "n_embd": cfg.decoder_embed_dim,
        "n_inner": cfg.decoder_ffn_embed_dim,
        "n_layer": cfg.decoder_layers,
        "n_head": cfg.decoder_attention_heads,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    return weights, settings
