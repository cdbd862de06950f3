"""The models of a generator, as fairseq's search loop calls them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import EnsembleModelWithAlignment
from torch import Tensor

from fairseq_el.errors import UserError
from fairseq_el.generation.device_logits import DeviceLogits
from fairseq_el.generation.non_finite import check_finite
from fairseq_el.generation.profiler import Profile
from fairseq_el.generation.state import DecodingState
from fairseq_el.kernels import ops
from fairseq_el.models.caches import CrossAttentionCache, SelfAttentionCache, cache_dtype
from fairseq_el.models.conversion import is_accelerated
from fairseq_el.models.costs import Shape
from fairseq_el.models.policy import AttentionPolicy


def prefix_attention(model: BaseFairseqModel) -> MultiheadAttention:
    """An attention layer to what the beams of a sentence share: the source, or else the prompt."""
    layer = model.decoder.layers[0]
    return layer.encoder_attn or layer.self_attn


def attention_shape(model: BaseFairseqModel, batch: int, beam: int, length: int) -> Shape:
    attention = prefix_attention(model)
    # not that of the first parameter: a packed model's embedding may be in half precision
    computed = model.decoder.layers[0].final_layer_norm.weight.dtype
    size = cache_dtype(low_precision_of(model), computed).itemsize
    return Shape(batch, beam, length, attention.num_heads, attention.kdim, size)


def low_precision_of(model: BaseFairseqModel) -> str | None:
    return getattr(model, "low_precision", None)


def source_of(net_input: dict[str, Tensor]) -> Tensor:
    """[b, n], or [b, n, features]; fairseq's speech datasets have names of their own for it."""
    return next(net_input[name] for name in ("src_tokens", "source", "features") if name in net_input)


def newest_attention(extra: dict | None) -> Tensor | None:
    """[b * x, n], of what a decoder returns beside its logits."""
    attention = extra["attn"] if extra else None
    if isinstance(attention, list):
        attention = attention[0]
    return None if attention is None else attention[:, -1, :]


