"""Prompts of a batch, and the bounds that they put on the steps of a search."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Prompts:
    """The forced beginnings of a batch of texts, behind the token that opens every text."""

    tokens: Tensor  # [b, n], padded behind
    lengths: Tensor  # [b]
    opening: int
    scores: Tensor | None = None  # [b, n], log-probabilities, known after prefill

    def inputs(self, pad: int) -> Tensor:
        """[b, n]: the tokens that the model reads to predict `tokens`."""
        shifted = self._with_opening()[:, :-1]
        outside = torch.arange(shifted.size(1), device=shifted.device) >= self.lengths.unsqueeze(1)
        return shifted.masked_fill(outside, pad)

    def inputs_padded_in_front(self, pad: int) -> Tensor:
        """[b, n]: the same, so that the newest token of each text can follow."""
        inputs = self.inputs(pad)
        n = inputs.size(1)
        indices = torch.arange(n, device=inputs.device) - (n - self.lengths).unsqueeze(1)
        return inputs.gather(1, indices.clamp(min=0)).masked_fill(indices < 0, pad)

    def newest(self) -> Tensor:
        """[b]: the last token of each prompt, with which a search behind it begins."""
        return self._with_opening().gather(1, self.lengths.unsqueeze(1)).squeeze(1)

    def score_sums(self) -> Tensor:
        """[b], summed in the order and the precision of a search."""
        if self.scores is None or self.tokens.size(1) == 0:
            return torch.zeros(self.lengths.shape, device=self.tokens.device)
        cumulative = np.add.accumulate(self.scores.cpu().numpy(), axis=1, dtype=np.float32)
        sums = torch.from_numpy(cumulative).to(self.tokens.device)
        sums = torch.cat([sums.new_zeros(sums.size(0), 1), sums], dim=1)
        return sums.gather(1, self.lengths.unsqueeze(1)).squeeze(1)

    def to(self, device: torch.device) -> "Prompts":
        return Prompts(self.tokens.to(device), self.lengths.to(device), self.opening)

    def select(self, rows: slice) -> "Prompts":
        return Prompts(self.tokens[rows], self.lengths[rows], self.opening)

    def cut(self, lengths: Tensor) -> "Prompts":
        """At most so many first tokens of each. lengths: [b]."""
        lengths = torch.minimum(self.lengths, lengths)
        return Prompts(self.tokens[:, : int(lengths.max())], lengths, self.opening)

    def keep_end(self, longest: int, pad: int) -> "Prompts":
        """The last `longest` tokens of each."""
        n = self.tokens.size(1)
        lengths = self.lengths.clamp(max=longest)
        indices = torch.arange(min(n, longest), device=self.tokens.device)
        first = (self.lengths - lengths).unsqueeze(1)
        tokens = self.tokens.gather(1, (first + indices).clamp(max=n - 1))
        return Prompts(tokens.masked_fill(indices >= lengths.unsqueeze(1), pad), lengths, self.opening)

    def _with_opening(self) -> Tensor:
        """[b, 1 + n]"""
        return torch.cat([self.tokens.new_full((self.tokens.size(0), 1), self.opening), self.tokens], dim=1)


@dataclass
class StepBounds:
    """Steps of a search in which each text is forced, may end, and must end. [b] each, unless noted.

    fairseq's search loop has one least length for all texts of a batch and ignores it, and suppressed tokens, until the
    longest prompt is over. Here they hold behind each prompt, so a text doesn't depend on the rest of its batch.
    """

    first_end: Tensor
    last_end: Tensor
    forced: Tensor  # number of first steps in which the search has no choice
    before: Tensor  # [b, n], tokens before those that the search sees, padded in front
    eos: int
    suppressed: Tensor | None = None  # [tokens]

    def apply(self, scores: Tensor, step: int) -> None:
        """Forbids or forces the end, and forbids suppressed tokens. scores: [b * x, vocabulary], changed in place."""
        beam_size = scores.size(0) // self.last_end.numel()
        free = (step >= self.forced).repeat_interleave(beam_size)
        early = (step < self.first_end).repeat_interleave(beam_size)
        late = (step >= self.last_end).repeat_interleave(beam_size)
        early &= free & ~late
        if early.any():
            scores[early, self.eos] = -math.inf
        if self.suppressed is not None:
            scores[free.nonzero(), self.suppressed] = -math.inf
        if late.any():
            closing = scores[late, self.eos]
            scores[late] = -math.inf
            scores[late, self.eos] = closing

    def keep(self, sentences: Tensor) -> None:
        """Drops finished sentences. sentences: [b'], indices of those that continue."""
        if sentences.numel() < self.last_end.numel():
            for name in ("first_end", "last_end", "forced", "before"):
                setattr(self, name, getattr(self, name)[sentences])
