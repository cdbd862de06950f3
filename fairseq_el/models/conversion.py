"""EL forms of fairseq's models: `el_<architecture>` for each stock one, and `to_el_form` for loaded models."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fairseq.models import BaseFairseqModel, FairseqMultiModel
from fairseq.models.bart import BARTModel
from fairseq.models.nat import FairseqNATModel
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoder,
    TransformerEncoderBase,
    TransformerModel,
)
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.models.wav2vec.wav2vec2_asr import TransformerDecoder as SpeechDecoder
from fairseq.modules import (
    LearnedPositionalEmbedding,
    MultiheadAttention,
    SinusoidalPositionalEmbedding,
)
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn

from fairseq_el.checkpoints import packed_file
from fairseq_el.checkpoints.loading import check_dictionary
from fairseq_el.checkpoints.validation import check_weights
from fairseq_el.errors import UserError
from fairseq_el.kernels.packing import pack
from fairseq_el.models import packed
from fairseq_el.models.attention import CachedSelfAttention, ELAttention, PromptAttention
from fairseq_el.models.decoder_layer import FUSED
from fairseq_el.models.encoder import ELEncoder, FusedSelfAttention, all_layers
from fairseq_el.models.positions import LearnedRowPositions, SinusoidalRowPositions

PREFIX = "el_"
FAMILIES = ("transformer", "bart", "transformer_lm")
"""Stock models whose architectures have an `el_` twin. Any other model with such a decoder has an EL form too."""
ROW_POSITIONS = {
    LearnedPositionalEmbedding: LearnedRowPositions,
    SinusoidalPositionalEmbedding: SinusoidalRowPositions,
}


class ELModel:
    """What an EL model adds to its stock class. Parameters, their names and training stay the same."""

    wanted_precision: str | None = None
    """Asked for with `accelerate`; else the task's option counts."""
    low_precision: str | None = None
    """`bf16` or `int8` if the model is packed so, which makes caches half precision."""
    checkpoints: Sequence[Path] = ()
    """Files that are being loaded. Packed weights are beside theirs."""
    packed_precision: str | None = None
    """With which a model was packed that was stored so."""

    @classmethod
    def build_model(cls, args, task):
        use_stock_name(args)
        return to_el_form(super().build_model(args, task))

    def upgrade_state_dict_named(self, state_dict, name):
        check_weights(state_dict)
        for side in ("encoder", "decoder"):
            if hasattr(self, side):
                check_dictionary(state_dict, side, getattr(self, side).dictionary)
        super().upgrade_state_dict_named(state_dict, name)

    def load_state_dict(self, state_dict, *args, **kwargs):
        if not packed_file.is_packed(state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)
        file = packed_file.find(self.checkpoints, state_dict)
        packed.load(self, file)
        self.packed_precision = file.contents["precision"]

    def set_beam_size(self, beam: int) -> None:
        """Does nothing. Stock generators ask BART to share keys and values among the beams; here the shapes say how
        many beams share a source."""

    def prepare_for_inference_(self, cfg):
        """fairseq calls this on models for inference, once they are on their device."""
        super().prepare_for_inference_(cfg)
        precision = self.wanted_precision or str(getattr(getattr(cfg, "task", None), "el_precision", "auto"))
        if self.packed_precision not in (None, precision) and precision != "auto":
            raise UserError(
                f"the model is packed in {self.packed_precision}: leave out the precision {precision}, or give the "
                "model that it was made from"
            )
        pack(self, precision)


class ELTransformerModel(ELModel, TransformerModel):
    pass


class ELBARTModel(ELModel, BARTModel):
    pass


class ELTransformerLanguageModel(ELModel, TransformerLanguageModel):
    pass


def is_accelerated(model: BaseFairseqModel) -> bool:
    return isinstance(model, ELModel)


def has_el_form(model: BaseFairseqModel) -> bool:
    """True for models whose decoder runs as fairseq's Transformer decoder (or wav2vec's copy of it), with
    encoder-decoder attention in all layers or, in a language model, in none."""
    if isinstance(model, FairseqMultiModel):
        return all(map(has_el_form, model.models.values()))
    decoder: Any = getattr(model, "decoder", None)
    if isinstance(model, FairseqNATModel) or not runs_as_stock(decoder):
        return False
    attends = [getattr(layer, "encoder_attn", None) is not None for layer in all_layers(decoder.layers)]
    if hasattr(model, "encoder"):
        return all(attends)
    positions = type(decoder.embed_positions)
    return (
        not any(attends)
        and positions in (type(None), *ROW_POSITIONS, *ROW_POSITIONS.values())
        and all(supports_prefill(layer.self_attn) for layer in all_layers(decoder.layers))
    )


