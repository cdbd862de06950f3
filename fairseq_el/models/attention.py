"""The mathematics of attention during generation; no state of its own.

Notation: b sentences, x beams each, h heads of width d_k, source length n, model width d.
H is the encoder output, one tensor [b, n, d] for all heads, layers and beams of a batch.

EL-attention (equations 4 to 9 of the paper) never builds keys and values. With q_i the i-th head's query,

    scores_i = q_i K_i^T = (q_i W_i^K) H^T + q_i . b_i^K        out = sum_i (p_i H) (W_i^V)^T W_i^O + ...

so both projections move to the one-token side. The key bias adds the same number to every position of a
head, which softmax ignores; the value bias is added once, because each row of p sums to one.
"""

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_el.kernels import ops
from fairseq_el.kernels.linear import project_together
from fairseq_el.models.caches import BeamHistory, PromptMemory, SourceMemory


def expand_query(query: Tensor, key_weight: Tensor) -> Tensor:
    """Moves the key projection to the query side.

    query: [b, r, h, d_k] (r rows a sentence, scaled), key_weight: [h * d_k, d]; returns [b, h * r, d].
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


def attend_with_expanded(
    queries: Tensor, states: Tensor, padding_mask: Tensor | None, span: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """The part of EL-attention that goes over the source: all rows of a sentence read its H together.

    queries: [b, rows, d], expanded; states: [b, n, d]; returns [b, rows, d] and weights [b, rows, n]. With the span of
    each sentence, [b] each, our kernel may do it, which has no weights to return and overwrites the queries.
    """
    fits = queries.size(-1) == states.size(-1)  # else torch says what is wrong
    if span is not None and fits and ops.serves_states(queries):
        return ops.attend_states_(queries, states, span), None
    scores = torch.bmm(queries, states.transpose(1, 2))
    weights = softmax_over_source(scores, padding_mask)
    return torch.bmm(weights.to(states.dtype), states), weights


def softmax_over_source(scores: Tensor, padding_mask: Tensor | None) -> Tensor:
    """scores: [b, rows, n], padding_mask: [b, n] with True at padding. In float32 or better."""
    if padding_mask is not None:
        scores = scores.masked_fill(padding_mask.unsqueeze(1), float("-inf"))
    return F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[b, r, h * d_k] -> [b, h, r, d_k]"""
    return x.view(x.size(0), x.size(1), num_heads, -1).transpose(1, 2)


