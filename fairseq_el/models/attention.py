"""Attention during generation. The layers keep no state: caches reach them through `incremental_state`.

Notation: b sentences, x beams per sentence, h heads of width d_k, source length n, model width d. H is the encoder
output, one tensor [b, n, d] for all heads, layers and beams of a batch.

EL-attention (equations 4 to 9 of the paper) never builds keys and values. With q_i the query of the i-th head,

    scores_i = q_i K_i^T = (q_i W_i^K) H^T + q_i . b_i^K        out = sum_i (p_i H) (W_i^V)^T W_i^O + ...

so both projections move to the one-token side. The key bias adds the same number to all positions of a head, which
softmax ignores. The value bias is added once, because each row of p sums to one.
"""

import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_el.kernels import ops
from fairseq_el.kernels.fallback import mask_prefix, score_slots, softmax, split_heads, sum_slots
from fairseq_el.kernels.formats import KeyValues, Padding, Slots
from fairseq_el.kernels.linear import PackedLinear, project_together, unpacked_weight
from fairseq_el.kernels.triton.library import kernels_for
from fairseq_el.models.caches import (
    CrossAttentionCache,
    Prefill,
    PromptCache,
    SelfAttentionCache,
    SharedPrefixCache,
)
from fairseq_el.models.encoder import split_by_tokens


def expand_query(query: Tensor, key_weight: Tensor) -> Tensor:
    """Moves the key projection to the query side.

    query: [b, r, h, d_k] (r rows per sentence, scaled), key_weight: [h * d_k, d]; returns [b, h * r, d].
    """
    b, r, h, d_k = query.shape
    by_head = query.permute(2, 0, 1, 3).reshape(h, b * r, d_k)
    expanded = torch.bmm(by_head, key_weight.view(h, d_k, -1))  # [h, b * r, d]
    return expanded.view(h, b, r, -1).transpose(0, 1).reshape(b, h * r, -1)


def collapse_context(context: Tensor, value_weight: Tensor, num_heads: int) -> Tensor:
    """Applies the value projection after the weighted sum over H.

    context: [b, h * r, d], value_weight: [h * d_k, d]; returns [b, r, h * d_k].
    """
    b, rows, d = context.shape
    h, r = num_heads, rows // num_heads
    by_head = context.view(b, h, r, d).transpose(0, 1).reshape(h, b * r, d)
    heads = torch.bmm(by_head, value_weight.view(h, -1, d).transpose(1, 2))  # [h, b * r, d_k]
    return heads.view(h, b, r, -1).permute(1, 2, 0, 3).reshape(b, r, -1)


# The same for a GPU, whose GEMM reads and writes strided memory: no copies, and so fewer launches. Rows are ordered by
# query, then by head.


def expand_query_in_place(query: Tensor, key_weight: Tensor, num_heads: int, scale: float) -> Tensor:
    """query: [b, r, h * d_k], not scaled, key_weight: [h * d_k, d]; returns [b, r * h, d]."""
    (b, r, _), (h, d) = query.shape, (num_heads, key_weight.size(1))
    expanded = query.new_empty(b, r * h, d)
    by_head = query.reshape(b * r, h, -1).transpose(0, 1)  # [h, b * r, d_k]
    out = expanded.view(b * r, h, d).transpose(0, 1)  # [h, b * r, d]
    torch.baddbmm(out, by_head, key_weight.view(h, -1, d), beta=0, alpha=scale, out=out)
    return expanded


def collapse_context_in_place(context: Tensor, value_weight: Tensor, num_heads: int) -> Tensor:
    """context: [b, r * h, d], value_weight: [h * d_k, d]; returns [b, r, h * d_k]."""
    b, rows, d = context.shape
    h, r = num_heads, rows // num_heads
    heads = context.new_empty(b, r, value_weight.size(0))
    out = heads.view(b * r, h, -1).transpose(0, 1)  # [h, b * r, d_k]
    torch.bmm(context.view(b * r, h, d).transpose(0, 1), value_weight.view(h, -1, d).mT, out=out)
    return heads


def in_dtype_of(query: Tensor, x: Tensor | None) -> Tensor | None:
    """Caches may be in a lower precision than what is computed."""
    return None if x is None else x.to(query.dtype)


