"""The encoder at inference: fused attention, ours or torch's, and no work on padding."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_el.kernels import ops
from fairseq_el.kernels.linear import project_side_by_side, project_together

SHORT_SENTENCE = 48
"""Mean tokens a sentence below which, without our kernel, a call of attention for each costs more than padding does."""

CPU_GROUP_TOKENS = 1024
"""Tokens that go through a CPU's encoder together. Enough for matrix kernels to run at full speed; beyond, the
results of a layer are so large that the allocator hands them back to the system and every use of one begins with
page faults, which took a tenth of the time."""


@dataclass
class Joined:
    """A mask in short: the sentences of a batch stand one after the other, each attends to itself alone."""

    lengths: list[int]


class FusedSelfAttention(MultiheadAttention):
    """Encoder self-attention that never holds all weights of a head; its parent where that has no form."""

    projects_together = ("q_proj", "k_proj", "v_proj")

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | Joined | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        **options,
    ) -> tuple[Tensor, Tensor | None]:
        """query: [n, b, d], with key_padding_mask [b, n] or None; or [tokens of all sentences, 1, d], `Joined`."""
        if need_weights or attn_mask is not None or not self.has_fused_form():
            return super().forward(
                query, key, value, key_padding_mask, incremental_state, need_weights, static_kv,
                attn_mask, **options,
            )  # fmt: skip
        if isinstance(key_padding_mask, Joined) and ops.serves(query, self.head_dim):
            projected = project_side_by_side(query.squeeze(1), self.q_proj, self.k_proj, self.v_proj)
            context = ops.attend_sentences(projected, key_padding_mask.lengths, self.num_heads, self.scaling)
            return self.out_proj(context.unsqueeze(1)), None
        n, b, d = query.shape
        q, k, v = (
            x.view(n, b, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
            for x in project_together(query, self.q_proj, self.k_proj, self.v_proj)
        )  # [b, h, n, d_k]
        if isinstance(key_padding_mask, Joined):
            sentences = zip(*(x.split(key_padding_mask.lengths, dim=2) for x in (q, k, v)))
            context = torch.cat([F.scaled_dot_product_attention(*s) for s in sentences], dim=2)
        else:
            seen = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :].bool()
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
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
    """fairseq's Transformer encoder, which at inference leaves padding out where that pays."""

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
        if return_all_hiddens or not self.joining_pays(lengths):
            return super().forward_scriptable(
                src_tokens, src_lengths, return_all_hiddens, token_embeddings
            )
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)  # [b, n, d]
        states = x.new_zeros(x.shape)
        layers = list(self.layers)  # once, as in stock: see `all_layers`
        for rows in groups(lengths.tolist()):
            states[rows][real[rows]] = self.encode_joined(layers, x[rows][real[rows]], lengths[rows].tolist())
        return {
            "encoder_out": [states.transpose(0, 1)],  # [n, b, d]
            "encoder_padding_mask": [~real],
            "encoder_embedding": [embedding],
            "encoder_states": [],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [lengths.to(torch.int32).reshape(-1, 1)],
        }

    def encode_joined(self, layers: list[nn.Module], x: Tensor, lengths: list[int]) -> Tensor:
        """x: [tokens of all sentences, d]"""
        x = x.unsqueeze(1)
        sentences = Joined(lengths)
        for layer in layers:
            x = layer(x, encoder_padding_mask=sentences)
            x = x[0] if isinstance(x, tuple) else x
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x.squeeze(1)

    def joining_pays(self, lengths: Tensor) -> bool:
        """On a CPU, where our kernel takes all sentences in one call, or they are long enough for a call each; on a
        GPU launches would cost more."""
        if self.training or lengths.device.type != "cpu":
            return False
        layers = all_layers(self.layers)
        attentions = [layer.self_attn for layer in layers]
        if not all(type(a) is FusedSelfAttention and a.has_fused_form() for a in attentions):
            return False
        served = (ops.serves(layer.final_layer_norm.weight, layer.self_attn.head_dim) for layer in layers)
        return int(lengths.sum()) >= SHORT_SENTENCE * lengths.numel() or all(served)


def all_layers(layers: nn.ModuleList) -> list[Any]:
    """To look at. Iterating over layers with layerdrop draws random numbers, also at inference, and leaves some out
    while training; and every draw that stock doesn't make changes what sampling draws next."""
    return list(nn.ModuleList.__iter__(layers))


def groups(lengths: list[int]) -> list[slice]:
    """Neighbouring sentences that go through the layers together."""
    found, start, tokens = [], 0, 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > CPU_GROUP_TOKENS:
            found.append(slice(start, row))
            start, tokens = row, 0
        tokens += length
    return [*found, slice(start, len(lengths))]
