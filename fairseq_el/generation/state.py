"""State of the batch under way, outside of the caches that layers see."""

from torch import Tensor

from fairseq_el.generation.prompts import Prompts, StepBounds
from fairseq_el.models.caches import SharedPrefixCache, kept_sentences


class DecodingState:
    """State of the batch under way; one object per generator, reset for each batch.

    fairseq's search loop has no argument through which the ensemble, the search and the n-gram block could pass
    something to each other. The generator gives all of them this object when it creates them. Layers don't see it:
    they find caches in `incremental_state`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, max_steps: int = 0, expected_steps: float = 0.0, normalised_steps: int = 0) -> None:
        self.max_steps = max_steps
        """Most steps that the search may take."""
        self.expected_steps = expected_steps
        self.normalised_steps = normalised_steps
        """First steps in which the ensemble returns log-probabilities even to a search that takes logits."""
        self.prefix_caches: list[SharedPrefixCache] = []
        """One per model: the encoder output, or the prompt."""
        self.log_normaliser: Tensor | None = None
        """[b * x], logsumexp of the logits of this step; a search that takes logits subtracts it."""

        # language models only
        self.start_scores: Tensor | None = None
        """[b], scores of the prompts, to which the first step of a search behind them adds."""
        self.bounds: StepBounds | None = None
        self.replayed: Prompts | None = None
        """Prompts whose steps the search repeats, with scores known from prefill."""

    def reorder(self, new_order: Tensor, beam_size: int) -> None:
        """Follows the beams. new_order: [b' * x], the old row of each new row."""
        for cache in self.prefix_caches:
            cache.reorder(new_order, beam_size)
        if self.bounds is not None:
            self.bounds.keep(kept_sentences(new_order, beam_size))
