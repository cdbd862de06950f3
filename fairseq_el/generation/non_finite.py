"""Detects NaN and infinity in a model's predictions.

fairseq's search treats NaN as a probability of zero and continues with the other tokens.
"""

import math

import torch
from fairseq.sequence_generator import EnsembleModel
from torch import Tensor

from fairseq_el.errors import UserError


class NotFinite(UserError):
    """NaN or infinity in the logits of a batch."""


def check_finite(numbers: Tensor) -> None:
    """numbers: one per row of logits that is NaN or infinite if a logit is, such as the logsumexp.

    Costs one small sum per step. The sum of large finite numbers may overflow, hence the second check.
    """
    if not math.isfinite(numbers.sum().item()) and not torch.isfinite(numbers).all():
        raise NotFinite(
            "the model computes NaN or infinite scores: its weights are damaged, or too large for half precision"
        )


class FiniteEnsemble(EnsembleModel):
    """Stock fairseq's ensemble with the check, for its own generator."""

    def forward_decoder(self, *args, **options):
        scores, attention = super().forward_decoder(*args, **options)
        check_finite(scores[:, self.single_model.decoder.dictionary.eos()])
        return scores, attention
