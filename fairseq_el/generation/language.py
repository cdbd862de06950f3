"""Generation with language models: prompts are prefilled once per sentence, in parallel, before the search.

Stock fairseq feeds the prompt to the decoder one token per step, for every beam, and forces the search to follow it.
There are two ways to the same hypotheses:

- `_search_behind`: beam search depends on the prompt's score only through a sum. So the search starts behind the
  prompts, each at its own position, and the prompts' scores are put in front of the results.
- `_search_through`: other searches depend on every step (sampling draws random numbers at each). They repeat the forced
  steps as in stock fairseq, but take the scores of the part that all sentences have from prefill.

What a language model adds to a step (see `generator`):

    PromptEnsemble.prefill                 before the loop: one `PromptCache` per model
      fairseq's decoder, for each layer
        RowPositions.forward               positions of all prompt tokens
        PromptAttention.prefill            causal attention; `PromptCache.record`
    PromptEnsemble.forward_decoder         replays a forced step, or runs `ELEnsemble.forward_decoder`
        RowPositions.forward               each row's own position
        PromptAttention.attend             EL-attention to the prompt, or `ops.decoder_attention` to its K and V
      StepBounds.apply                     where each text may end, and must
    LogitBeamSearch.step                   the first step adds to `DecodingState.start_scores`
    ELLanguageGenerator.is_finished        texts end at steps of their own
"""

from dataclasses import dataclass

import torch
from fairseq.models import BaseFairseqModel
from fairseq.search import BeamSearch
from torch import Tensor

from fairseq_el.errors import UserError
from fairseq_el.generation.generator import ELSequenceGenerator, Hypotheses, closed_prefix_length, take_rows
from fairseq_el.generation.prompt_ensemble import PromptEnsemble
from fairseq_el.generation.prompts import Prompts, StepBounds
from fairseq_el.generation.search import LogitBeamSearch, NGramBlock, PromptNGramBlock
from fairseq_el.generation.state import DecodingState
from fairseq_el.models.policy import AttentionPolicy


@dataclass(frozen=True)
class TextLimits:
    """Lengths of whole texts, prompts included, as stock fairseq counts them; and how their scores are ranked."""

    max_len_a: float
    max_len_b: float
    min_len: int
    normalize_scores: bool


