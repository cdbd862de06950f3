"""A task that measures the bytes that stock fairseq caches for its sources.

`--user-dir fairseq_el --task stock_cache_meter` generates with the stock model, the stock
attention and the stock generator. After every decoding step it adds up the live tensors: the keys
and values that cross-attention has cached, and the encoder's output kept beside them. At exit it
prints the largest sum to standard error.
"""

import atexit
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import Tensor


def cached_keys_and_values(model, incremental_state: dict) -> Iterable[Tensor]:
    """The tensors that the model's cross-attention layers have cached so far."""
    for layer in model.decoder.layers:
        if layer.encoder_attn is not None:
            cache = layer.encoder_attn.get_incremental_state(incremental_state, "attn_state") or {}
            yield from (cache[key] for key in ("prev_key", "prev_value") if key in cache)


def encoder_tensors(encoder_out: dict[str, list[Tensor]]) -> Iterable[Tensor]:
    """Everything the encoder returned that is still held: output, embedding, mask, lengths."""
    for tensors in encoder_out.values():
        yield from tensors


def size_in_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class MeteredEnsemble(EnsembleModel):
    """Stock fairseq's ensemble, which measures its source state after each step."""

    def __init__(self, models):
        super().__init__(models)
        self.peak_bytes = 0
        atexit.register(self.report)

    def forward_decoder(self, tokens, encoder_outs, incremental_states, temperature=1.0):
        step = super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        held = sum(
            size_in_bytes(cached_keys_and_values(model, state))
            for model, state in zip(self.models, incremental_states, strict=True)
        ) + sum(size_in_bytes(encoder_tensors(output)) for output in encoder_outs)
        self.peak_bytes = max(self.peak_bytes, held)
        return step

    def report(self) -> None:
        print(f"stock | peak source state: {self.peak_bytes} bytes", file=sys.stderr)


class MeteredGenerator(SequenceGenerator):
    def __init__(self, models, *args, **kwargs):
        super().__init__(MeteredEnsemble(models), *args, **kwargs)


@dataclass
class MeteredConfig(TranslationConfig):
    """The stock task's options; fairseq wants a class for each task it registers."""


class MeteredTask(TranslationTask):
    def build_generator(self, models, args, seq_gen_cls=None, **kwargs):
        return super().build_generator(models, args, MeteredGenerator, **kwargs)
