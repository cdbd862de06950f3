"""Positional embeddings of language models: each row of a step may have its own position."""

from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor

from fairseq_el.models.caches import Prefill, PromptCache


def row_positions(tokens: Tensor, incremental_state: dict | None) -> Tensor | None:
    """Positions of the newest tokens, [rows], from 1; None if it is the number of steps for all rows.

    tokens: [rows, steps so far].
    """
    prefill, cache = Prefill.of(incremental_state), PromptCache.of(incremental_state)
    if prefill is not None:
        return prefill.positions(tokens.size(0))
    return None if cache is None else cache.positions(tokens.size(1))


class RowPositions:
    """fairseq assumes one position for the newest tokens of all rows. In prefill, and behind prompts of different
    lengths, each row has its own."""

    padding_idx: int

    def table(self, positions: Tensor) -> Tensor:
        """[positions, d]: the embeddings of at least these."""
        raise NotImplementedError

    def forward(self, input: Tensor, incremental_state: dict | None = None, **options) -> Tensor:
        """input: [rows, steps so far]; returns [rows, 1, d]."""
        positions = row_positions(input, incremental_state)
        if positions is None:
            return super().forward(input, incremental_state, **options)
        return self.table(positions)[self.padding_idx + positions].unsqueeze(1)


class LearnedRowPositions(RowPositions, LearnedPositionalEmbedding):
    def table(self, positions: Tensor) -> Tensor:
        return self.weight


class SinusoidalRowPositions(RowPositions, SinusoidalPositionalEmbedding):
    weights: Tensor

    def table(self, positions: Tensor) -> Tensor:
        longest = int(positions.max())
        if self.padding_idx + longest >= self.weights.size(0):  # grows as in the parent
            grown = self.get_embedding(self.padding_idx + 1 + longest, self.embedding_dim, self.padding_idx)
            self.weights = grown.to(self.weights)
        return self.weights
