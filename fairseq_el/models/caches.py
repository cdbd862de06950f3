"""State of a batch during generation: caches of what the beams of a sentence share, and of the past of each beam.

Caches are created for one batch and reach the layers through fairseq's `incremental_state`; modules keep no state.
"""

import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_el import heap
from fairseq_el.kernels import ops
from fairseq_el.kernels.formats import KeyValues, Padding, Slots
from fairseq_el.kernels.fused_layer import LayerSpec
from fairseq_el.models.costs import Machine, Shape, measure_machine
from fairseq_el.models.policy import AttentionPolicy, PolicyState

TRIM_FROM_BYTES = 16 << 20
"""Size of the slots from which on trimming the heap, which takes milliseconds, doesn't count in a step's time."""


def tensor_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def cache_dtype(low_precision: str | None, computed: torch.dtype) -> torch.dtype:
    """Half precision for models in low precision: half the bytes to keep, and to read in each step."""
    return torch.float16 if low_precision else computed


def kept_sentences(new_order: Tensor, beam_size: int) -> Tensor:
    """Indices of the sentences that continue, [b'].

    new_order: [b' * x], the old row of each new row; beams stay with their sentence.
    """
    return new_order.view(-1, beam_size)[:, 0] // beam_size


class InIncrementalState:
    """An object that layers look up in fairseq's `incremental_state`."""

    KEY: str

    @classmethod
    def of(cls, incremental_state: dict | None) -> Self | None:
        return incremental_state.get(cls.KEY) if incremental_state else None


class SharedPrefixCache(InIncrementalState):
    """What all beams of a sentence share: states that EL-attention reads, and K and V of layers that switched to
    multi-head attention (see `policy`).

    Each attention layer builds its own K and V, when `should_build` says so, and stores them here.
    """

    def __init__(
        self,
        padding: Padding,
        policy: AttentionPolicy,
        reserved_bytes: int = 0,
        expected_steps: float = 0.0,
        low_precision: str | None = None,
    ):
        """reserved_bytes: the part of the policy's budget that the self-attention cache will need. low_precision: that
        of the model (see `cache_dtype`)."""
        self.padding = padding
        self.low_precision = low_precision
        self.policy, self.policy_state = policy, PolicyState(expected_steps)
        self.reserved_bytes = reserved_bytes
        self.switching = False
        self.key_values: dict[MultiheadAttention, KeyValues] = {}  # [b, h, d_k, n] each
        self.build_seconds = 0.0

    def begin_step(self, shape: Shape) -> None:
        """Decides for all layers whether those without K and V build them in this step.

        In low precision `auto` builds them in the first step, where they fit the budget. By a count of
        operations that pays from about four steps on. Both forms round differently, so that outputs must not depend on
        measured times.
        """
        if self.low_precision:
            self.switching = self.policy.form != "always"
        else:
            machine = functools.partial(self.machine, shape.beam)
            self.switching = self.policy.wants_key_values(shape, machine, self.policy_state)

    def machine(self, beam: int) -> Machine:
        states = self.any_states()
        return measure_machine(states.device, states.dtype, beam)

    def should_build(self, attention: MultiheadAttention) -> bool:
        """Whether a layer should build K and V now."""
        return self.switching and attention not in self.key_values and self._has_room(attention)

    def store(self, attention: MultiheadAttention, key_values: KeyValues) -> None:
        """key_values: [b, h, d_k, n] each."""
        self.key_values[attention] = key_values

    def _has_room(self, attention: MultiheadAttention, expected: int = 0) -> bool:
        """expected: bytes of states that other layers will store."""
        budget = self.policy.budget
        b, n, _ = self.states_of(attention).shape
        needed = 2 * b * n * attention.embed_dim * self.any_states().element_size()
        return budget is None or self.nbytes() + needed + expected + self.reserved_bytes <= budget

    def reorder(self, new_order: Tensor, beam_size: int) -> None:
        """Follows the beams. Nothing moves until sentences finish; then their rows are dropped."""
        if new_order.numel() < self.batch() * beam_size:
            self.select(kept_sentences(new_order, beam_size).to(self.device))

    def select(self, sentences: Tensor) -> None:
        """sentences: [b'], indices."""
        self.padding = self.padding.select(sentences)
        for layer, (keys, values) in self.key_values.items():  # layer by layer, to keep the peak low
            self.key_values[layer] = keys[sentences], values[sentences]

    def nbytes(self) -> int:
        key_values = (t for pair in self.key_values.values() for t in pair)
        return tensor_bytes(self.padding.mask, *key_values)

    @property
    def device(self) -> torch.device:
        return self.any_states().device

    def batch(self) -> int:
        raise NotImplementedError

    def length(self) -> int:
        raise NotImplementedError

    def states_of(self, attention: MultiheadAttention) -> Tensor:
        """[b, n, d]"""
        raise NotImplementedError

    def any_states(self) -> Tensor:
        """A tensor with the precision and device of the states."""
        raise NotImplementedError


