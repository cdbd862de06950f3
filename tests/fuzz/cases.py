"""Random cases: tiny models of all families, searches with all options, and sources.

A case is a dataclass of plain values. Its repr is Python, so a failure can be pasted and run again.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

ENCODER_DECODERS = ("transformer", "bart_base", "transformer_align")
FAMILIES = (*ENCODER_DECODERS, "transformer_lm")
ACTIVATIONS = ("relu", "relu_squared", "gelu", "gelu_fast", "gelu_accurate", "tanh", "linear")
SEARCHES = ("beam", "diverse", "siblings", "sampling", "top-k", "top-p", "constraints", "match_source_len", "allowed")
WIDTHS = [8, 12, 16, 32]
RANDOM_SEARCHES = ("sampling", "top-k", "top-p")


@dataclass(frozen=True)
class ModelCase:
    family: str
    vocabulary: int  # words beside the four special symbols
    settings: dict[str, Any] = field(default_factory=dict)  # of the architecture
    seed: int = 0
    spread: float = 0.3  # standard deviation of the weights
    fp16_exact: bool = False

    @property
    def is_language_model(self) -> bool:
        return self.family == "transformer_lm"


@dataclass(frozen=True)
class SearchCase:
    kind: str = "beam"
    options: dict[str, Any] = field(default_factory=dict)  # of the command line
    extra: dict[str, Any] = field(default_factory=dict)  # of the generator's constructor
    fusion: float | None = None  # weight of a language model
    working_ngrams: bool = False  # against a plain reference, else `--el-stock-ngrams` against stock
    allowed_tokens: int = 0  # of "allowed": those that the last token allows


@dataclass(frozen=True)
class Case:
    models: tuple[ModelCase, ...]
    search: SearchCase
    sources: tuple[tuple[int, ...], ...]  # or prompts, without the end of the sentence
    left_pad: bool = False
    prefixes: tuple[tuple[int, ...], ...] | None = None
    constraints: tuple[tuple[tuple[int, ...], ...], ...] | None = None  # for each sentence, phrases
    bos_token: int | None = None
    attention: str = "auto"
    budget: int | None = None
    prepared: bool = False  # for inference, which packs our models
    seed: int = 0

    @property
    def is_language_model(self) -> bool:
        return self.models[0].is_language_model


# ---- models


def sometimes(random: Random, values: list, default: Any = None) -> Any:
    """The default in two of three cases."""
    return random.choice(values) if random.random() < 1 / 3 else default


def flag(random: Random, share: float = 0.5) -> bool:
    return random.random() < share


def side_settings(random: Random, side: str, width: int) -> dict[str, Any]:
    settings = {
        "layers": random.randint(1, 3),
        "embed_dim": width,
        "ffn_embed_dim": random.choice([16, 40]),
        "attention_heads": random.choice([1, 2, 4, 4, width]),
        "normalize_before": flag(random),
        "learned_pos": flag(random),
        "layerdrop": sometimes(random, [0.3], 0.0),
    }
    return {f"{side}_{name}": value for name, value in settings.items()}


def shared_settings(random: Random, vocabulary: int) -> dict[str, Any]:
    settings = {
        "activation_fn": random.choice(ACTIVATIONS),
        "no_token_positional_embeddings": flag(random, 0.2),
        "layernorm_embedding": flag(random),
        "no_scale_embedding": flag(random),
        "no_decoder_final_norm": flag(random, 0.2),
        "attention_dropout": random.choice([0.0, 0.1]),
        "quant_noise_pq": sometimes(random, [0.1], 0.0),
        "quant_noise_pq_block_size": random.choice([2, 4]),
        "max_target_positions": random.choice([9, 30, 30, 30]),
        "share_decoder_input_output_embed": flag(random),
    }
    if vocabulary > 12 and flag(random, 0.2):
        settings |= {
            "adaptive_softmax_cutoff": "6,12",
            "adaptive_softmax_factor": 2,
            "share_decoder_input_output_embed": False,
        }
    return settings


def encoder_decoder_settings(random: Random, family: str, vocabulary: int) -> dict[str, Any]:
    width = random.choice(WIDTHS)
    settings = shared_settings(random, vocabulary)
    settings["share_all_embeddings"] = family == "bart_base" or flag(random)
    if settings["share_all_embeddings"]:
        settings["share_decoder_input_output_embed"] = True
        settings.pop("adaptive_softmax_cutoff", None)
    else:
        settings["decoder_output_dim"] = sometimes(random, WIDTHS, width)
        if settings["share_decoder_input_output_embed"]:
            settings["decoder_output_dim"] = width
    encoder_width = width if settings["share_all_embeddings"] else random.choice([width, *WIDTHS])
    settings |= side_settings(random, "encoder", encoder_width) | side_settings(random, "decoder", width)
    settings["max_source_positions"] = 16
    settings["no_cross_attention"] = flag(random, 0.03)
    settings["cross_self_attention"] = encoder_width == width and flag(random, 0.03)
    if family == "transformer_align":
        settings |= {
            "alignment_layer": random.randint(0, settings["decoder_layers"] - 1),
            "alignment_heads": random.randint(1, settings["decoder_attention_heads"]),
            "full_context_alignment": flag(random),
        }
    return settings


def language_model_settings(random: Random, vocabulary: int) -> dict[str, Any]:
    width = random.choice(WIDTHS)
    settings = shared_settings(random, vocabulary) | side_settings(random, "decoder", width)
    input_width = sometimes(random, WIDTHS, width)
    shared = settings["share_decoder_input_output_embed"]
    settings |= {
        "decoder_input_dim": input_width,
        "decoder_output_dim": input_width if shared else sometimes(random, WIDTHS, width),
    }
    settings |= {name: flag(random, 0.2) for name in ("scale_fc", "scale_attn", "scale_heads", "scale_resids")}
    if vocabulary > 12 and not shared and flag(random, 0.2):
        settings |= {"adaptive_input": True, "adaptive_input_cutoff": "6,12", "adaptive_input_factor": 2}
    elif flag(random, 0.1):
        settings |= {"character_embeddings": True, "character_filters": "[(1, 8), (2, 8)]"}
        settings |= {"share_decoder_input_output_embed": False, "decoder_input_dim": width}
    return settings


def random_model(random: Random, family: str, vocabulary: int) -> ModelCase:
    if family == "transformer_lm":
        settings = language_model_settings(random, vocabulary)
    else:
        settings = encoder_decoder_settings(random, family, vocabulary)
    return ModelCase(
        family,
        vocabulary,
        settings,
        seed=random.randrange(10**6),
        spread=random.choice([0.1, 0.3]),
        fp16_exact=flag(random),
    )


# ---- searches


def random_search(random: Random, aligns: bool) -> SearchCase:
    kind = random.choice(["beam", "beam", "beam", *SEARCHES])
    beam = random.randint(1, 5)
    options: dict[str, Any] = {
        "beam": beam,
        "max_len_a": sometimes(random, [0.5, 1.5], 0),
        "max_len_b": random.choice([3, 8, 12, 12]),
        "min_len": sometimes(random, [0, 3, 4], 1),
        "lenpen": sometimes(random, [0.0, 0.3, 2.0], 1),
        "unkpen": sometimes(random, [-1.0, 2.0], 0),
        "temperature": sometimes(random, [0.5, 1.7], 1.0),
        "unnormalized": flag(random, 0.2),
        "no_repeat_ngram_size": sometimes(random, [1, 2, 2, 3], 0),
        "print_alignment": sometimes(random, ["hard", "soft"]) if aligns else None,
    }
    options |= strategy_options(random, kind, beam)
    extra: dict[str, Any] = {}
    if flag(random, 0.15):
        extra["tokens_to_suppress"] = ["w1", "w3"]
    if flag(random, 0.1):
        extra["eos"] = 5
    return SearchCase(
        kind,
        options,
        extra,
        fusion=sometimes(random, [0.3, 1.0]),
        working_ngrams=flag(random),
        allowed_tokens=random.randint(2, 8) if kind == "allowed" else 0,
    )


def strategy_options(random: Random, kind: str, beam: int) -> dict[str, Any]:
    if kind == "diverse":
        groups = [number for number in range(1, beam + 1) if beam % number == 0]
        return {
            "diverse_beam_groups": random.choice(groups),
            "diverse_beam_strength": random.choice([0.2, 0.5, 2.0]),
        }
    return {
        "siblings": {"diversity_rate": random.choice([0.1, 0.5])},
        "sampling": {"sampling": True},
        "top-k": {"sampling": True, "sampling_topk": random.choice([1, 3, 8])},
        "top-p": {"sampling": True, "sampling_topp": random.choice([0.3, 0.9])},
        "match_source_len": {"match_source_len": True},
        "constraints": {"constraints": random.choice(["ordered", "unordered"])},
    }.get(kind, {})


# ---- whole cases


def random_tokens(random: Random, vocabulary: int, shortest: int, longest: int) -> tuple[int, ...]:
    """The unknown word among them."""
    return tuple(random.randint(3, 3 + vocabulary) for _ in range(random.randint(shortest, longest)))


def random_prefix(random: Random, vocabulary: int) -> tuple[int, ...]:
    """Some close the text."""
    prefix = random_tokens(random, vocabulary, 0, 3)
    return (*prefix, 2) if flag(random, 0.1) else prefix


def random_case(random: Random, families: tuple[str, ...] = FAMILIES) -> Case:
    family = random.choice(families)
    vocabulary = random.choice([8, 20, 40])
    models = tuple(random_model(random, family, vocabulary) for _ in range(random.choice([1, 1, 1, 2])))
    is_language_model = family == "transformer_lm"
    search = random_search(random, aligns=not is_language_model)
    b = random.randint(1, 4)
    prefixes = constraints = None
    if not is_language_model and flag(random, 0.25):
        prefixes = tuple(random_prefix(random, vocabulary) for _ in range(b))
    if search.kind == "constraints":
        constraints = tuple(
            tuple(random_tokens(random, vocabulary, 1, 2) for _ in range(random.randint(0, 2))) for _ in range(b)
        )
    splits_batches = search.kind not in RANDOM_SEARCHES  # parts would draw random numbers in another order
    return Case(
        models,
        search,
        sources=tuple(random_tokens(random, vocabulary, 0, 7) for _ in range(b)),
        left_pad=not is_language_model and flag(random),
        prefixes=prefixes,
        constraints=constraints,
        bos_token=sometimes(random, [0, 4, 5]),
        attention=random.choice(["auto", "always", "never"]),
        budget=sometimes(random, [0, 5_000, 20_000]) if splits_batches else None,
        prepared=flag(random),
        seed=random.randrange(10**6),
    )
