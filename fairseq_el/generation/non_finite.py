"""Notices NaN and infinity in what a model predicts, before a search makes a text of the rest.

fairseq's search takes NaN for a probability of zero, and goes on with what is left.
"""

import math

import torch
from fairseq.sequence_generator import EnsembleModel
from torch import Tensor

from fairseq_el.errors import UserError


class NotFinite(UserError):
    """NaN or infinity in the logits of a batch."""


def check_finite(numbers: Tensor) -> None:
    """numbers: one for each row of logits, such as its logsumexp: with NaN or infinity in a row, so is that.

    One sum over few numbers a step; that sums of large numbers overflow is only looked into when it happens.
    """
    if not math.isfinite(numbers.sum().item()) and not torch.isfinite(numbers).all():
        raise NotFinite(
            "the model computes NaN or infinite scores: its weights are damaged, or too large for half precision"
        )


class FiniteEnsemble(EnsembleModel):
    """Stock fairseq's models, for its own generator."""

    def forward_decoder(self, *args, **options):
        scores, attention = super().forward_decoder(*args, **options)
        check_finite(scores[:, self.single_model.decoder.dictionary.eos()])
        return scores, attention
