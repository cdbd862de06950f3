"""BART and GPT-2 of Hugging Face Transformers as stock fairseq models, and BART back.

Functions over weights, settings and vocabularies; Transformers is not needed to run them. The two
libraries share BART's layer layout and its offset of 2 in the position tables, so that only names
and bookkeeping entries differ. GPT-2 becomes a `transformer_lm`.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from torch import Tensor

from fairseq_el.errors import UserError

logger = logging.getLogger(__name__)

# fairseq's activation functions that Transformers has too, under a name of its own.
ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_new", "relu": "relu"}
# And the other way round. Transformers has the tanh form of GELU under several names.
FAIRSEQ_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate",
    "gelu_fast": "gelu_accurate", "relu": "relu",
}  # fmt: skip

# Entries of a fairseq BART that Transformers has no use for.
WITHOUT_COUNTERPART = (
    "encoder.version",
    "decoder.version",
    "encoder.embed_positions._float_tensor",
    "decoder.embed_positions._float_tensor",
)
# The word tables of a fairseq BART; the last is the output's, and has an older name.
ENCODER_WORDS, DECODER_WORDS = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
OUTPUT_WORDS, OLD_OUTPUT_WORDS = "decoder.output_projection.weight", "decoder.embed_out"

POSITION_OFFSET = 2  # fairseq starts counting positions after the padding index, 1
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # the first rows of every fairseq model
END_OF_TEXT = "<|endoftext|>"  # the last entry of GPT-2's vocabulary
VERSION = 3.0  # of fairseq's state dicts; earlier ones had no layer normalisation after the stack


class Weights:
    """Tensors of a Transformers model, handed out one by one in the wanted precision.

    Names are those of the bare model: in files of models with a head they have a prefix.
    """

    def __init__(self, stored: Mapping[str, Tensor], prefix: str, dtype: torch.dtype):
        self.stored, self.dtype = stored, dtype
        self.full_names = {name.removeprefix(prefix): name for name in stored}
        self.untaken = set(self.full_names)

    def __contains__(self, name: str) -> bool:
        return name in self.full_names

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self:
            raise UserError(f"the file of weights lacks {name}: it is not of the model of config.json")
        tensor = self.stored[self.full_names[name]]
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{name} is of shape {list(tensor.shape)}, but {list(shape)} by config.json: use the "
                "config.json that belongs to the weights"
            )
        self.untaken.discard(name)
        return in_precision(tensor, self.dtype, name)

    def check_all_taken(self, unneeded: str = "") -> None:
        """Refuses a model with parts that stock fairseq has not; `unneeded` names what may be left."""
        parts = sorted(name for name in self.untaken if not re.fullmatch(unneeded, name))
        if parts:
            raise UserError(
                f"the model has {len(parts):,} weights that stock fairseq has no place for, such as "
                f"{parts[0]}: convert a plain GPT2LMHeadModel or BartForConditionalGeneration"
            )


def in_precision(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    converted = tensor.to(dtype)
    if dtype == torch.float16 != tensor.dtype and not converted.isfinite().all():
        raise UserError(f"{name} has numbers too large for half precision: use --dtype fp32")
    return converted


def precision_of(stored: Mapping[str, Tensor]) -> torch.dtype:
    """Half precision where the model's words are stored in it, else single."""
    tables = ("wte.weight", "shared.weight", "embed_tokens.weight", "lm_head.weight")
    words = next((name for name in stored if name.endswith(tables)), None)
    is_half = words is not None and stored[words].dtype == torch.float16
    return torch.float16 if is_half else torch.float32


def setting(config: dict[str, Any], name: str) -> Any:
    if name not in config:
        raise UserError(f"config.json does not say {name}: use the one that belongs to the weights")
    return config[name]