def runs_as_stock(decoder: object) -> bool:
    """False for subclasses with a way of decoding of their own, such as a pointer-generator's."""
    if isinstance(decoder, SpeechDecoder):
        return type(decoder).forward is SpeechDecoder.forward
    return (
        isinstance(decoder, TransformerDecoderBase)
        and type(decoder).forward is TransformerDecoderBase.forward
        and not decoder.cross_self_attention
    )


def supports_prefill(attention: MultiheadAttention) -> bool:
    """False for options that a separate prefill of the prompt doesn't support."""
    return (
        isinstance(attention, MultiheadAttention)
        and type(attention) in (MultiheadAttention, PromptAttention)
        and attention.bias_k is None
        and not attention.add_zero_attn
        and not attention.use_xformers
    )


def use_stock_name(args) -> None:
    """Puts the stock architecture into the settings that training saves, so that stock fairseq loads what an `el_` one
    trained: the parameters are the same."""
    with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
        for name in ("arch", "_name"):
            if str(getattr(args, name, "")).startswith(PREFIX):
                setattr(args, name, getattr(args, name).removeprefix(PREFIX))


def to_el_form(model: BaseFairseqModel, precision: str | None = None) -> BaseFairseqModel:
    """Turns a stock model into its EL form, in place, and returns it.

    Only classes change: attention layers become the subclasses that generate without a K/V cache, and the model an
    `ELModel`. Parameters stay the same objects under the same names, so optimisers, hooks and state dicts keep working.
    Linear layers are packed when fairseq prepares the model for inference, or here if it is prepared already.
    precision: of the packed layers (default: as the task's option says).
    """
    if not has_el_form(model):
        name = getattr(getattr(model, "args", None), "arch", None) or type(model).__name__
        raise UserError(
            f"{name} has no EL form (that needs fairseq's Transformer decoder); "
            "run it with stock fairseq, that is, without accelerate() or --user-dir fairseq_el"
        )
    for part in model.models.values() if isinstance(model, FairseqMultiModel) else [model]:
        if hasattr(part, "encoder"):
            specialise_encoder(part.encoder)
            specialise_decoder(part.decoder)
        else:
            specialise_language_model(part.decoder)
    if not is_accelerated(model):
        model.__class__ = el_class_of(type(model))
        model.wanted_precision = precision
        if model._is_generation_fast:
            pack(model, precision or "auto")
    return model


def specialise_encoder(encoder: nn.Module) -> None:
    """Encoders of speech have their layers under various names, so the attention layers are looked up by class."""
    encoder.__dict__.pop("reorder_encoder_out", None)  # a stock search may have left its own there
    for module in encoder.modules():
        if isinstance(module, MultiheadAttention) and module.self_attention:
            specialise(module, FusedSelfAttention)
    if type(encoder) in (TransformerEncoder, TransformerEncoderBase):
        encoder.__class__ = ELEncoder


def specialise_decoder(decoder: TransformerDecoderBase) -> None:
    for layer in all_layers(decoder.layers):
        layer.encoder_attn.beam_size = 1
        specialise(layer.encoder_attn, ELAttention)
        specialise(layer.self_attn, CachedSelfAttention)
        layer.__class__ = FUSED.get(type(layer), type(layer))
    specialise_embeddings(decoder)


def specialise_language_model(decoder: TransformerDecoderBase) -> None:
    for layer in all_layers(decoder.layers):
        specialise(layer.self_attn, PromptAttention)
        layer.__class__ = FUSED.get(type(layer), type(layer))
    specialise_embeddings(decoder)


def specialise_embeddings(decoder: TransformerDecoderBase) -> None:
    """Has a decoder on a GPU take tokens from the host, where the search loop keeps them."""
    positions, tokens = getattr(decoder, "embed_positions", None), getattr(decoder, "embed_tokens", None)
    if positions is not None:
        positions.__class__ = ROW_POSITIONS.get(type(positions), type(positions))
    if isinstance(tokens, nn.Embedding) and move_to_weight not in tokens._forward_pre_hooks.values():
        tokens.register_forward_pre_hook(move_to_weight)


def move_to_weight(embedding: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tokens, *others = arguments
    return tokens.to(embedding.weight.device), *others


def specialise(attention: MultiheadAttention, subclass: type) -> None:
    """Replaces only fairseq's own class: user-defined subclasses keep their behaviour."""
    if type(attention) is MultiheadAttention:
        attention.__class__ = subclass


def el_class_of(stock_class: type) -> type:
    for el_class in (ELBARTModel, ELTransformerModel, ELTransformerLanguageModel):
        if el_class.__bases__[1] is stock_class:
            return el_class
    return type("EL" + stock_class.__name__, (ELModel, stock_class), {})
