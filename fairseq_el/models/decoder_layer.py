"""Decoder layers that take a decoding step in one kernel where they can, and else run as in fairseq."""

from typing import Any

import torch
from fairseq.modules.transformer_layer import TransformerDecoderLayer, TransformerDecoderLayerBase
from torch import Tensor, nn

from fairseq_el.kernels import ops
from fairseq_el.kernels.fused_layer import (
    LayerSpec,
    PrefixSpec,
    decoder_layer,
    describe_linear,
    describe_norm,
    describe_prefix,
    layer_spec,
)
from fairseq_el.kernels.packing import identity
from fairseq_el.models.attention import CachedSelfAttention, ELAttention, PromptAttention, cached_key_values
from fairseq_el.models.caches import CrossAttentionCache, PromptCache, SelfAttentionCache

Result = tuple[Tensor, Tensor | None, list[Tensor | None] | None]


class FusedDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer. A decoding step on a CPU is one kernel once the layer has K and V."""

    runs_as_stock = True

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        *others: Any,
        **options: Any,
    ) -> Result:
        """x: [t, b * x, d]. others: earlier keys and values, which a decoder with our caches doesn't pass."""
        cache = SelfAttentionCache.of(incremental_state)
        if cache is not None and not others and (encoder_out is None) == (self.encoder_attn is None):
            fused = self.fused_step(x, cache, incremental_state)
            if fused is not None:
                return fused, None, None
        return super().forward(x, encoder_out, encoder_padding_mask, incremental_state, *others, **options)

    def fused_step(self, x: Tensor, cache: SelfAttentionCache, incremental_state: dict | None) -> Tensor | None:
        """x: [1, b * x, d]; returns the same, or None if the kernel doesn't support this step."""
        t, rows, d = x.shape
        if t != 1 or x.requires_grad or not ops.supported(x, d):
            return None
        if self not in cache.layer_specs:  # once per batch
            cache.layer_specs[self] = self.describe()
        spec = cache.layer_specs[self]
        if spec is None or rows > spec.max_rows:
            return None
        source = self.source(incremental_state)
        slots = cache.slots_of(self.self_attn, self.self_attn.num_heads, self.self_attn.head_dim, like=x)
        prompt = self.prompt(incremental_state, slots.keys.dtype)
        if source is None or prompt is None or slots.keys.dtype not in ops.CACHE_DTYPES:
            return None
        return decoder_layer(spec, x.contiguous(), slots, prompt, source)

    def source(self, incremental_state: dict | None) -> PrefixSpec | None:
        """K and V of the source; none without encoder-decoder attention, None if they can't be used."""
        if self.encoder_attn is None:
            return PrefixSpec()
        cache = CrossAttentionCache.of(incremental_state)
        if cache is None or cache.wants_weights or cache.padding.span is None:
            return None
        key_values = cached_key_values(self.encoder_attn, cache)
        if key_values is None or key_values[0].dtype not in ops.CACHE_DTYPES:
            return None
        return describe_prefix(key_values, cache.padding.span)

    def prompt(self, incremental_state: dict | None, dtype: torch.dtype) -> PrefixSpec | None:
        """K and V of the prompt; none without a prompt, None if they can't be used."""
        cache = PromptCache.of(incremental_state)
        if cache is None or cache.length() == 0:
            return PrefixSpec()
        key_values = cached_key_values(self.self_attn, cache)
        if key_values is None or cache.padding.span is None or key_values[0].dtype != dtype:
            return None
        return describe_prefix(key_values, cache.padding.span)

    def describe(self) -> LayerSpec | None:
        """What the kernel needs to know, or None if it doesn't support this layer."""
        if not self.is_plain():
            return None
        attention, cross = self.self_attn, self.encoder_attn
        linears = {
            "self_out": describe_linear(attention.out_proj),
            "fc1": describe_linear(self.fc1),
            "fc2": describe_linear(self.fc2),
        }
        if "q_proj" in attention.projects_together:
            linears["query"] = describe_linear(attention.q_proj, attention.k_proj, attention.v_proj)
        else:
            linears["query"] = describe_linear(attention.q_proj)
            linears["key_value"] = describe_linear(attention.k_proj, attention.v_proj)
        norms = {
            "self_norm": describe_norm(self.self_attn_layer_norm),
            "final_norm": describe_norm(self.final_layer_norm),
        }
        if cross is not None:
            linears |= {"cross_query": describe_linear(cross.q_proj), "cross_out": describe_linear(cross.out_proj)}
            norms["cross_norm"] = describe_norm(self.encoder_attn_layer_norm)
        return layer_spec(
            linears, norms, self_heads=attention.num_heads, self_scale=attention.scaling,
            cross_heads=0 if cross is None else cross.num_heads, cross_scale=0 if cross is None else cross.scaling,
            norm_first=self.normalize_before, width=self.embed_dim,
        )  # fmt: skip

    def is_plain(self) -> bool:
        """False with options or parts of the user's that the kernel doesn't have."""
        attention, cross = self.self_attn, self.encoder_attn
        dropouts = (self.dropout_module, self.activation_dropout_module)
        return (
            not self.training
            and type(attention) in (CachedSelfAttention, PromptAttention)
            and (cross is None or (type(cross) is ELAttention and cross.has_el_form() and cross.head_dim % 16 == 0))
            and attention.head_dim % 16 == 0
            and self.activation_fn is identity  # the first linear layer applies it
            and not any(dropout.p > 0 and dropout.apply_during_inference for dropout in dropouts)
            and not any(module._forward_hooks or module._forward_pre_hooks for module in self.children_at_any_depth())
            and all(part is None for part in (self.c_attn, self.attn_ln, self.ffn_layernorm, self.w_resid))
            and not self.cross_self_attention
            and not self.onnx_trace
        )

    def children_at_any_depth(self) -> list[nn.Module]:
        return [module for module in self.modules() if module is not self]


class FusedLegacyDecoderLayer(FusedDecoderLayer, TransformerDecoderLayer):
    """The same for the class that fairseq's models of old configurations have."""


FUSED = {TransformerDecoderLayerBase: FusedDecoderLayer, TransformerDecoderLayer: FusedLegacyDecoderLayer}
