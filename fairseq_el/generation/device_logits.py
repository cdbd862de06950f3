"""Scores on a GPU for a search loop on the host.

A step's bookkeeping is some forty operations on a few numbers per beam. On a GPU each would be a launch, and several
make the host wait; on the host they take microseconds. So fairseq's loop runs on the host, which it does if it is given
its sample there, and of the scores, which are as wide as the vocabulary, it only sees this stand-in.
"""

from typing import Any

import torch
from torch import Tensor


class IsNaN:
    """Stands for `lprobs != lprobs`."""


class DeviceLogits:
    """Logits or log-probabilities, [b * x, vocabulary] or [b, x, vocabulary], that stay on their device.

    Has what the loop does with them: it writes to columns, and takes them as an example of a precision.
    """

    def __init__(self, scores: Tensor, checks_finite: bool = False):
        """checks_finite: whether the search should raise an error for NaN, once it has read its candidates."""
        self.scores = scores
        self.checks_finite = checks_finite

    def __ne__(self, other: object) -> Any:
        return IsNaN()

    def __getitem__(self, index: Any) -> Tensor:
        return self.scores[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Leaves NaN, which fairseq's loop replaces, to the search: a softmax makes it of a whole row or of nothing."""
        if isinstance(index, IsNaN):
            return
        if isinstance(value, Tensor) and value.device == self.scores.device:
            return  # `lprobs[:, token] -= penalty` has changed a view of the scores
        if isinstance(index, tuple):
            index = tuple(part.to(self.scores.device) if isinstance(part, Tensor) else part for part in index)
        self.scores[index] = value

    def view(self, *shape: int) -> "DeviceLogits":
        return DeviceLogits(self.scores.view(*shape), self.checks_finite)

    def size(self, *dimension: int) -> Any:
        return self.scores.size(*dimension)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """`x.to(lprobs)` and `x.type_as(lprobs)`: the precision of scores, on the host."""
        if function in (Tensor.to, Tensor.type_as) and isinstance(args[0], Tensor):
            return args[0].to(torch.float32)
        return NotImplemented
