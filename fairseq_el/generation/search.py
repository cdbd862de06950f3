"""Beam search on logits, and a block of repeated n-grams, without needless passes over the vocabulary."""

import torch
from fairseq.data import Dictionary
from fairseq.search import BeamSearch
from torch import Tensor, nn

from fairseq_el.generation.state import DecodingState


class LogitBeamSearch(BeamSearch):
    """fairseq's beam search, for logits instead of log-probabilities.

    A row's log-probabilities are its logits less one number, its logsumexp. That doesn't change the order within a row,
    so candidates are taken from the logits, and only theirs are normalised. The logsumexp is that of all logits: the
    ensemble leaves it in the state before the generator masks any.
    """

    def __init__(self, dictionary: Dictionary, state: DecodingState):
        super().__init__(dictionary)
        self.state = state

    def step(
        self,
        step: int,
        logits: Tensor,
        scores: Tensor | None,
        prev_output_tokens: Tensor | None = None,
        original_batch_idxs: Tensor | None = None,
        candidate_multiple: int = 2,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logits: [b, x, vocabulary], scores: [b, x, steps so far].

        Returns scores, tokens and beams of the best candidates, [b, candidates] each, best first.
        """
        assert self.state.log_normaliser is not None and scores is not None
        b, x, vocabulary = logits.shape
        log_normaliser = self.state.log_normaliser.view(b, x, 1)
        if step == 0:  # all beams are equal: look at one
            logits, log_normaliser, live = logits[:, :1], log_normaliser[:, :1], 1
        else:
            live = x
        # as in stock: one less than there are, so that padding is never taken
        count = min(candidate_multiple * x, live * vocabulary - 1)
        values, tokens = logits.topk(min(count, vocabulary), dim=-1)  # [b, live, k]
        values = values - log_normaliser
        values = values.masked_fill(values.isnan(), float("-inf"))  # a row of NaN offers no candidate
        if step > 0:
            values = values + scores[:, :, step - 1].unsqueeze(-1)
        elif self.state.start_scores is not None:
            values = values + self.state.start_scores.view(b, 1, 1)
        k = values.size(-1)
        best, indices = values.view(b, -1).topk(count, dim=-1)  # [b, candidates]
        return best, tokens.reshape(b, -1).gather(1, indices), indices // k


class NGramBlock(nn.Module):
    """Rules out tokens that would repeat an n-gram of their own hypothesis, for all rows at once."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        """tokens: [b * x, at least step + 1], lprobs: [b * x, vocabulary], changed in place."""
        context = self.size - 1
        if step < context:
            return lprobs
        past = tokens[:, : step + 1]
        grams = past.unfold(1, self.size, 1)  # [b * x, step + 2 - size, size]
        newest = past[:, step + 1 - context :]  # [b * x, size - 1]
        repeats = (grams[:, :, :context] == newest.unsqueeze(1)).all(dim=2)
        rows, positions = repeats.nonzero(as_tuple=True)
        lprobs[rows, grams[rows, positions, context]] = float("-inf")
        return lprobs


class PromptNGramBlock(NGramBlock):
    """Counts the n-grams of prompts too, and never blocks a token that a prompt forces."""

    def __init__(self, size: int, state: DecodingState):
        super().__init__(size)
        self.state = state

    def forward(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        bounds = self.state.bounds
        assert bounds is not None
        before = bounds.before.repeat_interleave(beam_size, dim=0)
        whole = torch.cat([before, tokens], dim=1)
        blocked = super().forward(whole, lprobs.clone(), bsz, beam_size, before.size(1) + step)
        forced = (step < bounds.forced).repeat_interleave(beam_size).unsqueeze(1)
        return torch.where(forced, lprobs, blocked)
