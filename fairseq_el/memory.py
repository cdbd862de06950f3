"""What generation remembers: the source of each sentence, and the past of each beam.

All state that changes while a batch is generated lives here, in objects made for that one call and carried
in fairseq's `incremental_state`; nothing is kept on the model's modules.
"""

import time

import torch
from torch import Tensor, nn

from fairseq_el.roofline import Account, Decision, Shape, measure_machine


def tensor_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def kept_sentences(new_order: Tensor, beam_size: int) -> Tensor:
    """Which sentences go on. new_order: [b' * x], the old row of each new row, beams staying with their
    sentence; returns [b']."""
    return new_order.view(-1, beam_size)[:, 0] // beam_size


class SourceMemory:
    """The encoder output H, once per sentence, whatever the beam size, and K and V of the layers that
    traded memory for arithmetic (see `roofline.py`)."""

    KEY = "fairseq_el.source"

    def __init__(
        self,
        states: Tensor,
        padding_mask: Tensor | None,
        decision: Decision,
        reserved_bytes: int = 0,
        wants_weights: bool = False,
    ):
        """states: [b, n, d], padding_mask: [b, n], True at padding.

        reserved_bytes: of the decision's budget, what the beams will need.
        """
        self.states = states
        self.padding_mask = padding_mask
        self.decision = decision
        self.reserved_bytes = reserved_bytes
        self.wants_weights = wants_weights
        self.account = Account()
        self.switching = False
        self.built: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # [b, h, d_k, n] each
        self.build_seconds = 0.0

    @classmethod
    def from_encoder_out(cls, encoder_out: dict[str, list[Tensor]], **options) -> "SourceMemory":
        states = encoder_out["encoder_out"][0].transpose(0, 1).contiguous()  # [n, b, d] -> [b, n, d]
        masks = encoder_out["encoder_padding_mask"]
        padding_mask = masks[0] if masks and masks[0].any() else None
        return cls(states, padding_mask, **options)

    @classmethod
    def of(cls, incremental_state: dict | None) -> "SourceMemory | None":
        return incremental_state.get(cls.KEY) if incremental_state else None

    def as_encoder_out(self) -> dict[str, list[Tensor]]:
        """The form in which a fairseq decoder takes it; views, no copies."""
        return {
            "encoder_out": [self.states.transpose(0, 1)],  # [n, b, d]
            "encoder_padding_mask": [] if self.padding_mask is None else [self.padding_mask],
        }

    def begin_step(self, shape: Shape) -> None:
        """Decides for all layers whether those that still attend to H build K and V in this step."""

        def machine():
            return measure_machine(self.states.device, self.states.dtype)

        self.switching = self.decision.wants_key_values(shape, machine, self.account)

    def key_values(self, attention: nn.Module) -> tuple[Tensor, Tensor] | None:
        """K and V of a layer, [b, h, d_k, n] each, or None where it should attend to H."""
        if attention not in self.built and self.switching and self._has_room(attention):
            start = time.perf_counter()
            self.built[attention] = attention.build_key_values(self.states)
            self.build_seconds += time.perf_counter() - start
        return self.built.get(attention)

    def take_build_seconds(self) -> float:
        seconds, self.build_seconds = self.build_seconds, 0.0
        return seconds

    def _has_room(self, attention: nn.Module) -> bool:
        budget = self.decision.budget
        b, n, _ = self.states.shape
        another_layer = 2 * b * n * attention.embed_dim * self.states.element_size()
        return budget is None or self.nbytes() + another_layer + self.reserved_bytes <= budget

    def reorder(self, new_order: Tensor, beam_size: int) -> None:
        """Follows the beams: nothing moves until sentences finish, whose rows are dropped."""
        sentences = kept_sentences(new_order, beam_size)
        if sentences.numel() == self.states.size(0):
            return
        self.states = self.states[sentences]
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[sentences]
        for layer, (keys, values) in self.built.items():  # one layer at a time: old and new never both whole
            self.built[layer] = keys[sentences], values[sentences]

    def nbytes(self) -> int:
        built = (t for pair in self.built.values() for t in pair)
        return tensor_bytes(self.states, self.padding_mask, *built)


class BeamHistory:
    """Keys and values of all tokens generated so far, written once and never moved.

    Each step appends x slots a sentence. Which of its sentence's slots are a beam's past is a mask, so
    following the beams means reordering that mask. Room is made in blocks of steps.
    """

    KEY = "fairseq_el.history"
    BLOCK_STEPS = 16

    def __init__(self, beam_size: int):
        self.beam_size = beam_size
        self.used = 0
        self.hidden: Tensor | None = None  # [b, x, capacity], False at a beam's own past
        self.slots: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # [b, h, capacity, d_k] each

    @classmethod
    def of(cls, incremental_state: dict | None) -> "BeamHistory | None":
        return incremental_state.get(cls.KEY) if incremental_state else None

    def advance(self, padded: Tensor) -> None:
        """Opens this step's slots, one a beam, seen by that beam alone.

        padded: [b * x], True where the newest token is padding, which nobody attends to.
        """
        x, b = self.beam_size, padded.numel() // self.beam_size
        if self.hidden is None or self.used + x > self.hidden.size(2):
            grown = padded.new_ones(b, x, self.used + x * self.BLOCK_STEPS)
            if self.hidden is not None:
                grown[:, :, : self.used] = self.hidden[:, :, : self.used]
            self.hidden = grown
        own = torch.eye(x, dtype=torch.bool, device=padded.device)
        self.hidden[:, :, self.used : self.used + x] = ~own | padded.view(b, x, 1)
        self.used += x

    def append(self, attention: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Writes one layer's newest keys and values, [b, h, x, d_k] each.

        Returns all keys and values so far, [b, h, slots, d_k], and what each beam may not see, [b, x, slots].
        """
        keys, values = self._room_for(attention, k)
        newest = slice(self.used - self.beam_size, self.used)
        keys[:, :, newest] = k
        values[:, :, newest] = v
        return keys[:, :, : self.used], values[:, :, : self.used], self.hidden[:, :, : self.used]

    def _room_for(self, attention: nn.Module, k: Tensor) -> tuple[Tensor, Tensor]:
        held = self.slots.get(attention)
        capacity = self.hidden.size(2)
        if held is None or held[0].size(2) < capacity:
            b, h, x, d_k = k.shape
            grown = k.new_zeros(b, h, capacity, d_k), k.new_zeros(b, h, capacity, d_k)
            for old, new in zip(held or (), grown):
                new[:, :, : old.size(2)] = old
            self.slots[attention] = held = grown
        return held

    def reorder(self, new_order: Tensor) -> None:
        """new_order: [b' * x], the old row that each new row continues."""
        x = self.beam_size
        rows, capacity = self.hidden.size(0) * x, self.hidden.size(2)
        self.hidden = self.hidden.view(rows, capacity)[new_order].view(-1, x, capacity)
        if new_order.numel() < rows:
            sentences = kept_sentences(new_order, x)
            self.slots = {
                layer: (keys[sentences], values[sentences])
                for layer, (keys, values) in self.slots.items()
            }

    def nbytes(self) -> int:
        return tensor_bytes(self.hidden, *(t for pair in self.slots.values() for t in pair))
