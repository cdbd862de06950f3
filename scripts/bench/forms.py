"""One layer's encoder-decoder attention in its forms: as whole steps, and in three groups of operations.

The groups are those of the paper's Table 1: building K and V, building the query (with the output's
projection), and attention itself. The multi-head forms differ in who owns K and V: each beam its own copy, as
in fairseq 0.9, the paper's baseline, or all beams of a sentence one, as in fairseq 0.12.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_el.kernels import fallback
from fairseq_el.models.attention import ELAttention, collapse_context, expand_query
from fairseq_el.models.caches import CrossAttentionCache
from fairseq_el.models.costs import Cost, Shape
from fairseq_el.models.policy import AttentionPolicy

Work = Callable[[], object]
SEED = 20210

GROUPS = {
    "build": "1 build K and V",
    "project": "2 build query, project output",
    "attend": "3 calculate attention",
}
FORMS = {
    "no-cache": "multi-head, no cache",
    "copied": "multi-head, cache copied per beam",
    "shared": "multi-head, cache shared by beams",
    "shared-kernel": "multi-head, cache shared by beams, fairseq_el's kernel",
    "el": "EL-attention",
}
# What each form does in a step. With a cache, K and V were built in the first step.
GROUPS_OF = {
    "no-cache": ["build copied", "project multi-head", "attend copied"],
    "copied": ["project multi-head", "attend copied"],
    "shared": ["project multi-head", "attend shared"],
    "shared-kernel": ["project multi-head", "attend shared"],
    "el": ["project el", "attend el"],
}


@dataclass(frozen=True)
class Layer:
    """Random weights, the same in stock fairseq's class and in ours, and what they are applied to."""

    shape: Shape
    stock: MultiheadAttention
    ours: ELAttention
    states: Tensor  # [b, n, d]
    query: Tensor  # [1, b * x, d]

    @classmethod
    def random(cls, shape: Shape) -> "Layer":
        torch.manual_seed(SEED)
        stock = MultiheadAttention(shape.width, shape.heads, encoder_decoder_attention=True).eval()
        ours = ELAttention(shape.width, shape.heads, encoder_decoder_attention=True).eval()
        ours.load_state_dict(stock.state_dict())
        states = torch.randn(shape.batch, shape.length, shape.width)
        query = torch.randn(1, shape.batch * shape.beam, shape.width)
        return cls(shape, stock, ours, states, query)

    def stock_key(self, copied: bool) -> Tensor:
        """H as stock fairseq has it: [n, b, d], or [n, b * x, d] where each beam has its own."""
        states = self.states.repeat_interleave(self.shape.beam, dim=0) if copied else self.states
        return states.transpose(0, 1).contiguous()


def whole_steps(shape: Shape) -> dict[str, Work]:
    """A decoding step's attention in each form; all compute the same, [1, b * x, d]."""
    layer = Layer.random(shape)
    copies = layer.stock_key(copied=True)
    return {
        "no-cache": lambda: layer.stock(layer.query, copies, copies, need_weights=False)[0],
        "copied": cached_step(layer, copies, beam_size=1),
        "shared": cached_step(layer, layer.stock_key(copied=False), shape.beam),
        "shared-kernel": el_step(layer, "never"),
        "el": el_step(layer, "always"),
    }


def cached_step(layer: Layer, key: Tensor, beam_size: int) -> Work:
    """Stock fairseq's attention, with the cache that its first step leaves behind."""
    attention = MultiheadAttention(layer.shape.width, layer.shape.heads, encoder_decoder_attention=True).eval()
    attention.load_state_dict(layer.stock.state_dict())
    attention.set_beam_size(beam_size)
    state: dict = {}

    def step() -> Tensor:
        return attention(
            layer.query, key, key, incremental_state=state, static_kv=True, need_weights=False
        )[0]

    with torch.no_grad():
        step()
    return step


def el_step(layer: Layer, form: str) -> Work:
    """fairseq_el's attention: `always` reads H, `never` the K and V that its first step built."""
    cache = CrossAttentionCache(layer.states, None, AttentionPolicy(form))
    cache.begin_step(layer.shape)
    state = {CrossAttentionCache.KEY: cache}
    key = layer.states.transpose(0, 1)  # [n, b, d], a view, as in generation

    def step() -> Tensor:
        return layer.ours(layer.query, key, key, incremental_state=state, static_kv=True, need_weights=False)[0]

    with torch.no_grad():
        step()
    return step


def whole_costs(shape: Shape) -> dict[str, Cost]:
    parts = operation_costs(shape)
    return {form: sum((parts[name] for name in names), Cost(0, 0)) for form, names in GROUPS_OF.items()}


def operation_costs(shape: Shape) -> dict[str, Cost]:
    """Costs by the formulas of `fairseq_el/models/costs.py`. A beam with its own copy counts as a sentence."""
    b, x, n, h, d = shape.batch, shape.beam, shape.length, shape.heads, shape.width
    alone = Shape(b * x, 1, n, h, d, shape.element_size)
    return {
        "build copied": alone.build_key_value(),
        "build shared": shape.build_key_value(),
        "project multi-head": shape.project_multi_head(),
        "project el": shape.project_el(),
        "attend copied": shape.attend_multi_head(copied=True),
        "attend shared": shape.attend_multi_head(),
        "attend el": shape.attend_el(),
    }


def operations(shape: Shape) -> dict[str, Work]:
    """The groups in each form, by torch's operations; the names are those of `operation_costs`."""
    layer = Layer.random(shape)
    b, x, h, d = shape.batch, shape.beam, shape.heads, shape.width
    attention, states = layer.ours, layer.states
    copies = layer.stock_key(copied=True)
    q = layer.query.view(b, x, d)
    with torch.no_grad():
        expanded = expand_query(q.view(b, x, h, -1), attention.k_proj.weight)  # [b, h * x, d]
        shared = attention.build_key_values(states)  # [b, h, d_k, n] each
        keys, values = (tensor.repeat_interleave(x, dim=0) for tensor in shared)
        copied = keys, values

    def attend(queries: Tensor, key_values: tuple[Tensor, Tensor]) -> Tensor:
        return fallback.decoder_attention(queries, h, attention.scaling, key_values, None, None)[0]

    def project_el() -> Tensor:
        queries = expand_query(attention.q_proj(q).view(b, x, h, -1), attention.k_proj.weight)
        return attention.out_proj(collapse_context(queries, attention.v_proj.weight, h))

    return {
        "build copied": lambda: (layer.stock.k_proj(copies), layer.stock.v_proj(copies)),
        "build shared": lambda: attention.build_key_values(states),
        "project multi-head": lambda: attention.out_proj(attention.q_proj(q)),
        "project el": project_el,
        "attend copied": lambda: attend(q.view(b * x, 1, d), copied),
        "attend shared": lambda: attend(q, shared),
        "attend el": lambda: fallback.el_attention(expanded, states, None)[0],
    }