class CrossAttentionCache(SharedPrefixCache):
    """The encoder output H, once per sentence, whatever the beam size and the number of layers."""

    KEY = "fairseq_el.cross_attention"

    def __init__(
        self,
        states: Tensor,
        padding_mask: Tensor | None,
        policy: AttentionPolicy,
        wants_weights: bool = False,
        **options,
    ):
        """states: [b, n, d], padding_mask: [b, n], True at padding."""
        super().__init__(Padding.of(states, padding_mask), policy, **options)
        self.states = states.to(cache_dtype(self.low_precision, states.dtype)).contiguous()
        self.wants_weights = wants_weights
        self.bare = False  # whether the decoder takes tensors as they are, not in lists

    @classmethod
    def from_encoder_out(cls, encoder_out: dict[str, Any], **options) -> "CrossAttentionCache":
        """Takes tensors in lists, as Transformer encoders return them, or bare, as wav2vec's does."""
        bare = isinstance(encoder_out["encoder_out"], Tensor)
        states = encoder_out["encoder_out"] if bare else encoder_out["encoder_out"][0]
        masks = [encoder_out["padding_mask"]] if bare else encoder_out["encoder_padding_mask"]
        has_padding = len(masks) > 0 and masks[0] is not None and bool(masks[0].any())
        cache = cls(states.transpose(0, 1), masks[0] if has_padding else None, **options)
        cache.bare = bare
        return cache

    def as_encoder_out(self) -> dict[str, Any]:
        """The form that the model's decoder takes; views, no copies."""
        if self.bare:
            return {"encoder_out": self.states.transpose(0, 1), "padding_mask": self.padding.mask}
        return {
            "encoder_out": [self.states.transpose(0, 1)],  # [n, b, d]
            "encoder_padding_mask": [] if self.padding.mask is None else [self.padding.mask],
        }

    def batch(self) -> int:
        return self.states.size(0)

    def length(self) -> int:
        return self.states.size(1)

    def states_of(self, attention: MultiheadAttention) -> Tensor:
        return self.states

    def any_states(self) -> Tensor:
        return self.states

    def select(self, sentences: Tensor) -> None:
        self.states = self.states[sentences]
        super().select(sentences)

    def nbytes(self) -> int:
        return tensor_bytes(self.states) + super().nbytes()