class ELLanguageGenerator(ELSequenceGenerator):
    """`ELSequenceGenerator` for models without an encoder, whose source is a prompt.

    As in stock fairseq, lengths count the prompt: `--max-len-b 600` ends a text at 600 tokens, prompt included.
    `max_new_tokens` counts from the end of each prompt instead. Scores cover the prompt too, and so rank texts of
    different lengths. Without `score_prompts`, which saves the output layer's work on every prompt token, they cover
    the new tokens only.
    """

    model: PromptEnsemble
    max_len_a: float
    max_len_b: float
    min_len: int
    normalize_scores: bool

    def __init__(
        self,
        models,
        tgt_dict,
        *args,
        max_new_tokens: int | None = None,
        truncate_prompt: bool = False,
        score_prompts: bool = True,
        **kwargs,
    ):
        super().__init__(models, tgt_dict, *args, **kwargs)
        self.max_new_tokens = max_new_tokens
        self.score_prompts = score_prompts
        self.truncate_prompt = truncate_prompt
        self.limits = TextLimits(self.max_len_a, self.max_len_b, self.min_len, self.normalize_scores)
        if self.model.accelerated:
            # The limits are ours to keep: each text has `StepBounds` of its own. The search loop only needs the number
            # of steps, which it takes from the width of its sample (see `as_sample`).
            self.max_len_a, self.max_len_b, self.min_len, self.normalize_scores = 1, 0, 0, False

    def build_ensemble(
        self, models: list[BaseFairseqModel], policy: AttentionPolicy, state: DecodingState, wants_weights: bool
    ) -> PromptEnsemble:
        return PromptEnsemble(models, policy, state, wants_weights)

    def build_ngram_block(self, size: int) -> NGramBlock:
        return PromptNGramBlock(size, self.state)

    def _generate_batch(self, sample, prefix_tokens, constraints, bos_token) -> Hypotheses:
        sources = sample["net_input"]["src_tokens"]
        if prefix_tokens is None:
            prefix_tokens = sources.new_zeros(sources.size(0), 0)
        lengths = prefix_tokens.ne(self.pad).sum(dim=1)
        opening = self.eos if bos_token is None else bos_token
        source_lengths = sample["net_input"].get("src_lengths")
        if source_lengths is None:  # as stock counts
            source_lengths = (sources.ne(self.eos) & sources.ne(self.pad)).sum(dim=1)
        longest_text = self._longest_text(sources.size(1), source_lengths)
        prompts = self._fit(Prompts(prefix_tokens, lengths, opening), longest_text)
        last = self._last_positions(prompts.lengths, longest_text)
        max_steps = int((last - prompts.lengths).clamp(min=0).max()) + 1
        layers = len(self.model.single_model.decoder.layers)
        b, n = prompts.tokens.shape
        hypotheses: Hypotheses = []
        for rows in self._rows_that_fit(b, n, max_steps, layers_with_states=layers):
            part = prompts.select(rows)
            self.state.reset(max_steps, normalised_steps=closed_prefix_length(part.tokens, self.eos))
            if self._can_start_behind(constraints):
                hypotheses += self._search_behind(part, last[rows])
            else:
                constrained = take_rows(constraints, rows, b)
                hypotheses += self._search_through(part, last[rows], source_lengths[rows], constrained)
        self.profile.count(hypotheses)
        self.profile.tokens -= int(torch.minimum(prompts.lengths, last).sum())
        return hypotheses

    # ---- lengths

    def _longest_text(self, width: int, source_lengths: Tensor) -> int:
        """As stock counts: all tokens after the opening one, without the closing one."""
        limits = self.limits
        longest = min(int(limits.max_len_a * width + limits.max_len_b), self.max_len - 1)
        if self.match_source_len:
            longest = int(source_lengths.max())
        if self.max_new_tokens is None and limits.min_len > longest:
            raise UserError(
                f"--min-len {limits.min_len} is more than the {longest} tokens that --max-len-a, --max-len-b and "
                "the model's positions allow; lower it, or raise --max-len-b"
            )
        return longest

    def _last_positions(self, lengths: Tensor, longest_text: int) -> Tensor:
        """The position at which each text must end, [b]."""
        if self.max_new_tokens is None:
            return lengths.new_full(lengths.shape, longest_text)
        return lengths + self.max_new_tokens

    def _fit(self, prompts: Prompts, longest_text: int) -> Prompts:
        """Makes sure that prompts leave room for the output in the model's positions."""
        new_tokens = self.max_new_tokens
        if new_tokens is None:
            new_tokens = 1 if longest_text == self.max_len - 1 else 0
        room = self.max_len - 1 - new_tokens
        longest = int(prompts.lengths.max())
        if longest <= room:
            return prompts
        if not self.truncate_prompt or room < 1:
            raise UserError(
                f"a prompt of {longest} tokens and {new_tokens} new ones need more than the model's "
                f"{self.max_len} positions; shorten prompts from the left with --truncate-prompt, or allow fewer "
                "tokens with --max-new-tokens"
            )
        return prompts.keep_end(room, self.pad)

    # ---- searches

    def _can_start_behind(self, constraints: Tensor | None) -> bool:
        plain = type(self.search) in (BeamSearch, LogitBeamSearch) and self.lm_model is None
        return plain and constraints is None and self.state.normalised_steps == 0

    def _search_behind(self, prompts: Prompts, last: Tensor) -> Hypotheses:
        """A search that starts at the end of each prompt and counts its steps from there.

        last: [b], the position at which each text must end.
        """
        prompts = prompts.cut(last)
        self.model.prefill(prompts, True, self.temperature, self.score_prompts)
        if self.score_prompts and prompts.scores is not None:
            prompts.scores = prompts.scores - self.unk_penalty * prompts.tokens.eq(self.unk)
        self.state.start_scores = sums = prompts.score_sums()
        self.state.bounds = StepBounds(
            first_end=(self.limits.min_len - prompts.lengths).clamp(min=0),
            last_end=last - prompts.lengths,
            forced=torch.zeros_like(last),
            before=prompts.inputs_padded_in_front(self.pad),
            eos=self.eos,
            suppressed=self.token_indices_to_suppress,
        )
        steps, newest = int(self.state.bounds.last_end.max()), prompts.newest()
        # fairseq writes `bos_token` to the first column of all rows: a tensor gives each row its own
        sample = as_sample(newest, steps, torch.ones_like(newest))
        found = self._search(sample, bos_token=newest.repeat_interleave(self.beam_size))
        for row, hypotheses in enumerate(found):
            prepend_prompt(hypotheses, prompts, row, sums[row])
        return self._ranked(found, [0] * len(found) if self.score_prompts else prompts.lengths.tolist())

    def _search_through(self, prompts: Prompts, last: Tensor, source_lengths: Tensor, constraints) -> Hypotheses:
        """Stock's search from the first token on; scores of the prompts' common part come from prefill."""
        common = prompts.cut(torch.full_like(last, self._common_length(prompts, last)))
        self.model.prefill(common, False, self.temperature, self.score_prompts)
        self.state.replayed = common
        self.state.bounds = StepBounds(
            first_end=torch.full_like(last, self.limits.min_len),
            last_end=last,
            forced=torch.minimum(prompts.lengths, last),
            before=prompts.tokens[:, :0],
            eos=self.eos,
            suppressed=self.token_indices_to_suppress,
        )
        sample = as_sample(prompts.newest(), int(last.max()), source_lengths)
        prefix = prompts.tokens if prompts.tokens.size(1) else None
        found = self._search(sample, prefix, constraints, prompts.opening)
        return self._ranked(found, [0] * len(found))

    def _common_length(self, prompts: Prompts, last: Tensor) -> int:
        """Number of first tokens that every sentence of the batch is forced to take, none of which closes a text."""
        open_tokens = prompts.tokens.ne(self.pad) & prompts.tokens.ne(self.eos)
        common = open_tokens.cumprod(dim=1).sum(dim=1)
        return int(torch.minimum(common, last).min())

    def _ranked(self, found: Hypotheses, unscored: list[int]) -> Hypotheses:
        """Normalises scores by length, if asked for, and sorts. unscored: first tokens of each text without a score."""
        for hypotheses, without in zip(found, unscored):
            if self.limits.normalize_scores:
                for hypothesis in hypotheses:
                    scored = len(hypothesis["tokens"]) - without
                    hypothesis["score"] = hypothesis["score"] / scored**self.len_penalty
            hypotheses.sort(key=lambda hypothesis: -float(hypothesis["score"]))
        return found

    def is_finished(self, step: int, unfin_idx: int, max_len: int, found: int, beam_size: int) -> bool:
        bounds = self.state.bounds
        if bounds is not None and step >= int(bounds.last_end[unfin_idx]):
            return True
        return super().is_finished(step, unfin_idx, max_len, found, beam_size)


def prepend_prompt(hypotheses: list[dict[str, Tensor]], prompts: Prompts, row: int, score: Tensor) -> None:
    """Puts a prompt in front of what a search found behind it. score: the prompt's, contained in the first step's."""
    length = int(prompts.lengths[row])
    assert prompts.scores is not None
    for hypothesis in hypotheses:
        own = hypothesis["positional_scores"].clone()
        own[0] -= score
        hypothesis["positional_scores"] = torch.cat([prompts.scores[row, :length], own])
        hypothesis["tokens"] = torch.cat([prompts.tokens[row, :length], hypothesis["tokens"]])


def as_sample(tokens: Tensor, steps: int, source_lengths: Tensor) -> dict:
    """What the search loop needs of a sample without an encoder: a row per sentence, as wide as the number of steps
    that it may take, since `max_len_a` is 1 and `max_len_b` is 0. tokens, source_lengths: [b]."""
    width = tokens.new_zeros(tokens.numel(), steps)
    return {"net_input": {"src_tokens": width, "src_lengths": source_lengths}}
