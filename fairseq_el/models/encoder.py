"""The encoder at inference: fused attention, and padding-free (varlen) batches where they pay."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_el.kernels import ops
from fairseq_el.kernels.linear import in_low_precision, project_side_by_side, project_together

CPU_GROUP_TOKENS = 1024
"""Tokens that go through the layers together on a CPU. Enough for matrix kernels to run at full speed. With more, the
allocator returns the large results of a layer to the system, and every use of them begins with page faults, which took
a tenth of the time."""


@dataclass
class VarlenBatch:
    """Replaces a padding mask: the batch is padding-free, sentences are concatenated, and each attends to itself."""

    lengths: list[int]


class FusedSelfAttention(MultiheadAttention):
    """Encoder self-attention that never materialises the weights; its parent for options without such a form."""

    projects_together = ("q_proj", "k_proj", "v_proj")

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | VarlenBatch | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        **options,
    ) -> tuple[Tensor, Tensor | None]:
        """query: [n, b, d], with key_padding_mask [b, n] or None; or [tokens, 1, d] with a `VarlenBatch`."""
        if need_weights or attn_mask is not None or not self.has_fused_form():
            return super().forward(
                query, key, value, key_padding_mask, incremental_state, need_weights, static_kv,
                attn_mask, **options,
            )  # fmt: skip
        if isinstance(key_padding_mask, VarlenBatch):
            projected = project_side_by_side(query.squeeze(1), self.q_proj, self.k_proj, self.v_proj)
            context = ops.varlen_attention(
                projected, key_padding_mask.lengths, self.num_heads, self.scaling, in_low_precision(self.q_proj)
            )
            return self.out_proj(context.unsqueeze(1)), None
        n, b, d = query.shape
        q, k, v = (
            x.view(n, b, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
            for x in project_together(query, self.q_proj, self.k_proj, self.v_proj)
        )  # [b, h, n, d_k]
        visible = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :].bool()
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out_proj(context.permute(2, 0, 1, 3).reshape(n, b, d)), None

    def has_fused_form(self) -> bool:
        return (
            not self.training
            and not (self.dropout_module.p > 0 and self.dropout_module.apply_during_inference)
            and self.bias_k is None
            and not self.add_zero_attn
            and not self.use_xformers
            and not self.onnx_trace
        )


class ELEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder; at inference it leaves padding out where that pays."""

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """src_tokens: [b, n]"""
        real = src_tokens.ne(self.padding_idx)  # [b, n]
        lengths = real.sum(dim=1)
        if return_all_hiddens or not self.varlen_pays(lengths):
            return super().forward_scriptable(
                src_tokens, src_lengths, return_all_hiddens, token_embeddings
            )
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)  # [b, n, d]
        states = x.new_zeros(x.shape)
        layers = list(self.layers)  # once, as in the parent: LayerDrop draws random numbers each time
        for rows in split_by_tokens(lengths.tolist()):
            states[rows][real[rows]] = self.encode_varlen(x[rows][real[rows]], lengths[rows].tolist(), layers)
        return {
            "encoder_out": [states.transpose(0, 1)],  # [n, b, d]
            "encoder_padding_mask": [~real],
            "encoder_embedding": [embedding],
            "encoder_states": [],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [lengths.to(torch.int32).reshape(-1, 1)],
        }

    def encode_varlen(self, x: Tensor, lengths: list[int], layers: list[nn.Module]) -> Tensor:
        """[tokens, d] -> [tokens, d]; lengths: tokens of each sentence."""
        x, batch = x.unsqueeze(1), VarlenBatch(lengths)
        for layer in layers:
            x = layer(x, encoder_padding_mask=batch)
            x = x[0] if isinstance(x, tuple) else x
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x.squeeze(1)

    def varlen_pays(self, lengths: Tensor) -> bool:
        """lengths: [b]"""
        return not self.training and all(
            type(layer.self_attn) is FusedSelfAttention
            and layer.self_attn.has_fused_form()
            and ops.varlen_pays(lengths, layer.final_layer_norm.weight, layer.self_attn.head_dim)
            for layer in all_layers(self.layers)
        )


def all_layers(layers: nn.ModuleList) -> list[Any]:
    """Without iterating: fairseq's LayerDrop draws random numbers then, even at inference, so that sampling would find
    something else than in stock fairseq."""
    return [layers[index] for index in range(len(layers))]


def split_by_tokens(lengths: list[int]) -> list[slice]:
    """Groups of neighbouring sentences that go through the layers together."""
    groups, start, tokens = [], 0, 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > CPU_GROUP_TOKENS:
            groups.append(slice(start, row))
            start, tokens = row, 0
        tokens += length
    return [*groups, slice(start, len(lengths))]
