"""What generation remembers: the source of each sentence, and the past of each beam.

All state that changes while a batch is generated lives here, in objects made for that one call and carried
in fairseq's `incremental_state`; nothing is kept on the model's modules.
"""

import functools
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_el.models.policy import Account, Decision, Machine, Shape, measure_machine


def tensor_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def kept_sentences(new_order: Tensor, beam_size: int) -> Tensor:
    """Which sentences go on. new_order: [b' * x], the old row of each new row, beams staying with their
    sentence; returns [b']."""
    return new_order.view(-1, beam_size)[:, 0] // beam_size


def real_span(states: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Where each sentence begins and ends, [b] each; None if padding isn't only before or behind it.

    states: [b, n, d], padding_mask: [b, n].
    """
    b, n, _ = states.shape
    if padding_mask is None:
        begin = torch.zeros(b, dtype=torch.long, device=states.device)
        return begin, begin + n
    real = (~padding_mask).long()
    begin = real.argmax(dim=1)
    end = begin + real.sum(dim=1)
    whole = torch.equal(end, n - real.flip(1).argmax(dim=1))
    return (begin, end) if whole else None


class SharedMemory:
    """What all beams of a sentence share: states that attention can read as they are, and, for the layers that
    traded memory for arithmetic (see `roofline.py`), K and V built from them."""

    KEY: str  # in fairseq's `incremental_state`

    def __init__(
        self,
        span: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        decision: Decision,
        reserved_bytes: int = 0,
    ):
        """span: where each sentence begins and ends, [b] each; padding_mask: [b, n], True at padding.

        reserved_bytes: of the decision's budget, what the beams will need.
        """
        self.span = span
        self.padding_mask = padding_mask
        self.decision = decision
        self.reserved_bytes = reserved_bytes
        self.account = Account()
        self.switching = False
        self.built: dict[MultiheadAttention, tuple[Tensor, Tensor]] = {}  # [b, h, d_k, n] each
        self.build_seconds = 0.0

    def begin_step(self, shape: Shape) -> None:
        """Decides for all layers whether those without K and V build them in this step."""
        machine = functools.partial(self.machine, shape.beam)
        self.switching = self.decision.wants_key_values(shape, machine, self.account)

    def machine(self, beam: int) -> Machine:
        states = self.any_states()
        return measure_machine(states.device, states.dtype, beam)

    def key_values(self, attention: MultiheadAttention) -> tuple[Tensor, Tensor] | None:
        """K and V of a layer, [b, h, d_k, n] each, or None where it should attend to states."""
        if attention not in self.built and self.switching and self._has_room(attention):
            start = time.perf_counter()
            self.built[attention] = attention.build_key_values(self.states_of(attention))
            self.build_seconds += time.perf_counter() - start
        return self.built.get(attention)

    def take_build_seconds(self) -> float:
        seconds, self.build_seconds = self.build_seconds, 0.0
        return seconds

    def _has_room(self, attention: MultiheadAttention, coming: int = 0) -> bool:
        """coming: bytes of states that are still to be recorded."""
        budget = self.decision.budget
        b, n, _ = self.states_of(attention).shape
        another_layer = 2 * b * n * attention.embed_dim * self.any_states().element_size()
        return budget is None or self.nbytes() + another_layer + coming + self.reserved_bytes <= budget

    def keep(self, sentences: Tensor) -> None:
        """Drops the rows of finished sentences. sentences: [b'], those that go on."""
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[sentences]
        if self.span is not None:
            self.span = self.span[0][sentences], self.span[1][sentences]
        for layer, (keys, values) in self.built.items():  # one layer at a time: old and new never both whole
            self.built[layer] = keys[sentences], values[sentences]

    def nbytes(self) -> int:
        built = (t for pair in self.built.values() for t in pair)
        return tensor_bytes(self.padding_mask, *built)

    def batch(self) -> int:
        raise NotImplementedError

    def length(self) -> int:
        raise NotImplementedError

    def states_of(self, attention: MultiheadAttention) -> Tensor:
        """[b, n, d]"""
        raise NotImplementedError

    def any_states(self) -> Tensor:
        """Of some layer, for their precision and device."""
        raise NotImplementedError


class SourceMemory(SharedMemory):
    """The encoder output H, once per sentence, whatever the beam size and the number of layers."""

    KEY = "fairseq_el.source"

    def __init__(
        self,
        states: Tensor,
        padding_mask: Tensor | None,
        decision: Decision,
        reserved_bytes: int = 0,
        wants_weights: bool = False,
    ):
        """states: [b, n, d], padding_mask: [b, n], True at padding."""
        super().__init__(real_span(states, padding_mask), padding_mask, decision, reserved_bytes)
        self.states = states
        self.wants_weights = wants_weights
        self.bare = False  # whether the decoder takes tensors as they are, not in lists

    @classmethod
    def from_encoder_out(cls, encoder_out: dict[str, Any], **options) -> "SourceMemory":
        """Takes tensors in lists, as Transformer encoders return them, or bare, as wav2vec's does."""
        bare = isinstance(encoder_out["encoder_out"], Tensor)
        states = encoder_out["encoder_out"] if bare else encoder_out["encoder_out"][0]
        masks = [encoder_out["padding_mask"]] if bare else encoder_out["encoder_padding_mask"]
        has_padding = len(masks) > 0 and masks[0] is not None and bool(masks[0].any())
        memory = cls(states.transpose(0, 1).contiguous(), masks[0] if has_padding else None, **options)
        memory.bare = bare
        return memory

    @classmethod
    def of(cls, incremental_state: dict | None) -> "SourceMemory | None":
        return incremental_state.get(cls.KEY) if incremental_state else None

    def as_encoder_out(self) -> dict[str, Any]:
        """The form in which the model's decoder takes it; views, no copies."""
        if self.bare:
            return {"encoder_out": self.states.transpose(0, 1), "padding_mask": self.padding_mask}
        return {
            "encoder_out": [self.states.transpose(0, 1)],  # [n, b, d]
            "encoder_padding_mask": [] if self.padding_mask is None else [self.padding_mask],
        }

    def batch(self) -> int:
        return self.states.size(0)

    def length(self) -> int:
        return self.states.size(1)

    def states_of(self, attention: MultiheadAttention) -> Tensor:
        return self.states

    def any_states(self) -> Tensor:
        return self.states

    def reorder(self, new_order: Tensor, beam_size: int) -> None:
        """Follows the beams: nothing moves until sentences finish, whose rows are dropped."""
        sentences = kept_sentences(new_order, beam_size)
        if sentences.numel() < self.states.size(0):
            self.states = self.states[sentences]
            self.keep(sentences)

    def nbytes(self) -> int:
        return tensor_bytes(self.states) + super().nbytes()


READING: ContextVar["PromptMemory | None"] = ContextVar("READING", default=None)
"""The prompts that this thread is reading. fairseq's decoder hands layers no state when it runs over a whole text,
so it is here that self-attention finds where to leave what it sees."""


class PromptMemory(SharedMemory):
    """What self-attention needs of the prompts of a language model, once per sentence, whatever the beam size.

    For each layer either its attention's input, or K and V, which reading the prompt computes anyway.
    Prompts are padded behind; generated tokens are in the `BeamHistory`.
    """

    KEY = "fairseq_el.prompt"

    def __init__(
        self, lengths: Tensor, layers: int, beam_size: int, counts_from_prompt: bool, **options
    ):
        """lengths: [b], tokens of each prompt. counts_from_prompt: whether the search counts its steps from the
        end of each prompt, or from the beginning of the text."""
        longest = int(lengths.max())
        outside = torch.arange(longest, device=lengths.device) >= lengths.unsqueeze(1)
        super().__init__((torch.zeros_like(lengths), lengths), outside, **options)
        self.layers = layers
        self.beam_size = beam_size
        self.counts_from_prompt = counts_from_prompt
        self.inputs: dict[MultiheadAttention, Tensor] = {}  # [b, n, d]
        self.reading: slice | None = None  # the rows of the batch that are being read
        self.wants_key_values: bool | None = None

    @classmethod
    def of(cls, incremental_state: dict | None) -> "PromptMemory | None":
        return incremental_state.get(cls.KEY) if incremental_state else None

    @classmethod
    def being_read(cls) -> "PromptMemory | None":
        return READING.get()

    @contextmanager
    def read(self, rows: slice):
        """While this lasts, self-attention records what it sees: the prompts of these rows of the batch."""
        self.reading = rows
        token = READING.set(self)
        try:
            yield
        finally:
            READING.reset(token)
            self.reading = None

    @property
    def lengths(self) -> Tensor:
        return self.span[1]

    def batch(self) -> int:
        return self.lengths.numel()

    def length(self) -> int:
        return self.padding_mask.size(1)

    def places(self, steps: int) -> Tensor | None:
        """Where in its text each row's newest token stands, [b * x], counted from 1, after so many steps of the
        search; None where all stand at the search's own step."""
        if not self.counts_from_prompt:
            return None
        return (self.lengths + steps).repeat_interleave(self.beam_size)

    def begin_step(self, shape: Shape) -> None:
        if self.inputs:  # else there is nothing left to decide
            super().begin_step(shape)

    def record(self, attention: MultiheadAttention, x: Tensor, k: Tensor, v: Tensor) -> None:
        """Keeps what a layer saw of the prompts being read. x: [b', n', d]; k and v: [b', h, n', d_k]."""
        if attention not in self.inputs and attention not in self.built:
            self._make_room(attention, x)
        read = x.size(1)
        if attention in self.built:
            for kept, new in zip(self.built[attention], (k, v)):
                kept[self.reading, :, :, :read] = new.mT
        else:
            self.inputs[attention][self.reading, :read] = x

    def _make_room(self, attention: MultiheadAttention, x: Tensor) -> None:
        """Decides once what is kept; K and V cost no arithmetic here, only memory."""
        b, n, h = self.batch(), self.length(), attention.num_heads
        self.inputs[attention] = x.new_zeros(b, n, x.size(2))
        if self.wants_key_values is None:
            shape = Shape(b, self.beam_size, n, h, x.size(2), x.element_size())
            self.wants_key_values = self.decision.prefers_key_values(
                shape, functools.partial(self.machine, self.beam_size)
            )
        unread = self.layers - len(self.inputs) - len(self.built)
        coming = unread * tensor_bytes(self.inputs[attention])  # at least, from the layers above
        if self.wants_key_values and self._has_room(attention, coming):
            del self.inputs[attention]
            self.built[attention] = (
                x.new_zeros(b, h, attention.head_dim, n),
                x.new_zeros(b, h, attention.head_dim, n),
            )

    def key_values(self, attention: MultiheadAttention) -> tuple[Tensor, Tensor] | None:
        found = super().key_values(attention)
        if found is not None:
            self.inputs.pop(attention, None)  # K and V take its place
        return found

    def states_of(self, attention: MultiheadAttention) -> Tensor:
        return self.inputs[attention]

    def any_states(self) -> Tensor:
        if self.inputs:
            return next(iter(self.inputs.values()))
        return next(iter(self.built.values()))[0]

    def reorder(self, new_order: Tensor, beam_size: int) -> None:
        sentences = kept_sentences(new_order, beam_size)
        if sentences.numel() < self.lengths.numel():
            for layer, states in self.inputs.items():
                self.inputs[layer] = states[sentences]
            self.keep(sentences)

    def nbytes(self) -> int:
        return tensor_bytes(*self.inputs.values()) + super().nbytes()


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
        self.slots: dict[MultiheadAttention, tuple[Tensor, Tensor]] = {}  # [b, h, capacity, d_k] each

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

    def append(self, attention: MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Writes one layer's newest keys and values, [b, h, x, d_k] each.

        Returns the slots of keys and values, [b, h, capacity, d_k], and which of them each beam may not see,
        [b, x, capacity]; the first `used` hold something.
        """
        keys, values = self._room_for(attention, k)
        newest = slice(self.used - self.beam_size, self.used)
        keys[:, :, newest] = k
        values[:, :, newest] = v
        return keys, values, self.hidden

    def _room_for(self, attention: MultiheadAttention, k: Tensor) -> tuple[Tensor, Tensor]:
        held = self.slots.get(attention)
        capacity = self.hidden.size(2)
        if held is None or held[0].size(2) < capacity:
            b, h, x, d_k = k.shape
            grown = k.new_empty(b, h, capacity, d_k), k.new_empty(b, h, capacity, d_k)
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
