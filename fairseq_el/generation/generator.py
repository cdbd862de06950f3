"""A cache-light `SequenceGenerator`: stock fairseq's search over a decoder that keeps H once per sentence.

The search loop is fairseq's own, inherited. What differs is what it calls: the encoder's output becomes a
`SourceMemory`, the decoder's past a `BeamHistory`, and following the beams moves neither.
"""

from collections.abc import Sequence

import torch
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import BeamSearch, DiverseBeamSearch, Search
from fairseq.sequence_generator import (
    EnsembleModel,
    EnsembleModelWithAlignment,
    SequenceGenerator,
    SequenceGeneratorWithAlignment,
)
from torch import Tensor

from fairseq_el.errors import UserError
from fairseq_el.generation.non_finite import check_finite
from fairseq_el.generation.profiler import Profile
from fairseq_el.generation.search import LogitBeamSearch, NGramBlock
from fairseq_el.kernels import ops
from fairseq_el.models.caches import BeamHistory, SharedMemory, SourceMemory
from fairseq_el.models.conversion import is_accelerated
from fairseq_el.models.policy import Decision, Shape, largest_batch


def shared_attention(model: BaseFairseqModel) -> MultiheadAttention:
    """An attention layer to what the beams of a sentence share: the source, or else the prompt."""
    layer = model.decoder.layers[0]
    return layer.encoder_attn or layer.self_attn


