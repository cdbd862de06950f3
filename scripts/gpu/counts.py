"""Kernels that a generation launches on a GPU, with their FLOPs and bytes, counted without one.

The model runs on the tests' simulated device, at the paper's sizes, without arithmetic. Layers of a stack are alike, so
models of one and of two layers tell what any number of them costs. A step's cost grows linearly with the tokens behind
it, so two steps tell what any step costs.
"""

import functools
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel
from fairseq.modules import MultiheadAttention
from fairseq.search import BeamSearch, DiverseBeamSearch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

import fairseq_el
from bench.environment import ROOT
from bench.tasks import Model, Task
from fairseq_el.checkpoints.format import configuration, quiet, training_args
from fairseq_el.checkpoints.meta_init import NoCopies, make_empty_attributes_real
from fairseq_el.generation.generator import ELSequenceGenerator
from fairseq_el.generation.language import ELLanguageGenerator
from fairseq_el.kernels.packing import pack
from fairseq_el.kernels.triton import library

sys.path.append(str(ROOT / "tests"))
from simulated.costs import Kernel  # noqa: E402  (in tests/)
from simulated.shapes import ShapesOnlyDevice  # noqa: E402
from simulated.triton import SimulatedKernels  # noqa: E402

EARLY, LATE = 3, 11  # steps that are counted


@dataclass
class Phase:
    """Kernels, where the host waits, and the most memory: of a source's encoding, or of one decoding step."""

    kernels: Counter[Kernel]
    reads: int
    peak: int

    def with_layers(self, other: "Phase", layers: int) -> "Phase":
        """self: of one layer, other: of two."""
        more = layers - 1
        kernels = Counter(self.kernels)
        for kernel in {*other.kernels, *self.kernels}:
            kernels[kernel] += more * (other.kernels[kernel] - self.kernels[kernel])
        return Phase(
            kernels, self.reads + more * (other.reads - self.reads), self.peak + more * (other.peak - self.peak)
        )


@dataclass
class Generation:
    source: Phase
    first: Phase  # step, in which multi-head attention builds its keys and values
    early: Phase
    late: Phase


class OldReleaseAttention(MultiheadAttention):
    """Of fairseq 0.9, the paper's baseline: keys and values of the source follow the beams at every step too."""

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> dict:
        cached = self._get_input_buffer(incremental_state)
        for name, value in cached.items():
            if value is not None:
                cached[name] = value.index_select(0, new_order)
        return self._set_input_buffer(incremental_state, cached)


class EnoughCounted(Exception):
    pass


def count_generation(
    task: Task, search: str, batch: int, length: int, system: str, dtype: torch.dtype, old_release: bool = True
) -> Generation:
    """Of sources with so many tokens. system: `baseline` is multi-head attention with a cache for every beam, `always`
    EL-attention of this package by torch's operations, `triton` by its Triton kernels. old_release: whether the
    baseline moves the source's keys and values with the beams, as the paper's did."""
    one, two = (count_phases(task, search, batch, length, system, dtype, layers, old_release) for layers in (1, 2))
    return Generation(*(a.with_layers(b, task.model.layers) for a, b in zip(one, two)))


def count_phases(
    task: Task, search: str, batch: int, length: int, system: str, dtype: torch.dtype, layers: int, old_release: bool
) -> list[Phase]:
    """Of the source, and of the first, an early and a late step."""
    model, dictionary = build(task.model, layers)
    device = ShapesOnlyDevice(fuses_attention=system != "baseline")
    kernels = SimulatedKernels(device) if system == "triton" else None
    system = "always" if system == "triton" else system
    with device, torch.no_grad(), mock.patch.object(library, "kernels_on", lambda device: kernels):
        if system == "baseline":
            for layer in model.decoder.layers if old_release else ():
                for attention in filter(None, (layer.self_attn, layer.encoder_attn)):
                    attention.__class__ = OldReleaseAttention
        else:
            model = fairseq_el.accelerate(model)
        model.eval().cuda().to(dtype)
        if system != "baseline":
            pack(model)
        generator = build_generator(task, search, system, model, dictionary)
        fills_cache = task.model.is_language_model and system == "baseline"
        with phases(device, generator, fills_cache, length) as found:
            device.reset()
            has_prefix = task.model.is_language_model and not fills_cache
            generator.generate([model], **arguments(has_prefix, batch, length, dictionary))
    return found