def as_computed(states: Tensor) -> Tensor:
    """Cached states as linear layers take them: on a CPU in single precision."""
    return states.float() if states.device.type == "cpu" and states.dtype == torch.float16 else states


def build_in_groups(
    attention: MultiheadAttention, states: Tensor, project: Callable[[Tensor], Iterable[Tensor]]
) -> KeyValues:
    """K and V of states [b, n, d], [b, h, d_k, n] each, in the precision of the states. `project` computes both in
    the order [b', n, h * d_k], for a few sentences at a time on a CPU: all at once would take more memory than K and V
    do in half precision."""
    b, n, _ = states.shape
    groups = split_by_tokens([n] * b) if states.device.type == "cpu" else [slice(0, b)]
    shape = (b, attention.num_heads, attention.head_dim, n)
    key_values = states.new_empty(shape), states.new_empty(shape)
    for group in groups:
        for projected, out in zip(project(as_computed(states[group])), key_values):
            ops.transpose_heads(projected, out[group])
    return key_values


def cached_key_values(attention: "ELAttention | PromptAttention", cache: SharedPrefixCache) -> KeyValues | None:
    """K and V of a layer, [b, h, d_k, n] each, built now if the cache's policy says so; None for EL-attention."""
    if cache.should_build(attention):
        start = time.perf_counter()
        cache.store(attention, attention.build_key_values(cache.states_of(attention)))
        cache.build_seconds += time.perf_counter() - start
    return cache.key_values.get(attention)