def attention_shape(model: BaseFairseqModel, batch: int, beam: int, length: int) -> Shape:
    attention = shared_attention(model)
    # of the arithmetic, which a packed model's embedding, its first parameter, doesn't tell
    size = attention.k_proj.weight.element_size()
    return Shape(batch, beam, length, attention.num_heads, attention.kdim, size)


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
    """Runs an ensemble of EL models; an ensemble with any other model in it runs as in stock fairseq."""

    def __init__(self, models: list[BaseFairseqModel], decision: Decision, wants_weights: bool = False):
        super().__init__(models)
        self.accelerated = all(is_accelerated(model) for model in models)
        self.decision = decision
        self.wants_weights = wants_weights
        self.beam_size = 1
        self.longest_output = 0
        self.logit_search: LogitBeamSearch | None = None
        self.closed_prefix = 0
        self.checks_finite = False  # or whether NaN and infinity stop it, unlike stock fairseq
        self.profile = Profile()

    def set_decoder_beam_size(self, beam_size: int) -> None:
        self.beam_size = beam_size
        if not self.accelerated:
            super().set_decoder_beam_size(beam_size)

    def offers_logits(self) -> bool:
        """True where log-probabilities are a plain softmax of one model's logits."""
        decoder = getattr(self.single_model, "decoder", None)
        return (
            self.accelerated
            and self.models_size == 1
            and decoder.adaptive_softmax is None
            and type(decoder).get_normalized_probs is TransformerDecoderBase.get_normalized_probs
        )

    def follow(self, prefix_tokens: Tensor | None, eos: int) -> None:
        """Prepares for a prefix that the search must follow, [b, n]. Where one contains the end of a text, the
        search copies scores from beam to beam, so that up to there they must be normalised already."""
        closed = prefix_tokens is not None and bool(prefix_tokens.eq(eos).any())
        self.closed_prefix = prefix_tokens.size(1) if closed else 0

    def forward_encoder(self, net_input: dict[str, Tensor]):
        if not self.accelerated:
            return super().forward_encoder(net_input)
        source = source_of(net_input)
        self.check_source_length(source)
        with self.profile.time("encoder"):
            return [
                SourceMemory.from_encoder_out(
                    encoder_out,
                    decision=self.decision,
                    reserved_bytes=self.beam_bytes(model, source.size(0)),
                    wants_weights=self.wants_weights,
                )
                for model, encoder_out in zip(self.models, super().forward_encoder(net_input))
            ]

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
        """What the history of the beams may grow to."""
        layers = model.decoder.layers
        size = attention_shape(model, batch, self.beam_size, 1).element_size
        width = layers[0].self_attn.embed_dim
        return 2 * len(layers) * batch * self.beam_size * self.longest_output * width * size

    def forward_decoder(self, tokens, encoder_outs, incremental_states, temperature: float = 1.0):
        """tokens: [b * x, steps so far]; returns log-probabilities, or logits if the search takes them,
        [b * x, vocabulary], and attention or None."""
        if not self.accelerated:
            return self._checked(super().forward_decoder(tokens, encoder_outs, incremental_states, temperature))
        memories = self.shared_memories(encoder_outs)
        for model, memory, state in zip(self.models, memories, incremental_states):
            history = state.setdefault(BeamHistory.KEY, BeamHistory(self.beam_size))
            history.advance(padded=tokens[:, -1].eq(model.decoder.padding_idx))
            memory.begin_step(attention_shape(model, memory.batch(), self.beam_size, memory.length()))
            state[memory.KEY] = memory
        with self.profile.time("decoder"):
            result = self._decode(tokens, encoder_outs, incremental_states, temperature)
        for memory in memories:
            self.profile.seconds["K/V build"] += memory.take_build_seconds()
        self.profile.record_state(
            sum(memory.nbytes() for memory in memories),
            sum(BeamHistory.of(state).nbytes() for state in incremental_states),
        )
        return result

    def shared_memories(self, encoder_outs) -> Sequence[SharedMemory]:
        return encoder_outs

    def decoder_inputs(self, encoder_outs) -> Sequence[dict | None]:
        """For each model what its decoder takes as the encoder's output."""
        return [source.as_encoder_out() for source in encoder_outs]

    def _decode(self, tokens, encoder_outs, states, temperature):
        encoder_outs = self.decoder_inputs(encoder_outs)
        if self.logit_search is None:
            return self._checked(super().forward_decoder(tokens, encoder_outs, states, temperature))
        logits, extra = self.single_model.decoder(
            tokens, encoder_out=encoder_outs[0], incremental_state=states[0]
        )
        logits = logits[:, -1, :].float().div_(temperature)
        normaliser = ops.logsumexp(logits)
        if self.checks_finite:
            check_finite(normaliser)
        if tokens.size(1) <= self.closed_prefix:
            logits -= normaliser.unsqueeze(1)
            normaliser = torch.zeros_like(normaliser)
        self.logit_search.normaliser = normaliser
        return logits, newest_attention(extra)

    def _checked(self, found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """found: log-probabilities, [b * x, vocabulary], of which in every row any one tells, and attention."""
        if self.checks_finite:
            check_finite(found[0][:, self.single_model.decoder.dictionary.eos()])
        return found

    def reorder_encoder_out(self, encoder_outs, new_order):
        """The search first asks for one row a beam, which is not needed here, then follows the beams."""
        if not self.accelerated:
            return super().reorder_encoder_out(encoder_outs, new_order)
        for source in encoder_outs:
            source.reorder(new_order, self.beam_size)
        return encoder_outs

    def reorder_incremental_state(self, incremental_states, new_order) -> None:
        if not self.accelerated:
            return super().reorder_incremental_state(incremental_states, new_order)
        for state in incremental_states:
            history = BeamHistory.of(state)
            if history is not None:
                history.reorder(new_order)


class ELSequenceGenerator(SequenceGenerator):
    """Takes what fairseq's `SequenceGenerator` takes and finds the same hypotheses.

    One difference in what is returned: `hypo["attention"]` is empty, unless alignments are asked for, since
    keeping it costs more than all of H. Like stock's, a generator serves one call at a time; models may be
    shared by several.
    """

    ensemble_class = ELEnsemble
    search: Search
    repeat_ngram_blocker: NGramRepeatBlock | None  # or an NGramBlock

    def __init__(
        self,
        models,
        tgt_dict,
        *args,
        el_attention: str = "auto",
        el_memory_budget: int | None = None,
        el_stock_ngrams: bool = False,
        wants_weights: bool = False,
        **kwargs,
    ):
        """el_attention: `auto`, `always` or `never`; el_memory_budget: bytes for the state of a batch;
        el_stock_ngrams: ignore `no_repeat_ngram_size` where stock fairseq does."""
        if isinstance(models, EnsembleModel):
            models = list(models.models)
        share = None if el_memory_budget is None else el_memory_budget // len(models)
        decision = Decision(el_attention, share)
        super().__init__(self.ensemble_class(models, decision, wants_weights), tgt_dict, *args, **kwargs)
        self.decision = decision
        if type(self.search) is BeamSearch and self.model.offers_logits():
            self.search = self.model.logit_search = LogitBeamSearch(tgt_dict)
        self._set_ngram_block(el_stock_ngrams)

    @property
    def profile(self) -> Profile:
        return self.model.profile

    def _set_ngram_block(self, as_stock: bool) -> None:
        """Stock's own block works with its CUDA extension alone: without, it compares with the padding behind the
        hypothesis and never blocks anything (fairseq issue 5206), for which it takes a loop over all rows."""
        stock = self.repeat_ngram_blocker
        if stock is not None and not stock.use_extension:
            self.repeat_ngram_blocker = None if as_stock else self.ngram_block(stock.no_repeat_ngram_size)

    def ngram_block(self, size: int) -> NGramBlock:
        return NGramBlock(size)

    def _generate(self, sample, prefix_tokens=None, constraints=None, bos_token=None):
        if isinstance(self.search, DiverseBeamSearch):
            # It keeps one entry a row of the batch but looks it up by sentence id, which fails in stock
            # fairseq as soon as an id exceeds the batch size; without ids, the search counts rows.
            sample = {name: value for name, value in sample.items() if name != "id"}
        if not self.model.accelerated:
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        b, n = source_of(sample["net_input"]).shape[:2]
        self.model.longest_output = self._longest_output(sample["net_input"], n) + 1
        self.decision.expected_steps = max(self.min_len + 1, self.profile.mean_length())
        self.model.follow(prefix_tokens, self.eos)
        hypotheses: list[list[dict[str, Tensor]]] = []
        with self.profile.time("generate"):
            for rows in self._rows_that_fit(b, n):
                part = take_rows(sample, rows, b)
                hypotheses += super()._generate(
                    part, *(take_rows(x, rows, b) for x in (prefix_tokens, constraints)), bos_token
                )
        self.profile.count(hypotheses)
        return hypotheses

    def _longest_output(self, net_input: dict[str, Tensor], source_length: int) -> int:
        if self.match_source_len:
            return int(net_input["src_lengths"].max()) if "src_lengths" in net_input else source_length
        return min(int(self.max_len_a * source_length + self.max_len_b), self.max_len - 1)

    def _rows_that_fit(self, b: int, n: int) -> list[slice]:
        """The batch in parts whose state fits the memory budget even without K and V."""
        fits = b
        if self.decision.budget:
            model = self.model.single_model
            shape = attention_shape(model, 1, self.beam_size, n)
            layers, length = len(model.decoder.layers), self.model.longest_output
            fits = largest_batch(shape, layers, self.decision.budget, length)
            fits = min(max(fits, 1), b)
        return [slice(start, min(start + fits, b)) for start in range(0, b, fits)]


def take_rows(value, rows: slice, batch: int):
    """The rows of a part of the batch, in all tensors of a sample that have one row a sentence."""
    if isinstance(value, dict):
        return {name: take_rows(entry, rows, batch) for name, entry in value.items()}
    if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == batch:
        return value[rows]
    return value


class ELSequenceGeneratorWithAlignment(SequenceGeneratorWithAlignment, ELSequenceGenerator):
    """The same for `--print-alignment`, where attention weights are part of the result."""

    def __init__(self, models, tgt_dict, **kwargs):
        super().__init__(models, tgt_dict, wants_weights=True, **kwargs)