class ELAttention(MultiheadAttention):
    """Encoder-decoder attention that reads the encoder output itself while generating.

    A stock state dict loads key for key. Outside generation (training, scoring, teacher forcing) and for
    options that EL-attention has no form for, it is its parent.
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

        Unlike the parent, takes a key with fewer rows than the query: x is what the shapes say.
        """
        generating = incremental_state is not None and static_kv and key is not None
        if not (generating and attn_mask is None and not before_softmax and self.has_el_form()):
            return super().forward(
                query, key, value, key_padding_mask, incremental_state, need_weights, static_kv,
                attn_mask, before_softmax, need_head_weights,
            )  # fmt: skip
        t, rows, d = query.shape
        b = key.size(1)
        # [t, b * x, d] -> [b, x * t, d]: the rows of one sentence are neighbours
        q = self.q_proj(query).view(t, b, rows // b, d).permute(1, 2, 0, 3).reshape(b, -1, d)
        states = key.transpose(0, 1)  # [b, n, d_source]

        source = SourceMemory.of(incremental_state)
        if source is not None and not source.wants_weights:
            need_weights = need_head_weights = False
        needs_weights = need_weights or need_head_weights
        key_values = source.key_values(self) if source else None
        span = source.span if source and not needs_weights else None  # for our kernels, which return no weights
        if key_values is None:
            context, weights = self.attend_to_states(q, states, key_padding_mask, span)
        elif span is not None and ops.serves(q, self.head_dim):
            context = ops.attend(q, self.num_heads, self.scaling, shared=key_values, span=span)
        else:
            context, weights = self.attend_to_key_values(q, *key_values, key_padding_mask)

        # [b, x * t, d] -> [t, b * x, d]
        out = self.out_proj(context.view(b, rows // b, t, d).permute(2, 0, 1, 3).reshape(t, rows, d))
        if not needs_weights:
            return out, None
        # [b, h, x * t, n] -> [h, b * x, t, n]
        weights = weights.transpose(0, 1).reshape(self.num_heads, rows, t, -1)
        return out, weights if need_head_weights else weights.mean(dim=0)

    def attend_to_states(
        self, q: Tensor, states: Tensor, padding_mask: Tensor | None, span: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """EL-attention. q: [b, r, d], states: [b, n, d_source]; returns [b, r, d] and weights [b, h, r, n], or, with a
        span, perhaps none."""
        b, r, _ = q.shape
        q = (q * self.scaling).view(b, r, self.num_heads, self.head_dim)
        # [b, h * r, d_source] and [b, h * r, n]
        expanded = expand_query(q, self.k_proj.weight)
        context, weights = attend_with_expanded(expanded, states, padding_mask, span)
        context = collapse_context(context, self.v_proj.weight, self.num_heads)
        if self.v_proj.bias is not None:
            context = context + self.v_proj.bias
        return context, None if weights is None else weights.view(b, self.num_heads, r, -1)

    def attend_to_key_values(
        self, q: Tensor, keys: Tensor, values: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Multi-head attention on K and V shared by the beams.

        q: [b, r, d], keys and values: [b, h, d_k, n]; returns [b, r, d] and weights [b, h, r, n].
        """
        b, r, d = q.shape
        n = keys.size(3)
        q = split_heads(q * self.scaling, self.num_heads).reshape(-1, r, self.head_dim)  # [b * h, r, d_k]
        scores = torch.bmm(q, keys.view(-1, self.head_dim, n))  # [b * h, r, n]
        weights = softmax_over_source(scores.view(b, -1, n), padding_mask)
        context = torch.bmm(weights.view(-1, r, n).to(q.dtype), values.view(-1, self.head_dim, n).mT)
        context = context.view(b, self.num_heads, r, -1).transpose(1, 2).reshape(b, r, d)
        return context, weights.view(b, self.num_heads, r, n)

    def build_key_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What EL-attention does without: K and V of H [b, n, d_source], as [b, h, d_k, n] each.

        W H^T instead of H W^T: the products then lie by head as they come, with no copy to sort them, and a
        few queries read them along their rows. The key bias is left out, for softmax ignores it.
        """
        b, n, _ = states.shape
        keys, values = (
            torch.bmm(weight.expand(b, -1, -1), states.mT) for weight in (self.k_proj.weight, self.v_proj.weight)
        )
        if self.v_proj.bias is not None:
            values += self.v_proj.bias.unsqueeze(1)
        shape = (b, self.num_heads, self.head_dim, n)
        return keys.view(shape), values.view(shape)

    def set_beam_size(self, beam_size: int) -> None:
        """Nothing to set: a beam size kept here would outlive the search that set it."""

    def has_el_form(self) -> bool:
        """False for options whose meaning EL-attention can't keep; the parent serves those."""
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


class HistoryAttention(MultiheadAttention):
    """Decoder self-attention over a `BeamHistory`, which keeps every slot where it was written.

    Without a history in the incremental state (stock generators, training) it is its parent.
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
        """query: [1, b * x, d]. The history knows which tokens are padding, so key_padding_mask is not needed."""
        history = BeamHistory.of(incremental_state)
        if history is None:
            return super().forward(
                query, key, value, key_padding_mask, incremental_state, need_weights, **options
            )
        t, rows, d = query.shape
        x, h = history.beam_size, self.num_heads
        q, k, v = (projected.view(rows // x, x, d) for projected in self.project(query))
        keys, values, hidden = history.append(self, split_heads(k, h), split_heads(v, h))
        prompt = PromptMemory.of(incremental_state)
        if prompt is not None and prompt.length() == 0:
            prompt = None
        shared = prompt.key_values(self) if prompt else None
        if ops.serves(q, self.head_dim) and (prompt is None or shared is not None):
            span = prompt.span if prompt else None
            context = ops.attend(
                q, h, self.scaling, shared, span, slots=(keys, values), hidden=hidden, used=history.used
            )
        else:
            used = history.used
            slots = keys[:, :, :used], values[:, :, :used], hidden[:, :, :used]
            context = self.attend_to_slots(q, *slots, prompt)
        return self.out_proj(context.reshape(t, rows, d)), None

    def project(self, x: Tensor) -> list[Tensor]:
        return project_together(x, self.q_proj, self.k_proj, self.v_proj)

    def attend_to_slots(
        self, q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, prompt: PromptMemory | None
    ) -> Tensor:
        """q: [b, x, d], keys and values: [b, h, slots, d_k], hidden: [b, x, slots]; returns [b, x, d].

        With a prompt, the weights of both parts come from one softmax, and the results are added.
        """
        b, x, d = q.shape
        h, slots = self.num_heads, keys.size(2)
        q = split_heads(q * self.scaling, h)  # [b, h, x, d_k]
        # three dimensions: bmm then reads the slots where they lie, matmul would copy them
        scores = torch.bmm(q.reshape(b * h, x, -1), keys.flatten(0, 1).mT).view(b, h, x, slots)
        scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        if prompt is not None:
            scores = torch.cat([scores, self.score_prompt(q, prompt)], dim=-1)  # [b, h, x, slots + n]
        weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        own = weights[..., :slots].reshape(b * h, x, slots)
        context = torch.bmm(own, values.flatten(0, 1)).view(b, h, x, -1)
        context = context.transpose(1, 2).reshape(b, x, d)
        return context if prompt is None else context + self.mix_prompt(weights[..., slots:], prompt)


class PromptAttention(HistoryAttention):
    """Self-attention of a language model: EL-attention to the prompt, multi-head to what is generated."""

    projects_together = ("k_proj", "v_proj")
    applies_weights = ("k_proj", "v_proj")

    def forward(self, query: Tensor, *args, **options) -> tuple[Tensor, Tensor | None]:
        prompt = PromptMemory.being_read()
        if prompt is None:
            return super().forward(query, *args, **options)
        return self.read(query, prompt), None

    def project(self, x: Tensor) -> list[Tensor]:
        return [self.q_proj(x), *project_together(x, self.k_proj, self.v_proj)]

    def read(self, query: Tensor, prompt: PromptMemory) -> Tensor:
        """Causal attention among the tokens of prompts, which are padded behind: [n, b, d] to [n, b, d]."""
        n, b, d = query.shape
        q, k, v = (
            x.view(n, b, self.num_heads, self.head_dim).permute(1, 2, 0, 3) for x in self.project(query)
        )  # [b, h, n, d_k]
        prompt.record(self, query.transpose(0, 1), k, v)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(context.permute(2, 0, 1, 3).reshape(n, b, d))

    def score_prompt(self, q: Tensor, prompt: PromptMemory) -> Tensor:
        """q: [b, h, x, d_k], scaled; returns [b, h, x, n]."""
        b, h, x, d_k = q.shape
        key_values = prompt.built.get(self)
        if key_values is not None:
            scores = torch.bmm(q.reshape(b * h, x, d_k), key_values[0].flatten(0, 1)).view(b, h, x, -1)
        else:
            expanded = expand_query(q.transpose(1, 2), self.k_proj.weight)  # [b, h * x, d]
            scores = torch.bmm(expanded, prompt.states_of(self).mT).view(b, h, x, -1)
            if self.k_proj.bias is not None:  # not the same for prompt and slots: softmax doesn't ignore it
                scores = scores + (q * self.k_proj.bias.view(h, 1, d_k)).sum(-1, keepdim=True)
        return scores.masked_fill(prompt.padding_mask[:, None, None], float("-inf"))

    def mix_prompt(self, weights: Tensor, prompt: PromptMemory) -> Tensor:
        """weights: [b, h, x, n], which need not add up to one; returns [b, x, d]."""
        b, h, x, n = weights.shape
        key_values = prompt.built.get(self)
        if key_values is not None:
            context = torch.bmm(weights.reshape(b * h, x, n), key_values[1].flatten(0, 1).mT)
            return context.view(b, h, x, -1).transpose(1, 2).reshape(b, x, -1)
        context = torch.bmm(weights.reshape(b, h * x, n), prompt.states_of(self))  # [b, h * x, d]
        context = collapse_context(context, self.v_proj.weight, h)
        if self.v_proj.bias is None:
            return context
        share = weights.sum(-1).transpose(1, 2).unsqueeze(-1)  # [b, x, h, 1]
        return context + (share * self.v_proj.bias.view(h, -1)).reshape(b, x, -1)

    def build_key_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the prompts [b, n, d], as [b, h, d_k, n] each; with biases, as the slots have them."""
        b, n, _ = states.shape
        keys, values = (
            x.view(b, n, self.num_heads, -1).permute(0, 2, 3, 1).contiguous()
            for x in project_together(states, self.k_proj, self.v_proj)
        )
        return keys, values
