"""Picking tokens from logits, without passes over the whole vocabulary that the choice doesn't need."""

from fairseq.search import BeamSearch
from torch import Tensor, nn


class LogitBeamSearch(BeamSearch):
    """fairseq's beam search, for logits instead of log-probabilities.

    A row's log-probabilities are its logits less one number, its logsumexp. That changes no row's order, so
    candidates are taken from the logits and only theirs are normalised. The generator sets `normaliser`
    before it masks logits; it belongs to the step under way.
    """

    normaliser: Tensor  # [b * x]
    score_before: Tensor | None = None  # [b], of what lies before the first step

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
        b, x, vocabulary = logits.shape
        normaliser = self.normaliser.view(b, x, 1)
        if step == 0:  # all beams are alike, one stands for them
            logits, normaliser, live = logits[:, :1], normaliser[:, :1], 1
        else:
            live = x
        # as in stock: one less than there are, so that padding is never taken
        count = min(candidate_multiple * x, live * vocabulary - 1)
        values, tokens = logits.topk(min(count, vocabulary), dim=-1)  # [b, live, k]
        values = values - normaliser
        values = values.masked_fill(values.isnan(), float("-inf"))  # a row of NaN offers no candidate
        if step == 0 and self.score_before is not None:
            values = values + self.score_before.view(b, 1, 1)
        if step > 0:
            values = values + scores[:, :, step - 1].unsqueeze(-1)
        k = values.size(-1)
        best, where = values.view(b, -1).topk(count, dim=-1)  # [b, candidates]
        return best, tokens.reshape(b, -1).gather(1, where), where // k


class NGramBlock(nn.Module):
    """Rules out tokens that would repeat an n-gram of their own hypothesis, all rows at once."""

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
        rows, places = repeats.nonzero(as_tuple=True)
        lprobs[rows, grams[rows, places, context]] = float("-inf")
        return lprobs
