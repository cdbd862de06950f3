"""EL forms of fairseq's models: `el_<architecture>` for each stock one, and `to_el_form` for loaded models."""

from contextlib import nullcontext

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.bart import BARTModel
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoder,
    TransformerEncoderBase,
    TransformerModel,
)
from omegaconf import OmegaConf, open_dict
from torch import nn

from fairseq_el.attention import ELAttention, HistoryAttention
from fairseq_el.checkpoint import check_dictionary
from fairseq_el.encoder import ELEncoder, FusedSelfAttention
from fairseq_el.errors import UserError
from fairseq_el.packed import pack

PREFIX = "el_"


class ELModel:
    """What an EL model adds to its stock class. The parameters, their names and training stay the same."""

    @classmethod
    def build_model(cls, args, task):
        use_stock_name(args)
        return to_el_form(super().build_model(args, task))

    def upgrade_state_dict_named(self, state_dict, name):
        for side in ("encoder", "decoder"):
            check_dictionary(state_dict, side, getattr(self, side).dictionary)
        super().upgrade_state_dict_named(state_dict, name)

    def set_beam_size(self, beam: int) -> None:
        """Stock generators ask BART to share keys and values among the beams and to leave the encoder output
        as it is. There are no keys and values here, and how many beams share a source is in the shapes."""

    def prepare_for_inference_(self, cfg):
        """fairseq calls this on models that will not be trained any more, once they are on their device."""
        super().prepare_for_inference_(cfg)
        pack(self, getattr(getattr(cfg, "task", None), "el_packing", "auto"))


@register_model("el_transformer")
class ELTransformerModel(ELModel, TransformerModel):
    pass


@register_model("el_bart")
class ELBARTModel(ELModel, BARTModel):
    pass


def register_architectures() -> None:
    """Gives each stock architecture of the two families an `el_` twin with the same defaults."""
    for family in ("transformer", "bart"):
        for name in list(ARCH_MODEL_INV_REGISTRY[family]):
            register_model_architecture(PREFIX + family, PREFIX + name)(ARCH_CONFIG_REGISTRY[name])


register_architectures()


def is_accelerated(model: nn.Module) -> bool:
    return isinstance(model, ELModel)


def has_el_form(model: nn.Module) -> bool:
    """True for models whose decoder is fairseq's Transformer decoder with encoder-decoder attention."""
    decoder = getattr(model, "decoder", None)
    return (
        isinstance(decoder, TransformerDecoderBase)
        and type(decoder).forward is TransformerDecoderBase.forward
        and not decoder.cross_self_attention
        and all(getattr(layer, "encoder_attn", None) is not None for layer in decoder.layers)
    )


def use_stock_name(args) -> None:
    """Has the settings that training will save name the stock architecture, so that stock fairseq loads what
    an `el_` one trained: the parameters are the same."""
    with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
        for name in ("arch", "_name"):
            if str(getattr(args, name, "")).startswith(PREFIX):
                setattr(args, name, getattr(args, name).removeprefix(PREFIX))


def to_el_form(model: nn.Module) -> nn.Module:
    """Turns a stock model into its EL form, in place, and returns it.

    Only classes change: attention layers become the subclasses that generate without a K/V cache, and the
    model an `ELModel`. Parameters stay the same objects under the same names, so optimisers, hooks and state
    dicts go on working. A model that is prepared for inference already has its linear layers packed.
    """
    if not has_el_form(model):
        name = getattr(getattr(model, "args", None), "arch", None) or type(model).__name__
        raise UserError(
            f"{name} has no EL form (there is one for the families transformer and bart); "
            "run it with stock fairseq, that is, without accelerate() or --user-dir fairseq_el"
        )
    model.encoder.__dict__.pop("reorder_encoder_out", None)  # an earlier stock search may have left its own
    for layer in model.encoder.layers:
        specialise(layer.self_attn, FusedSelfAttention)
    if type(model.encoder) in (TransformerEncoder, TransformerEncoderBase):
        model.encoder.__class__ = ELEncoder
    for layer in model.decoder.layers:
        layer.encoder_attn.beam_size = 1
        specialise(layer.encoder_attn, ELAttention)
        specialise(layer.self_attn, HistoryAttention)
    if not is_accelerated(model):
        model.__class__ = el_class_of(type(model))
        if model._is_generation_fast:
            pack(model)
    return model


def specialise(attention: nn.Module, subclass: type) -> None:
    """Subclasses by users keep their own behaviour: only fairseq's own class is replaced."""
    if type(attention) is subclass.__base__:
        attention.__class__ = subclass


def el_class_of(stock_class: type) -> type:
    for el_class in (ELBARTModel, ELTransformerModel):
        if el_class.__bases__[1] is stock_class:
            return el_class
    return type("EL" + stock_class.__name__, (ELModel, stock_class), {})
