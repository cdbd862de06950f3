"""Scores with intervals, and what differs between the outputs of two systems. No input, no output."""

import re
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import numpy as np

from fairseq_el.text import rouge
from fairseq_el.text.sentences import one_line

NO_SPACES = r"\u3040-\u30ff\u3400-\u9fff"  # Chinese and Japanese
WORD = re.compile(rf"(?:[{NO_SPACES}]|[^\W{NO_SPACES}]+|[^\w\s])\s*|\s+")
"""A word or a mark, with the space behind it; a character in scripts without spaces."""


class Estimate(NamedTuple):
    """A score with its 95% interval, by bootstrap resampling of the texts."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, scores: np.ndarray) -> "Estimate":
        return cls(float(scores.mean()), *rouge.bootstrap_interval(scores))

    def __str__(self) -> str:
        return format(self)

    def __format__(self, sign: str) -> str:
        """sign: `+` to show that of positive numbers too."""
        value, low, high = (f"{round(number, 2) + 0.0:{sign}.2f}" for number in self)  # + 0.0: no -0.00
        return f"{value} ({low} to {high})"


@dataclass
class System:
    """A variant that was evaluated.

    scores: ROUGE of each text, in per cent, by name. estimates: of the set, with BLEU if that is asked for. row: in the
    table of results.
    """

    name: str
    summaries: list[str]
    scores: dict[str, np.ndarray]
    estimates: dict[str, Estimate]
    row: dict[str, Any] = field(default_factory=dict)


def estimates_of(
    scores: dict[str, np.ndarray], references: list[str], summaries: list[str], with_bleu: bool
) -> dict[str, Estimate]:
    found = {name: Estimate.of_mean(column) for name, column in scores.items()}
    return found | ({"BLEU": bleu(references, summaries)} if with_bleu else {})


def bleu(references: list[str], summaries: list[str]) -> Estimate:
    from sacrebleu.metrics import BLEU

    lines = [[one_line(reference) for reference in references]]
    score = BLEU().corpus_score(summaries, lines, n_bootstrap=rouge.RESAMPLES)
    return Estimate(score.score, score._mean - score._ci, score._mean + score._ci)


@dataclass(frozen=True)
class Pair:
    """The outputs of two systems for a text.

    similarity: from 0, no word in common, to 1, the same words in the same order. parts: both texts, cut into parts
    that are alternately common to both and different; the first is common.
    """

    similarity: float
    parts: tuple[list[str], list[str]]

    @classmethod
    def of(cls, first: str, second: str) -> "Pair":
        if first == second:
            return cls(1.0, ([first], [second]))
        words = WORD.findall(first), WORD.findall(second)
        a, b = ([word.strip() for word in side] for side in words)
        matcher = SequenceMatcher(None, a, b, autojunk=False)
        parts: tuple[list[str], list[str]] = ([], [])
        for tag, *bounds in matcher.get_opcodes():
            for side, start, end, found in zip(words, bounds[::2], bounds[1::2], parts):
                if not found and tag != "equal":
                    found.append("")
                found.append("".join(side[start:end]))
        return cls(matcher.ratio(), parts)


@dataclass(frozen=True)
class Comparison:
    """Of a system with another.

    differences: of the scores that have a value for each text, first less second, with the interval of the mean.
    """

    first: System
    second: System
    pairs: list[Pair]
    differences: dict[str, Estimate]

    @classmethod
    def of(cls, first: System, second: System) -> "Comparison":
        pairs = [Pair.of(*texts) for texts in zip(first.summaries, second.summaries, strict=True)]
        differences = {name: Estimate.of_mean(scores - second.scores[name]) for name, scores in first.scores.items()}
        return cls(first, second, pairs, differences)

    @property
    def identical(self) -> int:
        return sum(a == b for a, b in zip(self.first.summaries, self.second.summaries))

    def most_different(self, most: int) -> list[int]:
        """The texts whose outputs differ, by similarity, lowest first."""
        texts = zip(self.first.summaries, self.second.summaries)
        differing = [i for i, (a, b) in enumerate(texts) if a != b]
        return sorted(differing, key=lambda i: self.pairs[i].similarity)[:most]

    def as_row(self) -> dict[str, Any]:
        return {"with": self.second.name, "identical": self.identical, "differences": self.differences}