class ELAttention(MultiheadAttention):
    """Encoder-decoder attention that reads the encoder output directly while generating.

    A stock state dict loads key for key. Outside generation (training, scoring, teacher forcing), and for options
    without an EL form, it behaves as its parent.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query: [t, b * x, d], key: [n, b, d_source], key_padding_mask: [b, n].

        Unlike the parent, takes a key with fewer rows than the query; x follows from the shapes.
        """
        el_form = incremental_state is not None and static_kv and attn_mask is None and not before_softmax
        if not (el_form and key is not None and self.has_el_form()):
            key, value = in_dtype_of(query, key), in_dtype_of(query, value)
            return super().forward(
                query, key, value, key_padding_mask, incremental_state, need_weights, static_kv,
                attn_mask, before_softmax, need_head_weights,
            )  # fmt: skip
        t, rows, d = query.shape
        b = key.size(1)
        # [t, b * x, d] -> [b, x * t, d]: the rows of a sentence are neighbours
        q = self.q_proj(query).view(t, b, rows // b, d).permute(1, 2, 0, 3).reshape(b, -1, d)

        cache = CrossAttentionCache.of(incremental_state)
        key_values, padding = None, Padding(key_padding_mask)
        if cache is not None:
            key_values, padding = cached_key_values(self, cache), cache.padding
            need_weights = need_weights and cache.wants_weights
            need_head_weights = need_head_weights and cache.wants_weights
        needed = bool(need_weights or need_head_weights)  # fairseq passes None, too
        if key_values is None:
            context, weights = self.attend_to_states(q, key.transpose(0, 1), padding, needed)
        else:
            context, weights = ops.decoder_attention(
                q, self.num_heads, self.scaling, key_values, padding, need_weights=needed
            )

        # [b, x * t, d] -> [t, b * x, d]
        out = self.out_proj(context.view(b, rows // b, t, d).permute(2, 0, 1, 3).reshape(t, rows, d))
        if weights is None:
            return out, None
        # [b, h, x * t, n] -> [h, b * x, t, n]
        weights = weights.transpose(0, 1).reshape(self.num_heads, rows, t, -1)
        return out, weights if need_head_weights else weights.mean(dim=0)

    def attend_to_states(
        self, q: Tensor, states: Tensor, padding: Padding, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """EL-attention. q: [b, r, d], states: [b, n, d_source]; returns [b, r, d] and, if needed, weights
        [b, h, r, n]."""
        b, r, _ = q.shape
        if q.is_cuda and not need_weights and not q.requires_grad:
            expanded = expand_query_in_place(q, self.k_proj.weight, self.num_heads, self.scaling)
            context, _ = ops.el_attention(expanded, states, padding)
            context = collapse_context_in_place(context, self.v_proj.weight, self.num_heads)
            return context if self.v_proj.bias is None else context.add_(self.v_proj.bias), None
        q = (q * self.scaling).view(b, r, self.num_heads, self.head_dim)
        expanded = expand_query(q, unpacked_weight(self.k_proj))  # [b, h * r, d_source]
        context, weights = ops.el_attention(expanded, states, padding, need_weights)
        context = collapse_context(context, unpacked_weight(self.v_proj), self.num_heads)
        if self.v_proj.bias is not None:
            context = context + self.v_proj.bias
        return context, None if weights is None else weights.view(b, self.num_heads, r, -1)

    def build_key_values(self, states: Tensor) -> KeyValues:
        """K and V of H [b, n, d_source], [b, h, d_k, n] each: what EL-attention does without.

        Computes W H^T instead of H W^T: the result is ordered by head without a copy, and a few queries read it along
        its rows. Leaves out the key bias, which softmax ignores. In low precision K and V are as the states are.
        """
        b, n, _ = states.shape
        if isinstance(self.k_proj, PackedLinear):
            return build_in_groups(self, states, lambda x: (self.k_proj(x), self.v_proj(x)))
        keys, values = (
            torch.bmm(weight.expand(b, -1, -1), states.mT) for weight in (self.k_proj.weight, self.v_proj.weight)
        )
        if self.v_proj.bias is not None:
            values += self.v_proj.bias.unsqueeze(1)
        shape = (b, self.num_heads, self.head_dim, n)
        return keys.view(shape), values.view(shape)

    def set_beam_size(self, beam_size: int) -> None:
        """Does nothing: a beam size stored here would outlive the search that set it."""

    def has_el_form(self) -> bool:
        """False for options that EL-attention doesn't support; the parent handles them."""
        dropout = self.dropout_module
        drops = dropout.p > 0 and (self.training or dropout.apply_during_inference)
        return (
            self.encoder_decoder_attention
            and not self.training
            and not drops
            and self.bias_k is None
            and not self.add_zero_attn
            and not self.use_xformers
            and not self.onnx_trace
        )


class CachedSelfAttention(MultiheadAttention):
    """Decoder self-attention with a `SelfAttentionCache`, whose slots never move.

    Without a cache in the incremental state (stock generators, training) it behaves as its parent.
    """

    projects_together: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        **options,
    ) -> tuple[Tensor, Tensor | None]:
        """query: [1, b * x, d]. Ignores key_padding_mask: the cache knows which tokens are padding."""
        cache = SelfAttentionCache.of(incremental_state)
        if cache is None:
            return super().forward(query, key, value, key_padding_mask, incremental_state, need_weights, **options)
        t, rows, d = query.shape
        x, h = cache.beam_size, self.num_heads
        q, k, v = (projected.view(rows // x, x, d) for projected in self.project(query))
        slots = cache.append(self, split_heads(k, h), split_heads(v, h))
        context = self.attend(q, slots, incremental_state)
        return self.out_proj(context.reshape(t, rows, d)), None

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values."""
        return project_together(x, self.q_proj, self.k_proj, self.v_proj)

    def attend(self, q: Tensor, slots: Slots, incremental_state: dict | None) -> Tensor:
        """q: [b, x, d]; returns [b, x, d]."""
        return ops.decoder_attention(q, self.num_heads, self.scaling, slots=slots)[0]


class PromptAttention(CachedSelfAttention):
    """Self-attention of a language model: EL-attention to the prompt, multi-head attention to generated tokens."""

    projects_together = ("k_proj", "v_proj")
    applies_weights = ("k_proj", "v_proj")  # EL-attention reads them at each step

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        **options,
    ) -> tuple[Tensor, Tensor | None]:
        prefill = Prefill.of(incremental_state)
        if prefill is not None:
            return self.prefill(prefill.by_position(query), prefill).view(query.shape), None
        return super().forward(query, key, value, key_padding_mask, incremental_state, need_weights, **options)

    def project(self, x: Tensor) -> list[Tensor]:
        return [self.q_proj(x), *project_together(x, self.k_proj, self.v_proj)]

    def prefill(self, query: Tensor, prefill: Prefill) -> Tensor:
        """Causal attention among the tokens of each prompt; prompts are padded behind. [n, b, d] -> [n, b, d]"""
        n, b, d = query.shape
        q, k, v = (
            x.view(n, b, self.num_heads, self.head_dim).permute(1, 2, 0, 3) for x in self.project(query)
        )  # [b, h, n, d_k]
        prefill.cache.record(self, prefill.sentences, query.transpose(0, 1), k, v)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(context.permute(2, 0, 1, 3).reshape(n, b, d))

    def attend(self, q: Tensor, slots: Slots, incremental_state: dict | None) -> Tensor:
        cache = PromptCache.of(incremental_state)
        if cache is None or cache.length() == 0:
            return super().attend(q, slots, incremental_state)
        key_values = cached_key_values(self, cache)
        if key_values is None:
            return self.attend_to_states(q, slots, cache.states_of(self), cache.padding)
        return ops.decoder_attention(q, self.num_heads, self.scaling, key_values, cache.padding, slots)[0]

    def attend_to_states(self, q: Tensor, slots: Slots, states: Tensor, padding: Padding) -> Tensor:
        """EL-attention to the prompt and multi-head attention to the slots, under one softmax.

        q: [b, x, d], states: [b, n, d]; returns [b, x, d].
        """
        triton, span = kernels_for(q), padding.span
        if triton is not None and span is not None and triton.supports_states(q.dtype, states.size(2)):
            expanded = expand_query_in_place(q, self.k_proj.weight, self.num_heads, self.scaling)
            context, lse = triton.el_attention(expanded, states, span)
            context = collapse_context_in_place(context, self.v_proj.weight, self.num_heads)
            biases = None if self.k_proj.bias is None else (self.k_proj.bias, self.v_proj.bias)
            return triton.decoder_attention(
                q, self.num_heads, self.scaling, slots=slots, prompt=(context, lse), biases=biases
            )
        slots = slots.written()
        q = split_heads(q * self.scaling, self.num_heads)  # [b, h, x, d_k]
        scores = torch.cat([score_slots(q, slots), mask_prefix(self.score_states(q, states), padding.mask)], dim=-1)
        weights = softmax(scores).to(q.dtype)  # [b, h, x, used + n]
        return sum_slots(weights[..., : slots.used], slots) + self.sum_states(weights[..., slots.used :], states)

    def score_states(self, q: Tensor, states: Tensor) -> Tensor:
        """q: [b, h, x, d_k], scaled, states: [b, n, d]; returns [b, h, x, n]."""
        b, h, x, d_k = q.shape
        expanded = expand_query(q.transpose(1, 2), unpacked_weight(self.k_proj))  # [b, h * x, d]
        scores = torch.bmm(expanded, states.mT.to(q.dtype)).view(b, h, x, -1)
        if self.k_proj.bias is None:
            return scores
        # the scores of slots contain the bias, so softmax doesn't ignore it here
        return scores + (q * self.k_proj.bias.view(h, 1, d_k)).sum(-1, keepdim=True)

    def sum_states(self, weights: Tensor, states: Tensor) -> Tensor:
        """weights: [b, h, x, n], whose rows need not sum to one, states: [b, n, d]; returns [b, x, d]."""
        b, h, x, n = weights.shape
        context = torch.bmm(weights.reshape(b, h * x, n), states.to(weights.dtype))  # [b, h * x, d]
        context = collapse_context(context, unpacked_weight(self.v_proj), h)
        if self.v_proj.bias is None:
            return context
        share = weights.sum(-1).transpose(1, 2).unsqueeze(-1)  # [b, x, h, 1]
        return context + (share * self.v_proj.bias.view(h, -1)).reshape(b, x, -1)

    def build_key_values(self, states: Tensor) -> KeyValues:
        """K and V of prompts [b, n, d], [b, h, d_k, n] each; with biases, as in the slots."""
        return build_in_groups(self, states, lambda x: project_together(x, self.k_proj, self.v_proj))
