"""Time and memory of generation by stage (`--el-profile`)."""

import sys
import time
from collections import Counter
from contextlib import contextmanager

import torch
from fairseq.models import BaseFairseqModel
from torch import nn

from fairseq_el.models.attention import CachedSelfAttention, ELAttention


class Profile:
    """Seconds and peak bytes of one generator. Coarse timing is always on; `watch` adds the decoder's parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = Counter()  # type: ignore[assignment]  # its type allows integers only
        self.sentences = 0
        self.tokens = 0
        self.steps = 0  # calls of the decoder
        self.peak_source_bytes = 0
        self.peak_beam_bytes = 0
        self.watching = False
        self.stages: list[str] = []

    def watch(self, models: list[BaseFairseqModel]) -> None:
        """Times attention and the output projection of each model, by hooks on the modules."""
        self.watching = True
        for model in models:
            for module in model.decoder.modules():
                if isinstance(module, ELAttention):
                    self._time_calls(module, "cross-attention")
                elif isinstance(module, CachedSelfAttention):
                    self._time_calls(module, "self-attention")
            if isinstance(model.decoder.output_projection, nn.Module):
                self._time_calls(model.decoder.output_projection, "vocabulary")

    def _time_calls(self, module: nn.Module, name: str) -> None:
        starts: list[float] = []
        module.register_forward_pre_hook(lambda *_: starts.append(self._now()))
        module.register_forward_hook(lambda *_: self._add_part(name, starts.pop()))

    def _now(self) -> float:
        if self.watching and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _add(self, name: str, start: float) -> None:
        self.seconds[name] += self._now() - start

    def _add_part(self, name: str, start: float) -> None:
        """A part of a decoding step; prefill uses the same modules and is not counted."""
        if self.stages[-1:] == ["decoder"]:
            self._add(name, start)

    @contextmanager
    def time(self, name: str):
        start = self._now()
        self.stages.append(name)
        try:
            yield
        finally:
            self.stages.pop()
        self._add(name, start)

    def record_state(self, source_bytes: int, beam_bytes: int) -> None:
        self.peak_source_bytes = max(self.peak_source_bytes, source_bytes)
        self.peak_beam_bytes = max(self.peak_beam_bytes, beam_bytes)

    def count(self, hypotheses: list[list[dict]]) -> None:
        self.sentences += len(hypotheses)
        self.tokens += sum(len(best[0]["tokens"]) for best in hypotheses if best)

    def mean_length(self) -> float:
        return self.tokens / max(self.sentences, 1)

    def stage_seconds(self) -> dict[str, float]:
        """Disjoint stages that add up to the time spent in `generate`."""
        s = self.seconds
        if s["prefill"]:
            before = {"prefill": s["prefill"]}
            attention = {"self-attention": s["self-attention"] - s["K/V build"]}
        else:
            before = {"encoder": s["encoder"]}
            attention = {
                "self-attention": s["self-attention"],
                "cross-attention": s["cross-attention"] - s["K/V build"],
            }
        step = s["K/V build"] + sum(attention.values()) + s["vocabulary"]
        return {
            **before,
            "K/V build": s["K/V build"],
            **attention,
            "dense": s["decoder"] - step,
            "vocabulary": s["vocabulary"],
            "search": s["generate"] - sum(before.values()) - s["decoder"],
        }

    def report(self) -> str:
        total = self.seconds["generate"] or 1e-9
        lines = [
            f"{self.sentences:,} sentences, {self.tokens:,} tokens in {total:.1f} s: "
            f"{self.sentences / total:.2f} sentences/s, {self.tokens / total:.1f} tokens/s"
        ]
        for stage, seconds in self.stage_seconds().items():
            lines.append(f"{stage:<16} {seconds:9.2f} s {seconds / total:7.1%}")
        lines.append(f"peak source state: {self.peak_source_bytes} bytes")
        lines.append(f"peak beam state: {self.peak_beam_bytes} bytes")
        return "\n".join(f"fairseq_el | {line}" for line in lines)

    def print_report(self) -> None:
        print(self.report(), file=sys.stderr, flush=True)
