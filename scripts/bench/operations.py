"""One layer's encoder-decoder attention in its forms, and the peaks of this machine. A worker of its own.

The groups of operations are those of the paper's Table 1: building K and V, building the query (with the output's
projection), and attention itself. The multi-head forms differ in who owns K and V: each beam its own copy, as in
fairseq 0.9, the paper's baseline, or all beams of a sentence one, as in fairseq 0.12. FLOPs of operations are
counted, bytes follow from formulas; operations and whole steps are timed.
"""

import copy
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.environment import BUILD
from bench.protocol import SEED, THREADS, Answer, Request, Sentences, serve
from fairseq_el.kernels import build, fallback
from fairseq_el.models.attention import ELAttention, collapse_context, expand_query
from fairseq_el.models.caches import CrossAttentionCache
from fairseq_el.models.costs import Cost, Shape
from fairseq_el.models.policy import AttentionPolicy

Work = Callable[[], object]


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
    attention = copy.deepcopy(layer.stock)
    attention.set_beam_size(beam_size)
    return after_first_step(attention, layer.query, key, {})


def el_step(layer: Layer, form: str) -> Work:
    """fairseq_el's attention: `always` reads H, `never` the K and V that its first step built."""
    cache = CrossAttentionCache(layer.states, None, AttentionPolicy(form))
    cache.begin_step(layer.shape)
    key = layer.states.transpose(0, 1)  # [n, b, d], a view, as in generation
    return after_first_step(layer.ours, layer.query, key, {CrossAttentionCache.KEY: cache})


@torch.no_grad()
def after_first_step(attention: MultiheadAttention, query: Tensor, key: Tensor, state: dict) -> Work:
    def step() -> Tensor:
        return attention(query, key, key, incremental_state=state, static_kv=True, need_weights=False)[0]

    step()
    return step


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


# ---- counting and timing


def count(work: Work) -> int:
    """FLOPs, by torch's counter, which knows neither our kernels nor fused attention, but the products in them."""
    by_torch = mock.patch.object(build, "library", return_value=None)
    with by_torch, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        work()
    return flops.get_total_flops()


def time_each(works: dict[str, Work], least_seconds: float) -> dict[str, float]:
    """Seconds of a call. Short work is repeated for `least_seconds`, for the clock's resolution not to count."""
    found = {}
    for name, work in works.items():
        work()  # the first call sets up threads and kernels
        calls, started, passed = 0, time.perf_counter(), 0.0
        while passed < least_seconds or not calls:
            work()
            calls, passed = calls + 1, time.perf_counter() - started
        found[name] = passed / calls
    return found


def peaks() -> dict[str, float]:
    """GFLOP/s in registers alone, by precision, and GB/s of reading memory: by a program that does nothing else."""
    source, program = Path(__file__).with_name("peaks.cpp"), BUILD / "peaks"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-O3", "-march=native", "-fopenmp", str(source), "-o", str(program)], check=True)
    threads = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    lines = subprocess.run(program, check=True, capture_output=True, text=True, env=threads).stdout.splitlines()
    return {name: float(value) for name, value in map(str.split, lines)}


class Operations:
    """Requests carry the sizes of a `Shape` as options."""

    vocabulary = 0
    settings = ""

    def __init__(self, options: dict[str, Any]):
        torch.set_num_threads(THREADS)
        self.versions = {"fairseq": version("fairseq-fixed"), "torch": torch.__version__}

    @torch.no_grad()
    def generate(self, request: Request, sources: Sentences) -> Answer:
        if request.op == "peaks":
            return {"peaks": peaks()}
        options = dict(request.options)
        least_seconds = options.pop("least_seconds", 0.1)
        shape = Shape(**options)
        if request.op == "count":
            return {"flops": {name: count(work) for name, work in operations(shape).items()}}
        if request.op == "time_operations":
            return {"timed": time_each(operations(shape), least_seconds)}
        return {"timed": time_each(whole_steps(shape), least_seconds)}


if __name__ == "__main__":
    serve(Operations)
