"""Positions of tokens that are generated after prompts of different lengths."""

from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor

from fairseq_el.models.caches import PromptMemory


class AfterPrompt:
    """fairseq takes the newest tokens of all rows to stand at one position; after prompts of different lengths
    each row has its own."""

    padding_idx: int

    def table(self, longest: int) -> Tensor:
        """[positions, d]: the embeddings of all positions, at least up to the longest."""
        raise NotImplementedError

    def forward(self, input: Tensor, incremental_state: dict | None = None, **options) -> Tensor:
        """input: [rows, steps so far]; returns [rows, 1, d]."""
        prompt = PromptMemory.of(incremental_state)
        places = None if prompt is None else prompt.places(input.size(1))
        if places is None:
            return super().forward(input, incremental_state, **options)
        return self.table(int(places.max()))[self.padding_idx + places].unsqueeze(1)


class LearnedAfterPrompt(AfterPrompt, LearnedPositionalEmbedding):
    def table(self, longest: int) -> Tensor:
        return self.weight


class SinusoidalAfterPrompt(AfterPrompt, SinusoidalPositionalEmbedding):
    weights: Tensor

    def table(self, longest: int) -> Tensor:
        if self.padding_idx + longest >= self.weights.size(0):  # as its parent does when a text outgrows the table
            grown = self.get_embedding(self.padding_idx + 1 + longest, self.embedding_dim, self.padding_idx)
            self.weights = grown.to(self.weights)
        return self.weights
