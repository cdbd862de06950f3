"""Beam search on logits, and a block of repeated n-grams, without needless passes over the vocabulary."""

import torch
from fairseq.data import Dictionary
from fairseq.search import BeamSearch
from torch import Tensor, nn

from fairseq_el.generation.device_logits import DeviceLogits
from fairseq_el.generation.non_finite import check_finite
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
        logits: Tensor | DeviceLogits,
        scores: Tensor | None,
        prev_output_tokens: Tensor | None = None,
        original_batch_idxs: Tensor | None = None,
        candidate_multiple: int = 2,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logits: [b, x, vocabulary], scores: [b, x, steps so far], on the host for `DeviceLogits`.

        Returns scores, tokens and beams of the best candidates, [b, candidates] each, best first.
        """
        assert scores is not None
        b, x, vocabulary = logits.size()
        live = 1 if step == 0 else x  # at first all beams are equal: look at one
        # as in stock: one less than there are, so that padding is never taken
        count = min(candidate_multiple * x, live * vocabulary - 1)
        values, tokens = logits[:, :live].topk(min(count, vocabulary), dim=-1)  # [b, live, k]
        if self.state.log_normaliser is not None:
            values = values - self.state.log_normaliser.view(b, x, 1)[:, :live]
        if isinstance(logits, DeviceLogits):
            values, tokens = read_together(values, tokens)
            if logits.checks_finite:
                check_finite(values[..., 0].clamp(min=-1e30))  # -inf is a row in which all tokens are ruled out
        values = values.masked_fill(values.isnan(), float("-inf"))  # a row of NaN offers no candidate
        if step > 0:
            values = values + scores[:, :, step - 1].unsqueeze(-1)
        elif self.state.start_scores is not None:
            values = values + self.state.start_scores.view(b, 1, 1)
        k = values.size(-1)
        best, indices = values.view(b, -1).topk(count, dim=-1)  # [b, candidates]
        return best, tokens.reshape(b, -1).gather(1, indices), indices // k


def read_together(values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Moves both to the host while it waits once. values: single precision, tokens: less than 2^31."""
    bits, numbers = torch.stack([values.view(torch.int32), tokens.int()]).cpu()
    return bits.view(torch.float32), numbers.long()


class NGramBlock(nn.Module):
    """Rules out tokens that would repeat an n-gram of their own hypothesis, for all rows at once."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(
        self, tokens: Tensor, lprobs: Tensor | DeviceLogits, bsz: int, beam_size: int, step: int
    ) -> Tensor | DeviceLogits:
        """tokens: [b * x, at least step + 1], lprobs: [b * x, vocabulary], changed in place."""
        rows, repeated = self.repeats(tokens, step)
        if not rows.is_cpu or rows.numel():
            lprobs[rows, repeated] = float("-inf")
        return lprobs

    def repeats(self, tokens: Tensor, step: int, applies: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows, and tokens that would repeat an n-gram there. applies: [b * x], which rows count."""
        context = self.size - 1
        past = tokens[:, : step + 1]
        if step < context:
            return past.new_empty(0), past.new_empty(0)
        grams = past.unfold(1, self.size, 1)  # [b * x, step + 2 - size, size]
        newest = past[:, step + 1 - context :]  # [b * x, size - 1]
        repeats = (grams[:, :, :context] == newest.unsqueeze(1)).all(dim=2)
        if applies is not None:
            repeats = repeats & applies.unsqueeze(1)
        rows, positions = repeats.nonzero(as_tuple=True)
        return rows, grams[rows, positions, context]


class PromptNGramBlock(NGramBlock):
    """Counts the n-grams of prompts too, and never blocks a token that a prompt forces."""

    def __init__(self, size: int, state: DecodingState):
        super().__init__(size)
        self.state = state

    def forward(
        self, tokens: Tensor, lprobs: Tensor | DeviceLogits, bsz: int, beam_size: int, step: int
    ) -> Tensor | DeviceLogits:
        bounds = self.state.bounds
        assert bounds is not None
        before = bounds.before.repeat_interleave(beam_size, dim=0)
        free = (step >= bounds.forced).repeat_interleave(beam_size)
        rows, repeated = self.repeats(torch.cat([before, tokens], dim=1), before.size(1) + step, free)
        if not rows.is_cpu or rows.numel():
            lprobs[rows, repeated] = float("-inf")
        return lprobs
