"""Generation with language models: the prompt is read once per sentence, in parallel, then the search begins.

Stock fairseq feeds the prompt to the decoder one token a step, for every beam, with the search forced to follow it.
Two ways lead to the same hypotheses:

- Beam search depends on the prompt's own score only through a sum, so the search starts behind the prompts, each at
  its own position, and the prompts' scores are put in front of the results.
- Other searches see every step (sampling draws random numbers at each), so they run through the forced steps as in
  stock fairseq, but get the scores of the prompt that all sentences have in common from its one reading.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.search import BeamSearch, LexicallyConstrainedBeamSearch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from fairseq_el.errors import UserError
from fairseq_el.generation.generator import ELEnsemble, ELSequenceGenerator, attention_shape
from fairseq_el.generation.non_finite import check_finite
from fairseq_el.generation.search import LogitBeamSearch, NGramBlock
from fairseq_el.kernels import ops
from fairseq_el.models.caches import PromptMemory, kept_sentences
from fairseq_el.models.encoder import groups
from fairseq_el.models.policy import largest_batch

SCORED_TOKENS = 256
"""Tokens of prompts whose scores are computed at a time: each needs a row as wide as the vocabulary."""


@dataclass
class Bounds:
    """Where each text stands when the search begins, and between which of its steps it may end, and must.

    Belongs to one search and follows it: rows of finished sentences are dropped.
    """

    first_end: Tensor  # [b]
    last_end: Tensor  # [b]
    forced: Tensor  # [b], steps in which the search has no choice
    before: Tensor  # [b, n], tokens before those that the search sees, padded in front
    score_before: Tensor  # [b]

    def apply(self, scores: Tensor, step: int, eos: int) -> None:
        """scores: [b * x, vocabulary], of tokens; changed in place."""
        beam_size = scores.size(0) // self.last_end.numel()
        early = (step < self.first_end).repeat_interleave(beam_size)
        late = (step >= self.last_end).repeat_interleave(beam_size)
        scores[early & ~late, eos] = -math.inf
        if late.any():
            closing = scores[late, eos]
            scores[late] = -math.inf
            scores[late, eos] = closing

    def keep(self, sentences: Tensor) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[sentences])


@dataclass
class Prompts:
    """The forced beginnings of a batch of texts, behind the token that opens every text."""

    tokens: Tensor  # [b, n], padded behind
    lengths: Tensor  # [b]
    opening: int
    scores: Tensor | None = None  # [b, n], log-probabilities

    def read_tokens(self, pad: int) -> Tensor:
        """[b, n]: what the model has seen when it predicts `tokens`."""
        opening = self.tokens.new_full((self.tokens.size(0), 1), self.opening)
        seen = torch.cat([opening, self.tokens], dim=1)[:, :-1]
        outside = torch.arange(seen.size(1), device=seen.device) >= self.lengths.unsqueeze(1)
        return seen.masked_fill(outside, pad)

    def before_newest(self, pad: int) -> Tensor:
        """[b, n]: the same, padded in front, so that the newest token can follow."""
        seen = self.read_tokens(pad)
        n = seen.size(1)
        places = torch.arange(n, device=seen.device) - (n - self.lengths).unsqueeze(1)
        return seen.gather(1, places.clamp(min=0)).masked_fill(places < 0, pad)

    def newest(self) -> Tensor:
        """[b]: the last token of each, with which the search begins."""
        opening = self.tokens.new_full((self.tokens.size(0), 1), self.opening)
        return torch.cat([opening, self.tokens], dim=1).gather(1, self.lengths.unsqueeze(1)).squeeze(1)

    def score_sums(self) -> Tensor:
        """[b], added up in the order and the precision in which a search adds."""
        if self.tokens.size(1) == 0:
            return torch.zeros(self.lengths.shape, device=self.tokens.device)
        added = np.add.accumulate(self.scores.cpu().numpy(), axis=1, dtype=np.float32)
        sums = torch.from_numpy(added).to(self.tokens.device)
        sums = torch.cat([sums.new_zeros(sums.size(0), 1), sums], dim=1)
        return sums.gather(1, self.lengths.unsqueeze(1)).squeeze(1)


class PromptedEnsemble(ELEnsemble):
    """An ensemble of language models. `memories`, `bounds` and `replayed` belong to the batch under way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.memories: list[PromptMemory] = []
        self.bounds: Bounds | None = None
        self.replayed: Prompts | None = None
        self.eos: int | None = None  # the generator's

    def forward_encoder(self, net_input: dict[str, Tensor]):
        return None if self.accelerated else super().forward_encoder(net_input)

    def reorder_encoder_out(self, encoder_outs, new_order):
        return [] if self.accelerated else super().reorder_encoder_out(encoder_outs, new_order)

    def shared_memories(self, encoder_outs) -> list[PromptMemory]:
        return self.memories

    def decoder_inputs(self, encoder_outs) -> list[None]:
        return [None] * self.models_size

    @torch.no_grad()
    def read(
        self, prompts: Prompts, counts_from_prompt: bool, temperature: float, scoring: bool = True
    ) -> None:
        """Fills the memories, and the prompts' scores; these are zero without `scoring`."""
        pad = self.single_model.decoder.padding_idx
        seen = prompts.read_tokens(pad)
        b = seen.size(0)
        self.memories = [
            PromptMemory(
                prompts.lengths, len(model.decoder.layers), self.beam_size, counts_from_prompt,
                decision=self.decision, reserved_bytes=self.beam_bytes(model, b),
            )
            for model in self.models
        ]  # fmt: skip
        with self.profile.time("prompt"), torch.random.fork_rng(devices=[]):  # see `replay`
            scores = [
                self._read_with(model, memory, seen, prompts, temperature if scoring else None)
                for model, memory in zip(self.models, self.memories)
            ]
        together = torch.stack(scores).logsumexp(dim=0) - math.log(len(scores))
        prompts.scores = scores[0] if len(scores) == 1 else together
        if self.checks_finite:
            check_finite(prompts.scores)
        self.profile.record_state(sum(memory.nbytes() for memory in self.memories), 0)

    def _read_with(
        self, model: BaseFairseqModel, memory: PromptMemory, seen: Tensor, prompts: Prompts, temperature: float | None
    ) -> Tensor:
        """seen: [b, n]; returns log-probabilities of the prompts' tokens, [b, n], zero behind them, and zero
        altogether without a temperature."""
        b, n = seen.shape
        scores = torch.zeros(b, n, device=seen.device)
        on_cpu = seen.device.type == "cpu"
        for rows in groups(prompts.lengths.tolist()) if on_cpu else [slice(0, b)]:
            longest = int(prompts.lengths[rows].max())
            if longest == 0:
                continue
            with memory.read(rows):
                features, _ = model.decoder.extract_features(seen[rows, :longest], encoder_out=None)
            if temperature is None:
                continue
            real = torch.arange(longest, device=seen.device) < prompts.lengths[rows].unsqueeze(1)
            targets = prompts.tokens[rows, :longest][real]
            scores[rows, :longest][real] = self._score(model, features[real], targets, temperature)
        return scores

    def _score(self, model: BaseFairseqModel, features: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of targets [tokens] after features [tokens, d]."""
        found = []
        for rows, wanted in zip(features.split(SCORED_TOKENS), targets.split(SCORED_TOKENS)):
            out = model.decoder.output_layer(rows.unsqueeze(0)).div_(temperature)
            if self.offers_logits():
                logits = out[0].float()
                score = logits.gather(1, wanted.unsqueeze(1)).squeeze(1) - ops.logsumexp(logits)
            else:
                probabilities = model.get_normalized_probs((out, None), log_probs=True, sample=None)[0]
                score = probabilities.gather(1, wanted.unsqueeze(1)).squeeze(1)
            found.append(score)
        return torch.cat(found)

    def forward_decoder(self, tokens, encoder_outs, incremental_states, temperature: float = 1.0):
        if not self.accelerated:
            return super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        step = tokens.size(1) - 1
        if self.replayed is not None and step < self.replayed.tokens.size(1):
            return self.replay(step), None
        scores, attention = super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        self.bounds.apply(scores, step, self.eos)
        if step == 0:
            self.start_scores(scores)
        return scores, attention

    def start_scores(self, scores: Tensor) -> None:
        """The first step of a search behind prompts adds to their scores. scores: [b * x, vocabulary]."""
        if self.logit_search is not None:
            self.logit_search.score_before = self.bounds.score_before
        else:
            scores += self.bounds.score_before.repeat_interleave(self.beam_size).unsqueeze(1)

    def replay(self, step: int) -> Tensor:
        """What the search is forced to choose: log-probabilities [b * x, vocabulary] of one token a row."""
        for model in self.models:
            next(iter(model.decoder.layers))  # which draws random numbers if there is layerdrop, as stock does here
        vocabulary = len(self.single_model.decoder.dictionary)
        tokens = self.replayed.tokens[:, step].repeat_interleave(self.beam_size)
        scores = self.replayed.scores[:, step].repeat_interleave(self.beam_size)
        if self.logit_search is not None:
            self.logit_search.normaliser = torch.zeros_like(scores)
            self.logit_search.score_before = self.bounds.score_before
        forced = scores.new_full((tokens.numel(), vocabulary), -math.inf)
        return forced.scatter_(1, tokens.unsqueeze(1), scores.unsqueeze(1))

    def reorder_incremental_state(self, incremental_states, new_order) -> None:
        super().reorder_incremental_state(incremental_states, new_order)
        if not self.accelerated:
            return
        for memory in self.memories:
            memory.reorder(new_order, self.beam_size)
        sentences = kept_sentences(new_order, self.beam_size)
        if sentences.numel() < self.bounds.last_end.numel():
            self.bounds.keep(sentences)


class PromptedNGramBlock(NGramBlock):
    """Counts the n-grams of prompts too, and leaves alone the tokens that a prompt forces."""

    def __init__(self, size: int, bounds: Callable[[], Bounds]):
        super().__init__(size)
        self.bounds = bounds

    def forward(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        bounds = self.bounds()
        before = bounds.before.repeat_interleave(beam_size, dim=0)
        whole = torch.cat([before, tokens], dim=1)
        blocked = super().forward(whole, lprobs.clone(), bsz, beam_size, before.size(1) + step)
        forced = (step < bounds.forced).repeat_interleave(beam_size).unsqueeze(1)
        return torch.where(forced, lprobs, blocked)


class ELLanguageGenerator(ELSequenceGenerator):
    """`ELSequenceGenerator` for models without an encoder, whose source is a prompt.

    As in stock fairseq, lengths count the prompt: `--max-len-b 600` ends a text at 600 tokens, of which the prompt
    is the first part. `max_new_tokens` counts from the end of each prompt instead. Scores cover the prompt too,
    and so rank texts of different lengths; without `score_prompts`, which saves the output layer's work on every
    token of it, they cover what is new.
    """

    ensemble_class = PromptedEnsemble

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
        self.model.eos = self.eos
        if self.match_source_len or isinstance(self.search, LexicallyConstrainedBeamSearch):
            self.model.accelerated = False  # these count from the beginning of the text: they run as in stock

    def ngram_block(self, size: int) -> NGramBlock:
        return PromptedNGramBlock(size, bounds=lambda: self.model.bounds)

    def _generate(self, sample, prefix_tokens=None, constraints=None, bos_token=None):
        if not self.model.accelerated:
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        sources = sample["net_input"]["src_tokens"]
        if prefix_tokens is None:
            prefix_tokens = sources.new_zeros(sources.size(0), 0)
        lengths = prefix_tokens.ne(self.pad).sum(dim=1)
        opening = self.eos if bos_token is None else bos_token
        longest_text = self._longest_text(sources.size(1))
        if self.max_new_tokens is None and self.min_len > longest_text:
            raise UserError(
                f"--min-len {self.min_len} is more than the {longest_text} tokens that --max-len-a, --max-len-b and "
                "the model's positions allow; lower it, or raise --max-len-b"
            )
        prompts = self._fit(Prompts(prefix_tokens, lengths, opening), longest_text)
        last = self._last_steps(prompts.lengths, longest_text)
        hypotheses: list[list[dict[str, Tensor]]] = []
        with self.profile.time("generate"):
            for rows in self._prompts_that_fit(prompts, last):
                part = Prompts(prompts.tokens[rows], prompts.lengths[rows], opening)
                hypotheses += self._generate_after(part, last[rows], constraints)
        self.profile.count(hypotheses)
        self.profile.tokens -= int(torch.minimum(prompts.lengths, last).sum())
        return hypotheses

    def _longest_text(self, source_length: int) -> int:
        """As stock counts: all tokens behind the opening one, less the closing one."""
        return min(int(self.max_len_a * source_length + self.max_len_b), self.max_len - 1)

    def _last_steps(self, lengths: Tensor, longest_text: int) -> Tensor:
        """The position at which each text must end, [b]."""
        if self.max_new_tokens is None:
            return lengths.new_full(lengths.shape, longest_text)
        return lengths + self.max_new_tokens

    def _fit(self, prompts: Prompts, longest_text: int) -> Prompts:
        """Sees to it that prompts leave room for what is to follow in the model's positions."""
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
        return left_truncated(prompts, room, self.pad)

    def _prompts_that_fit(self, prompts: Prompts, last: Tensor) -> list[slice]:
        """The batch in parts whose state fits the memory budget even without K and V."""
        b, n = prompts.tokens.shape
        model, fits = self.model.single_model, b
        self.model.longest_output = int((last - prompts.lengths).clamp(min=0).max()) + 1
        if self.decision.budget:
            shape = attention_shape(model, 1, self.beam_size, n)
            layers = len(model.decoder.layers)
            fits = largest_batch(
                shape, layers, self.decision.budget, self.model.longest_output, layers_with_states=layers
            )
            fits = min(max(fits, 1), b)
        return [slice(start, min(start + fits, b)) for start in range(0, b, fits)]

    def _generate_after(self, prompts: Prompts, last: Tensor, constraints) -> list[list[dict]]:
        """last: [b], the position at which each text must end."""
        plain = type(self.search) in (BeamSearch, LogitBeamSearch) and self.lm_model is None
        self.model.follow(prompts.tokens, self.eos)
        try:
            if plain and not self.model.closed_prefix and constraints is None:
                return self._search_behind(prompts, last)
            return self._search_through(prompts, last, constraints)
        finally:
            self.model.memories, self.model.bounds, self.model.replayed = [], None, None

    def _search_behind(self, prompts: Prompts, last: Tensor) -> list[list[dict]]:
        """A search that starts at the end of each prompt, and whose steps count from there."""
        prompts.lengths = torch.minimum(prompts.lengths, last)  # longer ones are cut where the text must end
        prompts.tokens = prompts.tokens[:, : int(prompts.lengths.max())]
        self.model.read(prompts, True, self.temperature, self.score_prompts)
        if self.score_prompts:
            self._penalise_unknown(prompts)
        self.model.bounds = Bounds(
            first_end=(self.min_len - prompts.lengths).clamp(min=0),
            last_end=last - prompts.lengths,
            forced=torch.zeros_like(last),
            before=prompts.before_newest(self.pad),
            score_before=prompts.score_sums(),
        )
        longest = int(self.model.bounds.last_end.max())
        search = self._variant(max_len_a=0, max_len_b=longest, min_len=0, normalize_scores=False)
        newest = prompts.newest()
        found = SequenceGenerator._generate(
            search, as_sample(newest), bos_token=newest.repeat_interleave(self.beam_size)
        )
        sums = prompts.score_sums()
        return [self._with_prompt(best, prompts, row, sums[row]) for row, best in enumerate(found)]

    def _penalise_unknown(self, prompts: Prompts) -> None:
        prompts.scores = prompts.scores - self.unk_penalty * prompts.tokens.eq(self.unk)

    def _with_prompt(
        self, hypotheses: list[dict], prompts: Prompts, row: int, before: Tensor
    ) -> list[dict]:
        """Puts the prompt before what was found, and ranks by the score of the whole."""
        length = int(prompts.lengths[row])
        tokens, scores = prompts.tokens[row, :length], prompts.scores[row, :length]
        for hypothesis in hypotheses:
            own = hypothesis["positional_scores"].clone()
            own[0] -= before
            hypothesis["positional_scores"] = torch.cat([scores, own])
            hypothesis["tokens"] = torch.cat([tokens, hypothesis["tokens"]])
            if self.normalize_scores:
                scored = len(hypothesis["tokens"]) - (0 if self.score_prompts else length)
                hypothesis["score"] = hypothesis["score"] / scored**self.len_penalty
        return sorted(hypotheses, key=lambda hypothesis: -float(hypothesis["score"]))

    def _search_through(self, prompts: Prompts, last: Tensor, constraints) -> list[list[dict]]:
        """Stock's search from the first token on; the prompts' common part comes from one reading."""
        common = self._common_length(prompts, last)
        shared = Prompts(prompts.tokens[:, :common], prompts.lengths.clamp(max=common), prompts.opening)
        self.model.read(shared, False, self.temperature, self.score_prompts)
        self.model.replayed = shared
        self.model.bounds = Bounds(
            first_end=torch.full_like(last, self.min_len),
            last_end=last,
            forced=prompts.lengths,
            before=prompts.tokens[:, :0],
            score_before=torch.zeros(last.shape, device=last.device),
        )
        search = self._variant(max_len_a=0, max_len_b=int(last.max()), min_len=0)
        sample = as_sample(prompts.newest())
        prefix = prompts.tokens if prompts.tokens.size(1) else None
        return SequenceGenerator._generate(search, sample, prefix, constraints, prompts.opening)

    def _common_length(self, prompts: Prompts, last: Tensor) -> int:
        """How many tokens every sentence of the batch is forced to take, none of which closes a text."""
        open_tokens = prompts.tokens.ne(self.pad) & prompts.tokens.ne(self.eos)
        common = open_tokens.cumprod(dim=1).sum(dim=1)
        return int(torch.minimum(common, last).min())

    def _variant(self, **settings) -> "ELLanguageGenerator":
        """This generator with other settings, for one search."""
        variant = copy.copy(self)
        variant.__dict__.update(settings)
        return variant

    def is_finished(self, step: int, unfin_idx: int, max_len: int, found: int, beam_size: int) -> bool:
        bounds = self.model.bounds
        if bounds is not None and step >= int(bounds.last_end[unfin_idx]):
            return True
        return super().is_finished(step, unfin_idx, max_len, found, beam_size)


def as_sample(tokens: Tensor) -> dict:
    """As much of a sample as the search looks at where there is no encoder: a row for each sentence."""
    return {"net_input": {"src_tokens": tokens.unsqueeze(1), "src_lengths": torch.ones_like(tokens)}}


def left_truncated(prompts: Prompts, room: int, pad: int) -> Prompts:
    """Keeps the last `room` tokens of each prompt."""
    b, n = prompts.tokens.shape
    lengths = prompts.lengths.clamp(max=room)
    places = torch.arange(min(n, room), device=prompts.tokens.device)
    first = (prompts.lengths - lengths).unsqueeze(1)
    tokens = prompts.tokens.gather(1, (first + places).clamp(max=n - 1))
    return Prompts(tokens.masked_fill(places >= lengths.unsqueeze(1), pad), lengths, prompts.opening)
