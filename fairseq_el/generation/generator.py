"""`SequenceGenerator` with small caches: stock fairseq's search over a decoder that keeps H once per sentence.

The search loop is fairseq's own, `SequenceGenerator._generate`, inherited unchanged. What differs is what it calls. For
each batch, `ELSequenceGenerator._generate_batch` resets the `DecodingState` and starts the loop:

    ELEnsemble.forward_encoder             encoder, then one `CrossAttentionCache` per model

For each step, the loop calls

    ELEnsemble.reorder_incremental_state   `SelfAttentionCache.reorder`: the beam mask follows the beams
    ELEnsemble.reorder_encoder_out         `DecodingState.reorder`: drops finished sentences
    ELEnsemble.forward_decoder
      SelfAttentionCache.begin_step        opens one slot per beam
      CrossAttentionCache.begin_step       `AttentionPolicy`: do layers switch to K and V in this step?
      fairseq's decoder, for each layer
        CachedSelfAttention.forward        appends K and V to the slots, then `ops.decoder_attention`
        ELAttention.forward                `ops.el_attention` on H, or `ops.decoder_attention` on K and V
        or FusedDecoderLayer.fused_step    all of a layer as one kernel, on a CPU, once the layer has K and V
      ops.logsumexp                        into `DecodingState.log_normaliser`, for the search
    repeat_ngram_blocker                   `NGramBlock`, if asked for
    LogitBeamSearch.step                   candidates from logits; normalises only them
    finalize_hypos                         fairseq's

Caches reach the layers in `incremental_state`, the argument that fairseq has for such state. The generator, the
ensemble, the search and the n-gram block share the `DecodingState`. `language` describes what language models add. With
a model on a GPU, the loop of a beam search runs on the host (see `device_logits`).
"""


from fairseq.models import BaseFairseqModel
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import BeamSearch, DiverseBeamSearch, Search
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_el.generation.device_logits import DeviceLogits
from fairseq_el.generation.ensemble import ELEnsemble, attention_shape, source_of
from fairseq_el.generation.profiler import Profile
from fairseq_el.generation.search import LogitBeamSearch, NGramBlock
from fairseq_el.generation.state import DecodingState
from fairseq_el.models.costs import largest_batch
from fairseq_el.models.policy import AttentionPolicy

Hypotheses = list[list[dict[str, Tensor]]]
"""Of each sentence, best first."""


