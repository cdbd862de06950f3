"""Times a generation of fairseq's in parts: its first step, some after it, and some of its last.

Between the latter, the search goes on as before, but what is remembered of the tokens generated so far grows to
what it would be by then. Steps cost what they cost in a whole generation; what they find means nothing.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_el.models.caches import SelfAttentionCache

FAST, SLOW = 0.5, 1.5  # seconds of a step


class Measured(Exception):
    """Ends a generation of which enough is known."""


class PartsClock:
    """Stands in front of one ensemble's `forward_decoder`. A step lasts from its call to the next: with search."""

    def __init__(self, ensemble: nn.Module, steps: int, age: Callable[[Any, int], None]):
        """steps: of the whole generation; age: makes the state of a model older by so many steps."""
        self.ensemble, self.steps, self.age = ensemble, steps, age
        self.decode = ensemble.forward_decoder
        ensemble.forward_decoder = self  # on this instance only; the class stays as it is
        self.began: float | None = None
        self.calls = self.skipped = 0
        self.first_seconds = 0.0
        self.early: list[tuple[int, float]] = []
        self.late: list[tuple[int, float]] = []

    def __call__(self, tokens: Tensor, encoder_outs: Any, incremental_states: Any, *options: Any):
        """tokens: [b * x, steps so far]"""
        self.note_step()
        if self.late and len(self.late) == self.wanted():
            raise Measured
        if self.is_time_to_skip():
            self.skipped = self.steps - self.wanted() - self.calls
            self.age(incremental_states, self.skipped)
        if self.skipped:
            between = tokens[:, :1].expand(-1, self.skipped)
            tokens = torch.cat([between, tokens], dim=1)
        self.calls += 1
        self.began = time.perf_counter()
        return self.decode(tokens, encoder_outs, incremental_states, *options)

    def note_step(self) -> None:
        """Ends the step that is under way."""
        if self.began is None:
            return
        seconds, step = time.perf_counter() - self.began, self.calls - 1 + self.skipped
        self.began = None
        if step == 0:
            self.first_seconds = seconds
        else:
            (self.late if self.skipped else self.early).append((step, seconds))

    def wanted(self) -> int:
        """How many steps are timed at either end: fewer of slow ones."""
        seconds = self.early[0][1]
        return 3 if seconds < FAST else 2 if seconds < SLOW else 1

    def is_time_to_skip(self) -> bool:
        if self.skipped or not self.early or len(self.early) != self.wanted():
            return False
        return self.steps - self.wanted() > self.calls

    def parts(self) -> dict[str, Any]:
        self.note_step()
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "first_seconds": self.first_seconds,
            "early": self.early,
            "late": self.late,
        }


def time_parts(
    ensemble: nn.Module, steps: int, age: Callable[[Any, int], None], generate: Callable[[], Any]
) -> dict[str, Any]:
    clock = PartsClock(ensemble, steps, age)
    try:
        generate()
    except Measured:
        pass
    return clock.parts()


def age_nothing(states: Any, steps: int) -> None:
    """Without a cache the tokens are all there is."""


def age_stock(decoder: nn.Module) -> Callable[[Any, int], None]:
    """Makes keys and values of stock fairseq's self-attention longer: their last ones, repeated."""

    def age(states: Any, steps: int) -> None:
        for layer in decoder.layers:
            buffer = layer.self_attn._get_input_buffer(states[0])
            for name in ("prev_key", "prev_value"):
                last = buffer[name][:, :, -1:]  # [b * x, h, 1, d_k]
                buffer[name] = torch.cat([buffer[name], last.expand(-1, -1, steps, -1)], dim=2)
            mask = buffer.get("prev_key_padding_mask")  # [b * x, steps so far]
            if mask is not None:
                unmasked = torch.zeros_like(mask[:, :1]).expand(-1, steps)
                buffer["prev_key_padding_mask"] = torch.cat([mask, unmasked], dim=1)
            layer.self_attn._set_input_buffer(states[0], buffer)

    return age


def age_history(states: Any, steps: int) -> None:
    """The same for fairseq_el, whose cache grows in blocks; each beam keeps attending to its own past."""
    cache = SelfAttentionCache.of(states[0])
    x, used = cache.beam_size, cache.used
    cache.used = used + steps * x
    block = x * cache.BLOCK_STEPS
    capacity = -(-cache.used // block) * block
    beam_mask = cache.beam_mask.new_ones(cache.beam_mask.size(0), x, capacity)  # [b, x, capacity]
    beam_mask[:, :, :used] = cache.beam_mask[:, :, :used]
    beam_mask[:, :, used : cache.used] = ~torch.eye(x, dtype=torch.bool).repeat(1, steps)
    cache.beam_mask = beam_mask
    for layer, slots in cache.slots.items():
        cache.slots[layer] = grown(slots[0], used, capacity), grown(slots[1], used, capacity)


def grown(slots: Tensor, used: int, capacity: int) -> Tensor:
    """slots: [b, h, capacity before, d_k]; returns [b, h, capacity, d_k]."""
    b, h, _, d_k = slots.shape
    new = slots.new_zeros(b, h, capacity, d_k)
    new[:, :, :used] = slots[:, :, :used]
    return new