def build(model: Model, layers: int) -> tuple[BaseFairseqModel, Dictionary]:
    """A stock model of so many layers, without numbers."""
    checkpoint, dictionary = model.checkpoint, make_dictionary(model.checkpoint.vocabulary)
    depth = {"decoder_layers": layers, **({} if model.is_language_model else {"encoder_layers": layers})}
    kind = "language_modeling" if model.is_language_model else "translation"
    names = ("dictionary", "source_dictionary", "target_dictionary", "output_dictionary")
    task = Namespace(**dict.fromkeys(names, dictionary))
    with quiet():
        settings = configuration(training_args(checkpoint.arch, kind, 1, {**checkpoint.overrides, **depth})).model
    with torch.device("meta"), NoCopies():
        built = ARCH_MODEL_REGISTRY[checkpoint.arch].build_model(settings, task)
    make_empty_attributes_real(built)
    return built, dictionary


@functools.cache
def make_dictionary(rows: int) -> Dictionary:
    dictionary = Dictionary()
    for number in range(rows - len(dictionary)):
        dictionary.add_symbol(str(number))
    return dictionary


def build_generator(
    task: Task, search: str, system: str, model: BaseFairseqModel, dictionary: Dictionary
) -> SequenceGenerator:
    options: dict[str, Any] = {"beam_size": task.beam(search), "max_len_b": 500}
    if search == "diverse":
        options["search_strategy"] = DiverseBeamSearch(dictionary, task.beam(search), 0.2)
    elif system == "baseline":
        options["search_strategy"] = BeamSearch(dictionary)
    if system == "baseline":
        generator = SequenceGenerator([model], dictionary, **options)
        if task.model.shares_cache:  # between beams, which the paper's baseline doesn't
            model.set_beam_size(1)
            vars(model.encoder).pop("reorder_encoder_out", None)
        return generator
    if task.model.is_language_model:
        return ELLanguageGenerator(
            [model], dictionary, el_attention=system, max_new_tokens=100, score_prompts=False, **options
        )
    return ELSequenceGenerator([model], dictionary, el_attention=system, **options)


def arguments(has_prefix: bool, batch: int, length: int, dictionary: Dictionary) -> dict[str, Any]:
    """Of `generate`: sources, or prompts, without padding."""
    tokens = torch.full((batch, length), dictionary.nspecial).cuda()
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.full((batch,), length).cuda()}}
    return {"sample": sample, **({"prefix_tokens": tokens} if has_prefix else {})}


@contextmanager
def phases(
    device: ShapesOnlyDevice, generator: SequenceGenerator, fills_cache: bool, length: int
) -> Iterator[list[Phase]]:
    """Collects what is counted between one call of the decoder and the next, and ends the generation when all is.

    fills_cache: whether the generator gets no prompt, but a cache as after one of this length.
    """
    found: list[Phase] = []
    decode, steps = generator.model.forward_decoder, 0

    def decoding(tokens: Tensor, encoder_outs, states, temperature: float = 1.0):
        nonlocal steps
        if steps in (0, 1, EARLY, LATE):
            found.append(Phase(device.kernels, device.reads, device.peak))
        if steps == LATE:
            raise EnoughCounted
        device.reset()
        if steps == 0 and fills_cache:
            found[0] = prefill(device, generator.model.single_model, states[0], tokens.size(0), length)
            device.reset()
        steps += 1
        return decode(tokens, encoder_outs, states, temperature)

    with mock.patch.object(generator.model, "forward_decoder", decoding):
        try:
            yield found
        except EnoughCounted:
            pass


def prefill(device: ShapesOnlyDevice, model: BaseFairseqModel, state: dict, rows: int, length: int) -> Phase:
    """As transformers 3.0 does, the paper's baseline for GPT-2: the prompt of every beam, and logits for all of it."""
    model.decoder(torch.full((rows, length), 5).cuda())
    for layer in model.decoder.layers:
        attention, weight = layer.self_attn, layer.self_attn.k_proj.weight
        kept = weight.new_empty(2, rows, attention.num_heads, length, attention.head_dim)
        buffer = {"prev_key": kept[0], "prev_value": kept[1], "prev_key_padding_mask": None}
        attention._set_input_buffer(state, buffer)
    return Phase(device.kernels, device.reads, device.peak)
