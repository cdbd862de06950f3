"""Positional embeddings of decoders: each row of a step may have its own position, and a step's tokens may be on the
host while the model is on a GPU."""

from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor

from fairseq_el.models.caches import Prefill, PromptCache


def row_positions(tokens: Tensor, incremental_state: dict | None) -> tuple[Tensor, int] | None:
    """Positions of the newest tokens, [rows], from 1, and the last of them; None if it is the number of steps for all.

    tokens: [rows, steps so far].
    """
    prefill, cache = Prefill.of(incremental_state), PromptCache.of(incremental_state)
    if prefill is not None:
        return prefill.positions(tokens.size(0)), prefill.longest
    if cache is None or not cache.starts_behind:
        return None
    return cache.positions(tokens.size(1)), cache.longest + tokens.size(1)


class RowPositions:
    """fairseq assumes one position for the newest tokens of all rows. In prefill, and behind prompts of different
    lengths, each row has its own."""

    padding_idx: int

    def table(self, last: int) -> Tensor:
        """[positions, d]: the embeddings of positions up to this."""
        raise NotImplementedError

    def forward(self, input: Tensor, incremental_state: dict | None = None, **options) -> Tensor:
        """input: [rows, steps so far]; returns [rows, 1, d], or [1, 1, d] for all rows."""
        if incremental_state is None:
            return super().forward(input, incremental_state, **options)
        found = row_positions(input, incremental_state)
        if found is None:
            return self.table(input.size(1))[self.padding_idx + input.size(1)].view(1, 1, -1)
        positions, last = found
        return self.table(last)[self.padding_idx + positions].unsqueeze(1)


class LearnedRowPositions(RowPositions, LearnedPositionalEmbedding):
    def table(self, last: int) -> Tensor:
        return self.weight


class SinusoidalRowPositions(RowPositions, SinusoidalPositionalEmbedding):
    weights: Tensor

    def table(self, last: int) -> Tensor:
        if self.padding_idx + last >= self.weights.size(0):  # grows as in the parent
            grown = self.get_embedding(self.padding_idx + 1 + last, self.embedding_dim, self.padding_idx)
            self.weights = grown.to(self.weights)
        return self.weights