class ELSequenceGenerator(SequenceGenerator):
    """Takes the arguments of fairseq's `SequenceGenerator` and finds the same hypotheses.

    Two differences in the result: `hypo["attention"]` is empty unless alignments are asked for, because keeping it
    costs more than all of H; and hypotheses of a beam search on a GPU are on the host. Like stock's, a generator serves
    one call at a time; several may share a model.
    """

    model: ELEnsemble
    search: Search
    repeat_ngram_blocker: NGramRepeatBlock | NGramBlock | None

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
        policy, state = AttentionPolicy(el_attention, share), DecodingState()
        super().__init__(self.build_ensemble(models, policy, state, wants_weights), tgt_dict, *args, **kwargs)
        self.policy, self.state = policy, state
        if type(self.search) is BeamSearch and self.model.offers_logits():
            self.search = LogitBeamSearch(tgt_dict, state)
            self.model.returns_logits = True
        self._set_ngram_block(el_stock_ngrams)

    def build_ensemble(
        self, models: list[BaseFairseqModel], policy: AttentionPolicy, state: DecodingState, wants_weights: bool
    ) -> ELEnsemble:
        return ELEnsemble(models, policy, state, wants_weights)

    @property
    def profile(self) -> Profile:
        return self.model.profile

    def _set_ngram_block(self, as_stock: bool) -> None:
        """Stock's own block works with its CUDA extension alone: without, it compares with the padding behind the
        hypothesis and never blocks anything (fairseq issue 5206), for which it takes a loop over all rows."""
        stock = self.repeat_ngram_blocker
        if isinstance(stock, NGramRepeatBlock):
            ignored = as_stock and not stock.use_extension
            self.repeat_ngram_blocker = None if ignored else self.build_ngram_block(stock.no_repeat_ngram_size)

    def build_ngram_block(self, size: int) -> NGramBlock:
        return NGramBlock(size)

    def _generate(self, sample, prefix_tokens=None, constraints=None, bos_token=None) -> Hypotheses:
        if isinstance(self.search, DiverseBeamSearch):
            # It keeps one entry per row of the batch but looks it up by sentence id, which fails in stock
            # fairseq as soon as an id exceeds the batch size; without ids, the search counts rows.
            sample = {name: value for name, value in sample.items() if name != "id"}
        if not self.model.accelerated:
            return self._search(sample, prefix_tokens, constraints, bos_token)
        if self._searches_on_host(sample["net_input"]):
            sample, prefix_tokens = to_host(sample), to_host(prefix_tokens)
        try:
            with self.profile.time("generate"):
                return self._generate_batch(sample, prefix_tokens, constraints, bos_token)
        finally:
            self.state.reset()  # frees the caches

    def _searches_on_host(self, net_input: dict[str, Tensor]) -> bool:
        """Whether fairseq's loop runs on the host while the model is on a GPU (see `device_logits`). The loop's device
        is that of its sample, which speech would have to copy for it."""
        has_tokens = not source_of(net_input).is_floating_point()
        return self.model.returns_logits and not self.model.wants_weights and self.lm_model is None and has_tokens

    def _prefix_tokens(self, step: int, lprobs, scores, tokens, prefix_tokens, beam_size: int):
        if not isinstance(lprobs, DeviceLogits):
            return super()._prefix_tokens(step, lprobs, scores, tokens, prefix_tokens, beam_size)
        moved = (x.to(lprobs.scores.device) for x in (scores, tokens, prefix_tokens))
        found, tokens, scores = super()._prefix_tokens(step, lprobs.scores, *moved, beam_size)
        return DeviceLogits(found, lprobs.checks_finite), tokens.cpu(), scores.cpu()

    def _search(self, sample, prefix_tokens=None, constraints=None, bos_token=None) -> Hypotheses:
        """fairseq's search loop."""
        return super()._generate(sample, prefix_tokens, constraints, bos_token)

    def _generate_batch(self, sample, prefix_tokens, constraints, bos_token) -> Hypotheses:
        """In parts whose state fits the memory budget."""
        b, n = source_of(sample["net_input"]).shape[:2]
        max_steps = self._longest_output(sample["net_input"], n) + 1
        expected_steps = max(self.min_len + 1, self.profile.mean_length())
        normalised_steps = closed_prefix_length(prefix_tokens, self.eos)
        hypotheses: Hypotheses = []
        for rows in self._rows_that_fit(b, n, max_steps):
            self.state.reset(max_steps, expected_steps, normalised_steps)
            part, prefix, constrained = (take_rows(x, rows, b) for x in (sample, prefix_tokens, constraints))
            hypotheses += self._search(part, prefix, constrained, bos_token)
        self.profile.count(hypotheses)
        return hypotheses

    def _longest_output(self, net_input: dict[str, Tensor], source_length: int) -> int:
        if self.match_source_len:
            return int(net_input["src_lengths"].max()) if "src_lengths" in net_input else source_length
        return min(int(self.max_len_a * source_length + self.max_len_b), self.max_len - 1)

    def _rows_that_fit(self, b: int, n: int, max_steps: int, layers_with_states: int = 1) -> list[slice]:
        """The batch in parts whose state fits the memory budget even without K and V. n: tokens of a prefix.

        With `match_source_len` it stays in one part: outputs depend on the longest source of the batch.
        """
        fits = b
        if self.policy.budget and not self.match_source_len:
            model = self.model.single_model
            shape = attention_shape(model, 1, self.beam_size, n)
            layers = len(model.decoder.layers)
            fits = largest_batch(
                shape, layers, self.policy.budget, max_steps, layers_with_states=layers_with_states
            )
            fits = min(max(fits, 1), b)
        return [slice(start, min(start + fits, b)) for start in range(0, b, fits)]


def closed_prefix_length(prefix_tokens: Tensor | None, eos: int) -> int:
    """Steps in which scores must be normalised before the search sees them: those of a prefix [b, n] that contains the
    end of a text. There the search loop copies scores from beam to beam."""
    if prefix_tokens is None or not prefix_tokens.eq(eos).any():
        return 0
    return prefix_tokens.size(1)


def to_host(value):
    """All tensors of a sample on the CPU."""
    if isinstance(value, dict):
        return {name: to_host(entry) for name, entry in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


def take_rows(value, rows: slice, batch: int):
    """The rows of a part of the batch, in all tensors of a sample that have one row per sentence."""
    if isinstance(value, dict):
        return {name: take_rows(entry, rows, batch) for name, entry in value.items()}
    if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == batch:
        return value[rows]
    return value


class ELSequenceGeneratorWithAlignment(SequenceGeneratorWithAlignment, ELSequenceGenerator):
    """The same for `--print-alignment`, where attention weights are part of the result."""

    def __init__(self, models, tgt_dict, **kwargs):
        super().__init__(models, tgt_dict, wants_weights=True, **kwargs)