class ELEnsemble(EnsembleModelWithAlignment):
    """Runs an ensemble of EL models. An ensemble that contains any other model runs as in stock fairseq."""

    def __init__(
        self,
        models: list[BaseFairseqModel],
        policy: AttentionPolicy,
        state: DecodingState,
        wants_weights: bool = False,
    ):
        super().__init__(models)
        self.accelerated = all(is_accelerated(model) for model in models)
        self.policy = policy
        self.state = state
        self.wants_weights = wants_weights
        self.beam_size = 1
        self.returns_logits = False  # set if the search takes them
        self.checks_finite = False  # whether NaN and infinity raise an error, unlike in stock fairseq
        self.profile = Profile()

    @property
    def device(self) -> torch.device:
        return next(self.single_model.parameters()).device

    def set_decoder_beam_size(self, beam_size: int) -> None:
        self.beam_size = beam_size
        if not self.accelerated:
            super().set_decoder_beam_size(beam_size)

    def offers_logits(self) -> bool:
        """True if log-probabilities are a plain softmax of one model's logits."""
        decoder = getattr(self.single_model, "decoder", None)
        return (
            self.accelerated
            and self.models_size == 1
            and isinstance(decoder, TransformerDecoderBase)
            and decoder.adaptive_softmax is None
            and type(decoder).get_normalized_probs is TransformerDecoderBase.get_normalized_probs
        )

    # ---- before the first step

    def forward_encoder(self, net_input: dict[str, Tensor]):
        """Returns one cache per model, which the search loop passes on as `encoder_outs`."""
        if not self.accelerated:
            return super().forward_encoder(net_input)
        net_input = self.to_device(net_input)
        source = source_of(net_input)
        self.check_source_length(source)
        with self.profile.time("encoder"):
            self.state.prefix_caches = [
                CrossAttentionCache.from_encoder_out(
                    encoder_out,
                    policy=self.policy,
                    wants_weights=self.wants_weights,
                    reserved_bytes=self.beam_bytes(model, source.size(0)),
                    expected_steps=self.state.expected_steps,
                    low_precision=low_precision_of(model),
                )
                for model, encoder_out in zip(self.models, super().forward_encoder(net_input))
            ]
        return self.state.prefix_caches

    def to_device(self, net_input: dict[str, Tensor]) -> dict[str, Tensor]:
        """Moves what the search loop keeps on the host."""
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in net_input.items()}

    def check_source_length(self, source: Tensor) -> None:
        """source: [b, n] tokens; or audio or its features, whose length only the task limits."""
        encoders = [m.encoder for m in self.models if isinstance(m.encoder, TransformerEncoderBase)]
        longest = min((encoder.max_positions() for encoder in encoders), default=source.size(1))
        if source.size(1) > longest:
            raise UserError(
                f"a source of {source.size(1)} tokens is longer than the model's {longest} positions; "
                "cut sources with --truncate-source or leave them out with "
                "--skip-invalid-size-inputs-valid-test"
            )

    def beam_bytes(self, model: BaseFairseqModel, batch: int) -> int:
        """What the self-attention cache may grow to."""
        layers = model.decoder.layers
        size = attention_shape(model, batch, self.beam_size, 1).element_size
        width = layers[0].self_attn.embed_dim
        return 2 * len(layers) * batch * self.beam_size * self.state.max_steps * width * size

    # ---- each step

    def forward_decoder(self, tokens, encoder_outs, incremental_states, temperature: float = 1.0):
        """tokens: [b * x, steps so far]; returns log-probabilities, or logits if the search takes them,
        [b * x, vocabulary], and attention or None."""
        if not self.accelerated:
            return self._checked(super().forward_decoder(tokens, encoder_outs, incremental_states, temperature))
        caches = self.state.prefix_caches
        for model, prefix, layer_state in zip(self.models, caches, incremental_states):
            if SelfAttentionCache.KEY not in layer_state:
                layer_state[SelfAttentionCache.KEY] = SelfAttentionCache(
                    self.beam_size, self.device, low_precision_of(model)
                )
            past = layer_state[SelfAttentionCache.KEY]
            past.begin_step(padded=tokens[:, -1].eq(model.decoder.padding_idx))
            prefix.begin_step(attention_shape(model, prefix.batch(), self.beam_size, prefix.length()))
            layer_state[prefix.KEY] = prefix
        self.profile.steps += 1
        with self.profile.time("decoder"):
            result = self._decode(tokens, incremental_states, temperature)
        for prefix in caches:
            self.profile.seconds["K/V build"] += prefix.build_seconds
            prefix.build_seconds = 0.0
        self.profile.record_state(
            sum(prefix.nbytes() for prefix in caches),
            sum(layer_state[SelfAttentionCache.KEY].nbytes() for layer_state in incremental_states),
        )
        return result

    def decoder_inputs(self) -> Sequence[dict | None]:
        """For each model what its decoder takes as the encoder's output."""
        caches = self.state.prefix_caches
        return [cache.as_encoder_out() for cache in caches if isinstance(cache, CrossAttentionCache)]

    def _decode(self, tokens, incremental_states, temperature):
        encoder_outs = self.decoder_inputs()
        if not self.returns_logits:
            return self._checked(super().forward_decoder(tokens, encoder_outs, incremental_states, temperature))
        logits, extra = self.single_model.decoder(
            tokens, encoder_out=encoder_outs[0], incremental_state=incremental_states[0]
        )
        if logits.is_cuda:
            return self._normalised_on_device(logits[:, -1, :], temperature, tokens.device), newest_attention(extra)
        logits = logits[:, -1, :].float()
        if temperature != 1.0:  # a pass over the vocabulary
            logits = logits.div_(temperature)
        log_normaliser = ops.logsumexp(logits)
        if self.checks_finite:
            check_finite(log_normaliser)
        if tokens.size(1) <= self.state.normalised_steps:
            logits -= log_normaliser.unsqueeze(1)
            log_normaliser = torch.zeros_like(log_normaliser)
        self.state.log_normaliser = log_normaliser
        return logits, newest_attention(extra)

    def _normalised_on_device(
        self, logits: Tensor, temperature: float, search_device: torch.device
    ) -> Tensor | DeviceLogits:
        """Log-probabilities: on a GPU a softmax is one launch, and a logsumexp nine. logits: [b * x, vocabulary]."""
        if temperature != 1.0:
            logits = logits / temperature
        scores = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        self.state.log_normaliser = None
        if search_device != scores.device:
            return DeviceLogits(scores, self.checks_finite)
        return self._checked((scores, None))[0]

    def _checked(self, found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """found: log-probabilities, [b * x, vocabulary], and attention. NaN in a row shows in each of its numbers."""
        if self.checks_finite:
            check_finite(found[0][:, self.single_model.decoder.dictionary.eos()])
        return found

    # ---- between steps

    def reorder_encoder_out(self, encoder_outs, new_order):
        """The search loop first asks for one row per beam, which is not needed here, then follows the beams."""
        if not self.accelerated:
            return super().reorder_encoder_out(encoder_outs, new_order)
        self.state.reorder(new_order, self.beam_size)
        return encoder_outs

    def reorder_incremental_state(self, incremental_states, new_order) -> None:
        if not self.accelerated:
            return super().reorder_incremental_state(incremental_states, new_order)
        for layer_state in incremental_states:
            past = SelfAttentionCache.of(layer_state)
            if past is not None:
                past.reorder(new_order)