class PromptCache(SharedPrefixCache):
    """What self-attention needs of the prompts of a language model, once per sentence, whatever the beam size.

    For each layer either the input of its attention or K and V, both of which prefill computes anyway. Prompts are
    padded behind. Generated tokens are in the `SelfAttentionCache`.
    """

    KEY = "fairseq_el.prompt"

    def __init__(
        self, lengths: Tensor, layers: int, beam_size: int, starts_behind: bool, policy: AttentionPolicy, **options
    ):
        """lengths: [b], tokens of each prompt. starts_behind: whether the search counts its steps from the end of
        each prompt, else from the beginning of the text."""
        super().__init__(Padding.behind(lengths), policy, **options)
        self.lengths = lengths
        self.longest = int(lengths.max())
        self.layers = layers
        self.beam_size = beam_size
        self.starts_behind = starts_behind
        self.inputs: dict[MultiheadAttention, Tensor] = {}  # [b, n, d]
        self.prefers_key_values: bool | None = None  # decided by the first layer

    def batch(self) -> int:
        return self.lengths.numel()

    def length(self) -> int:
        return self.longest

    def positions(self, steps: int) -> Tensor:
        """Position of each row's newest token, [b * x], from 1, after so many steps of a search behind the prompts."""
        return (self.lengths + steps).repeat_interleave(self.beam_size)

    def begin_step(self, shape: Shape) -> None:
        if self.inputs:  # else all layers have K and V
            super().begin_step(shape)

    def record(self, attention: MultiheadAttention, sentences: slice, x: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores what a layer computes in prefill of some sentences. x: [b', n', d]; k and v: [b', h, n', d_k]."""
        if attention not in self.inputs and attention not in self.key_values:
            self._allocate(attention, x)
        n = x.size(1)
        if attention in self.key_values:
            for stored, new in zip(self.key_values[attention], (k, v)):
                stored[sentences, :, :, :n] = new.mT
        else:
            self.inputs[attention][sentences, :n] = x

    def _allocate(self, attention: MultiheadAttention, x: Tensor) -> None:
        """Decides what to store; K and V cost no arithmetic here, only memory. x: [b', n', d]."""
        b, n, h = self.batch(), self.length(), attention.num_heads
        dtype = cache_dtype(self.low_precision, x.dtype)
        self.inputs[attention] = x.new_zeros(b, n, x.size(2), dtype=dtype)
        if self.prefers_key_values is None:
            shape = Shape(b, self.beam_size, n, h, x.size(2), dtype.itemsize)
            self.prefers_key_values = self._prefers_key_values(shape)
        layers_to_come = self.layers - len(self.inputs) - len(self.key_values)
        expected = layers_to_come * tensor_bytes(self.inputs[attention])  # at least
        if self.prefers_key_values and self._has_room(attention, expected):
            del self.inputs[attention]
            new = functools.partial(x.new_zeros, b, h, attention.head_dim, n, dtype=dtype)
            self.key_values[attention] = new(), new()

    def _prefers_key_values(self, shape: Shape) -> bool:
        if self.low_precision:
            return self.policy.form != "always"
        return self.policy.prefers_key_values(shape, functools.partial(self.machine, self.beam_size))

    def store(self, attention: MultiheadAttention, key_values: KeyValues) -> None:
        """K and V replace the layer's input."""
        super().store(attention, key_values)
        self.inputs.pop(attention, None)

    def states_of(self, attention: MultiheadAttention) -> Tensor:
        return self.inputs[attention]

    @property
    def device(self) -> torch.device:
        return self.lengths.device  # of empty prompts there are no states

    def any_states(self) -> Tensor:
        if self.inputs:
            return next(iter(self.inputs.values()))
        return next(iter(self.key_values.values()))[0]

    def select(self, sentences: Tensor) -> None:
        self.lengths = self.lengths[sentences]
        for layer, states in self.inputs.items():
            self.inputs[layer] = states[sentences]
        super().select(sentences)

    def nbytes(self) -> int:
        return tensor_bytes(*self.inputs.values()) + super().nbytes()


@dataclass(frozen=True)
class Prefill(InIncrementalState):
    """Prompts that go through the decoder in parallel; each layer records them in the cache.

    With an incremental state, fairseq's decoder looks at the newest token of each row only. So every token is a row of
    its own here, [n' * b'], ordered by position and then by sentence; attention sees them as [n', b'].
    """

    KEY = "fairseq_el.prefill"

    cache: PromptCache
    sentences: slice  # b' of the batch
    longest: int  # n'

    @classmethod
    def rows(cls, tokens: Tensor) -> Tensor:
        """[b', n'] -> [n' * b', 1], as the decoder takes them."""
        return tokens.T.reshape(-1, 1)

    def by_position(self, x: Tensor) -> Tensor:
        """[..., n' * b', ..., d] -> [n', b', d]"""
        return x.reshape(self.longest, -1, x.size(-1))

    def positions(self, rows: int) -> Tensor:
        """[n' * b'], from 1."""
        counted = torch.arange(1, self.longest + 1, device=self.cache.lengths.device)
        return counted.repeat_interleave(rows // self.longest)


class SelfAttentionCache(InIncrementalState):
    """Keys and values of all tokens generated so far, written once and never moved.

    Each step appends x slots per sentence. A mask says which slots of its sentence are the past of a beam, so following
    the beams means reordering the mask. Memory grows in blocks of steps.
    """

    KEY = "fairseq_el.self_attention"
    BLOCK_STEPS = 16

    def __init__(
        self, beam_size: int, device: torch.device | str = "cpu", low_precision: str | None = None
    ):
        self.beam_size = beam_size
        self.low_precision = low_precision
        self.device = torch.device(device)
        self.used = 0
        self.grew = False  # whether the last step allocated, and left gaps in sizes that nothing needs again
        self.beam_mask = torch.ones(0, beam_size, 0, dtype=torch.bool)  # [b, x, capacity], False at a beam's own past
        self.others = ~torch.eye(beam_size, dtype=torch.bool, device=device)  # [x, x], the slots of other beams
        self.slots: dict[MultiheadAttention, KeyValues] = {}  # [b, h, capacity, d_k] each
        self.layer_specs: dict[nn.Module, LayerSpec | None] = {}  # of layers that are one kernel, for this batch

    def begin_step(self, padded: Tensor) -> None:
        """Opens the slots of this step: one per beam, which only that beam attends to.

        padded: [b * x], True where the newest token is padding, which no beam attends to. May be on the host.
        """
        x, b = self.beam_size, padded.numel() // self.beam_size
        if self.grew and self.device.type == "cpu" and self.nbytes() > TRIM_FROM_BYTES:
            heap.trim()
        self.grew = self.used + x > self.beam_mask.size(2)
        if self.grew:
            grown = torch.ones(b, x, self.used + x * self.BLOCK_STEPS, dtype=torch.bool, device=self.device)
            if self.used:
                grown[:, :, : self.used] = self.beam_mask[:, :, : self.used]
            self.beam_mask = grown
        hidden = self.others
        if padded.is_cuda or padded.any():  # on the host it costs nothing to see that there is no padding
            hidden = hidden | padded.view(b, x, 1).to(self.device)
        self.beam_mask[:, :, self.used : self.used + x] = hidden
        self.used += x

    def append(self, attention: MultiheadAttention, k: Tensor, v: Tensor) -> Slots:
        """Takes one layer's newest keys and values, [b, h, x, d_k] each, and returns all slots of the layer. Attention
        to them writes the newest ones, where it can."""
        slots = self.slots_of(attention, k.size(1), k.size(3), like=k)._replace(newest=(k, v))
        return slots if ops.writes_slots(k) else slots.written()

    def slots_of(self, attention: MultiheadAttention, heads: int, head_dim: int, like: Tensor) -> Slots:
        """One layer's slots, with room for the newest keys and values. like: has their device and precision."""
        stored = self.slots.get(attention)
        b, _, capacity = self.beam_mask.shape
        if stored is None or stored[0].size(2) < capacity:
            shape = (b, heads, capacity, head_dim)
            dtype = cache_dtype(self.low_precision, like.dtype)
            grown = like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=dtype)
            for old, new in zip(stored or (), grown):
                new[:, :, : old.size(2)] = old
            self.slots[attention] = stored = grown
        return Slots(*stored, self.beam_mask, self.used)

    def reorder(self, new_order: Tensor) -> None:
        """new_order: [b' * x], the old row that each new row continues."""
        x = self.beam_size
        rows, capacity = self.beam_mask.size(0) * x, self.beam_mask.size(2)
        self.beam_mask = self.beam_mask.view(rows, capacity)[new_order.to(self.device)].view(-1, x, capacity)
        if new_order.numel() < rows:
            sentences = kept_sentences(new_order, x).to(self.device)
            self.slots = {
                layer: (keys[sentences], values[sentences]) for layer, (keys, values) in self.slots.items()
            }

    def nbytes(self) -> int:
        return tensor_bytes(self.beam_mask, *(t for pair in self.slots.values() for t in pair))