def check_config(config: dict[str, Any], needed: dict[str, Any]) -> None:
    for name, value in needed.items():
        if config.get(name, value) != value:
            raise UserError(
                f"the model has {name} = {config[name]} in config.json, and stock fairseq can only "
                f"express {name} = {value}: it cannot be converted"
            )
    if config["activation_function"] not in FAIRSEQ_ACTIVATIONS:
        raise UserError(
            f"stock fairseq has no activation function {config['activation_function']!r}: it has "
            f"{', '.join(FAIRSEQ_ACTIVATIONS)}"
        )


# --- GPT-2 to fairseq ----------------------------------------------------------------------------

GPT2_DEFAULTS = {"activation_function": "gelu_new", "eos_token_id": 50256, "tie_word_embeddings": True}
GPT2_NEEDS = {
    "add_cross_attention": False, "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}  # fmt: skip


def gpt2_from_huggingface(
    stored: Mapping[str, Tensor], config: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the state dict and the settings of the `transformer_lm` equal to a GPT2LMHeadModel.

    stored: its weights by name, which may be read when they are asked for. config: its config.json.
    dtype: of the returned weights (None: half precision if stored so, else single).
    """
    config = {**GPT2_DEFAULTS, **config}
    check_config(config, GPT2_NEEDS)
    rows, width, positions = (setting(config, n) for n in ("vocab_size", "n_embd", "n_positions"))
    inner = config.get("n_inner") or 4 * width
    weights = Weights(stored, "transformer.", dtype or precision_of(stored))
    state_dict = {"decoder.version": torch.tensor([VERSION], dtype=weights.dtype)}
    for number in range(setting(config, "n_layer")):
        state_dict |= gpt2_layer(weights, number, width, inner)
    table = weights.take("wpe.weight", positions, width)
    offset = table.new_zeros(POSITION_OFFSET, width)
    state_dict["decoder.embed_positions.weight"] = torch.cat([offset, table])
    state_dict |= gpt2_words(weights, rows, width, end_of_text(config, rows), tied(config))
    weights.check_all_taken(unneeded=r"h\.\d+\.attn\.(masked_)?bias")  # causal masks of old files
    return state_dict, gpt2_settings(config, inner)


def gpt2_settings(config: dict[str, Any], inner: int) -> dict[str, Any]:
    width = config["n_embd"]
    return {
        "decoder_layers": config["n_layer"],
        "decoder_embed_dim": width,
        "decoder_input_dim": width,
        "decoder_output_dim": width,
        "decoder_ffn_embed_dim": inner,
        "decoder_attention_heads": setting(config, "n_head"),
        "decoder_learned_pos": True,
        "decoder_normalize_before": True,
        "no_scale_embedding": True,
        "share_decoder_input_output_embed": tied(config),
        "activation_fn": FAIRSEQ_ACTIVATIONS[config["activation_function"]],
        "dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "tokens_per_sample": config["n_positions"],
        "max_target_positions": config["n_positions"],
    }


def tied(config: dict[str, Any]) -> bool:
    return bool(config["tie_word_embeddings"])


def end_of_text(config: dict[str, Any], rows: int) -> int:
    end = config["eos_token_id"]
    if not isinstance(end, int) or not 0 <= end < rows:
        raise UserError(
            f"eos_token_id is {end} in config.json: fairseq needs one token of the vocabulary of "
            f"{rows:,} that ends a text"
        )
    return end


def gpt2_layer(weights: Weights, number: int, width: int, inner: int) -> dict[str, Tensor]:
    """One layer. Transformers stores the linear ones as [in, out], fairseq as [out, in]."""
    here, there = f"h.{number}.", f"decoder.layers.{number}."
    layer = {}
    for theirs, norm in {"ln_1": "self_attn_layer_norm", "ln_2": "final_layer_norm"}.items():
        for kind in ("weight", "bias"):
            layer[f"{there}{norm}.{kind}"] = weights.take(f"{here}{theirs}.{kind}", width)
    linear = {
        "attn.c_attn": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), width, 3 * width),
        "attn.c_proj": (("self_attn.out_proj",), width, width),
        "mlp.c_fc": (("fc1",), width, inner),
        "mlp.c_proj": (("fc2",), inner, width),
    }
    for theirs, (ours, inputs, outputs) in linear.items():
        weight = weights.take(f"{here}{theirs}.weight", inputs, outputs).t()
        bias = weights.take(f"{here}{theirs}.bias", outputs)
        parts = zip(ours, weight.chunk(len(ours)), bias.chunk(len(ours)), strict=True)
        for name, part, part_of_bias in parts:  # copies: a view would keep all of the source alive
            layer[f"{there}{name}.weight"] = part.contiguous()
            layer[f"{there}{name}.bias"] = part_of_bias.clone()
    return layer


def gpt2_words(weights: Weights, rows: int, width: int, end: int, is_tied: bool) -> dict[str, Tensor]:
    """The word tables and the layer normalisation before the output, whose bias they depend on."""
    words = weights.take("wte.weight", rows, width)
    output = weights.take("lm_head.weight", rows, width) if "lm_head.weight" in weights else words
    if is_tied and not torch.equal(words, output):
        raise contradiction("wte.weight", "lm_head.weight")
    gain, bias = (weights.take(f"ln_f.{kind}", width) for kind in ("weight", "bias"))
    row, bias = impossible_row(output, gain, bias)
    projection = with_special_rows(output, end, row, row, row)
    if is_tied:
        table = projection
    else:  # what goes in as <s> or <unk> may then be the nearest GPT-2 has
        table = with_special_rows(words, end, words[end], torch.zeros_like(row), words[end])
    return {
        "decoder.embed_tokens.weight": table,
        "decoder.output_projection.weight": projection,
        "decoder.layer_norm.weight": gain,
        "decoder.layer_norm.bias": bias,
    }


def contradiction(first: str, second: str) -> UserError:
    return UserError(
        f"config.json says that {first} and {second} are one table (tie_word_embeddings), but the file "
        "of weights holds two different ones: correct config.json"
    )


def with_special_rows(words: Tensor, end: int, bos: Tensor, pad: Tensor, unk: Tensor) -> Tensor:
    """The table in fairseq's order, the end of text as </s>: see `gpt2_symbols`. [rows + 3, width]"""
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
            "<pad> and <unk> in this precision: use --dtype fp32, or weights without such gains"
        )
    if not highest_logit(row.half(), gain.half(), b.half()) <= lowest - GAP:
        logger.warning(
            "the checkpoint will be for single precision: convert with --dtype fp16 what is to run "
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


# --- BART to fairseq -----------------------------------------------------------------------------

BART_DEFAULTS = {
    "activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True,
}  # fmt: skip
BART_NEEDS = {
    "normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False,
    "static_position_embeddings": False, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
ATTENTIONS = {"encoder": ("self_attn",), "decoder": ("self_attn", "encoder_attn")}


def bart_from_huggingface(
    stored: Mapping[str, Tensor], config: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the state dict and the settings of the fairseq BART equal to a
    BartForConditionalGeneration; the arguments are those of `gpt2_from_huggingface`."""
    config = {**BART_DEFAULTS, **config}
    check_config(config, BART_NEEDS)
    rows, width = setting(config, "vocab_size"), setting(config, "d_model")
    weights = Weights(stored, "model.", dtype or precision_of(stored))
    state_dict = {name: weights.take(name, *shape) for name, shape in bart_shapes(config).items()}
    state_dict |= bart_words(weights, rows, width, tied(config))
    for side in ATTENTIONS:
        state_dict[f"{side}.version"] = torch.tensor([VERSION], dtype=weights.dtype)
    if "final_logits_bias" in weights and weights.take("final_logits_bias", 1, rows).any():
        raise UserError(
            "final_logits_bias is not zero, and fairseq's BART adds no bias to its logits: the model "
            "cannot be converted"
        )
    weights.check_all_taken(unneeded=r"(en|de)coder\.version")
    return state_dict, bart_settings(config)


def bart_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights but the word tables, by names that both libraries share."""
    width = config["d_model"]
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    def linear(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    for side, attentions in ATTENTIONS.items():
        positions = setting(config, "max_position_embeddings") + POSITION_OFFSET
        shapes[f"{side}.embed_positions.weight"] = (positions, width)
        norm(f"{side}.layernorm_embedding")
        inner = setting(config, f"{side}_ffn_dim")
        for number in range(setting(config, f"{side}_layers")):
            layer = f"{side}.layers.{number}"
            for attention in attentions:
                for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    linear(f"{layer}.{attention}.{projection}", width, width)
                norm(f"{layer}.{attention}_layer_norm")
            linear(f"{layer}.fc1", width, inner)
            linear(f"{layer}.fc2", inner, width)
            norm(f"{layer}.final_layer_norm")
    return shapes


def bart_words(weights: Weights, rows: int, width: int, is_tied: bool) -> dict[str, Tensor]:
    """The word tables of encoder, decoder and output: one if tied, under any of its names."""
    names = ("shared.weight", ENCODER_WORDS, DECODER_WORDS, "lm_head.weight")
    tables = {name: weights.take(name, rows, width) for name in names if name in weights}
    if is_tied:
        first = next(iter(tables), "shared.weight")
        for name, table in tables.items():
            if not torch.equal(table, tables[first]):
                raise contradiction(first, name)
        encoder = decoder = output = weights.take(first, rows, width)
    else:  # Transformers ties those of encoder and decoder even so, up to version 4
        encoder, decoder = (
            weights.take(name if name in tables else "shared.weight", rows, width)
            for name in (ENCODER_WORDS, DECODER_WORDS)
        )
        output = weights.take("lm_head.weight", rows, width)
    return {ENCODER_WORDS: encoder, DECODER_WORDS: decoder, OUTPUT_WORDS: output}


def bart_settings(config: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "max_source_positions": config["max_position_embeddings"],
        "max_target_positions": config["max_position_embeddings"],
        "activation_fn": FAIRSEQ_ACTIVATIONS[config["activation_function"]],
        "no_scale_embedding": not config["scale_embedding"],
        "share_all_embeddings": tied(config),
        "share_decoder_input_output_embed": tied(config),
        "dropout": config.get("dropout", 0.1),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "activation_dropout": config.get("activation_dropout", 0.0),
    }
    for side in ATTENTIONS:
        settings[f"{side}_embed_dim"] = config["d_model"]
        settings[f"{side}_layers"] = config[f"{side}_layers"]
        settings[f"{side}_ffn_embed_dim"] = config[f"{side}_ffn_dim"]
        settings[f"{side}_attention_heads"] = setting(config, f"{side}_attention_heads")
    return settings


# --- fairseq's BART to Transformers --------------------------------------------------------------


def bart_to_huggingface(state_dict: dict[str, Tensor], args: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the state dict and the configuration of the equal `BartForConditionalGeneration`.

    state_dict: the `model` entry of a fairseq checkpoint of the BART family.
    args: its model arguments (the checkpoint's `args` or `cfg.model`).
    The returned tensors are those of state_dict, not copies. Models that Transformers' BART cannot
    express (pre-norm, sinusoidal positions, ...) are refused with a `UserError`.
    """
    check_expressible(state_dict, args)
    config = configuration(state_dict, args)
    encoder, decoder, output = word_tables(state_dict)
    renamed = {f"model.{name}": state_dict[name] for name in bart_shapes(config)}
    renamed["model.shared.weight"] = renamed[f"model.{ENCODER_WORDS}"] = encoder
    renamed[f"model.{DECODER_WORDS}"] = decoder
    renamed["lm_head.weight"] = output
    renamed["final_logits_bias"] = torch.zeros(1, encoder.size(0), dtype=encoder.dtype)
    return renamed, config


def word_tables(state_dict: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Those of encoder, decoder and output. A tied output may be absent from the file."""
    encoder, decoder = state_dict[ENCODER_WORDS], state_dict.get(DECODER_WORDS)
    decoder = encoder if decoder is None else decoder
    output = state_dict.get(OUTPUT_WORDS, state_dict.get(OLD_OUTPUT_WORDS, decoder))
    return encoder, decoder, output


def configuration(state_dict: dict[str, Tensor], args: Any) -> dict[str, Any]:
    """The `config.json` of the model; sizes are read off the weights, which cannot be out of
    date."""
    encoder, decoder, output = word_tables(state_dict)
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


# How fairseq starts and ends hypotheses; in config.json and in generation_config.json.
GENERATION = {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


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
    if len({table.shape for table in word_tables(state_dict)}) > 1:
        raise not_expressible("word tables of different sizes")
    known = bart_shapes(configuration(state_dict, args)).keys() | {
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


# --- vocabularies --------------------------------------------------------------------------------


def gpt2_encoder(merges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """GPT-2's `encoder.json`, which follows from its merges: bytes, merged pieces, end of text."""
    merged = ("".join(pair) for pair in merges)
    pieces = dict.fromkeys([*bytes_to_unicode().values(), *merged, END_OF_TEXT])
    return {piece: number for number, piece in enumerate(pieces)}


def gpt2_symbols(vocabulary: dict[str, int], rows: int, end: int) -> list[str]:
    """fairseq's dictionary for GPT-2, special symbols aside: the numbers that `--bpe gpt2` writes.

    The end of text has none, as it is fairseq's </s>.
    """
    beyond = [piece for piece, number in vocabulary.items() if number >= rows]
    if beyond:
        raise UserError(
            f"the vocabulary has {beyond[0]!r} as number {vocabulary[beyond[0]]}, but the model has "
            f"{rows:,} rows: use the vocabulary that belongs to the weights"
        )
    return [str(number) for number in range(rows) if number != end]


def bart_symbols(vocabulary: dict[str, int], merges: Iterable[tuple[str, str]], rows: int) -> list[str]:
    """fairseq's dictionary for BART, special symbols aside, from Transformers' vocabulary.

    Both number rows alike; but fairseq names them after the numbers pieces have in GPT-2. Rows
    without a name get one, entries beyond the rows (<mask>, in models for summaries) have none.
    """
    pieces = {number: piece for piece, number in vocabulary.items()}
    for number, symbol in enumerate(SPECIAL_SYMBOLS):
        if pieces.get(number) != symbol:
            raise UserError(
                f"the vocabulary has {pieces.get(number)!r} as number {number}, where BART's has "
                f"{symbol}: use the vocabulary that belongs to the weights"
            )
    encoder = gpt2_encoder(merges)
    unnamed = (f"madeupword{n:04d}" for n in range(rows))
    fillers = (name for name in unnamed if name not in vocabulary)
    named = (pieces.get(n) or next(fillers) for n in range(len(SPECIAL_SYMBOLS), rows))
    return [str(encoder.get(piece, piece)) for piece in named]


def bart_vocabulary(symbols: Iterable[str], encoder: dict[str, int]) -> dict[str, int]:
    """Transformers' vocabulary for BART, from fairseq's dictionary with its special symbols."""
    pieces = {str(number): piece for piece, number in encoder.items()}
    vocabulary = {}
    for number, symbol in enumerate(symbols):
        if symbol.isdecimal() and symbol not in pieces:
            raise UserError(
                f"the dictionary has an entry {symbol}, which encoder.json does not know: use the "
                "files that the model was trained with"
            )
        vocabulary[pieces.get(symbol, symbol)] = number
    vocabulary.setdefault("<mask>", len(vocabulary))  # tokenizers of BART want it
    return vocabulary
