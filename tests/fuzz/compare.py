"""Compares what stock fairseq and ours find in a case."""

import re
import traceback
from dataclasses import dataclass

import torch

from fairseq_el.errors import UserError
from fuzz.cases import Case
from fuzz.systems import Hypotheses, run_ours, run_stock

TOLERANCE = 1e-4  # of scores and attention weights
ROUNDING = 1e-5  # log-probabilities closer than this may change places
TRIALS = 24


@dataclass
class Outcome:
    """kind: `equal`, `both raise`, `tie`, `known` (see docs/limits.md), or what is wrong: `differ`, `ours raises`,
    `stock raises`, `other error`."""

    kind: str
    detail: str = ""

    @property
    def is_fine(self) -> bool:
        return self.kind in ("equal", "both raise", "tie", "known")


def compare(case: Case) -> Outcome:
    stock, ours = attempt(run_stock, case), attempt(run_ours, case)
    if isinstance(stock, Exception) and isinstance(ours, Exception):
        same = kind_of(stock) == kind_of(ours) or isinstance(ours, UserError)
        return Outcome("both raise" if same else "other error", f"{describe(stock)}\n\nours: {describe(ours)}")
    if isinstance(ours, Exception):
        return Outcome("ours raises", describe(ours))
    if isinstance(stock, Exception):
        return Outcome("stock raises", describe(stock))
    wrong = [row for row in range(len(stock)) if difference(ours[row], stock[row])]
    if not wrong:
        return Outcome("equal")
    if all(has_stray_attention(case, row, ours[row], stock[row]) for row in wrong):
        return Outcome("known", "attention behind a closed prefix")
    detail = f"sentence {wrong[0]}: {difference(ours[wrong[0]], stock[wrong[0]])}"
    return Outcome("tie" if are_ties(case, ours, wrong) else "differ", detail)


def attempt(run, case: Case) -> Hypotheses | Exception:
    try:
        return run(case)
    except Exception as error:
        return error


def kind_of(error: Exception) -> tuple[type, str]:
    """The message without its numbers: sizes of tensors differ."""
    return type(error), re.sub(r"\d+", "", str(error))


def describe(error: Exception) -> str:
    return "".join(traceback.format_exception(error)[-4:])


def are_ties(case: Case, ours: Hypotheses, sentences: list[int]) -> bool:
    """True if rounding explains these: for each, stock finds what ours finds once its scores are off by a rounding
    error."""
    left = set(sentences)
    for seed in range(TRIALS):
        noisy = attempt(lambda case: run_stock(case, ROUNDING, seed), case)  # noqa: B023
        if isinstance(noisy, Exception):
            continue
        left -= {row for row in left if not difference(ours[row], noisy[row], 2 * TOLERANCE)}
        if not left:
            return True
    return False


def difference(ours: list[dict], stock: list[dict], tolerance: float = TOLERANCE) -> str:
    """Of the hypotheses of a sentence; empty if there is none."""
    tokens = [[h["tokens"].tolist() for h in found] for found in (ours, stock)]
    if tokens[0] != tokens[1]:
        return "\n" + "\n".join(
            f"{name} {text} {[round(float(h['score']), 6) for h in found]}"
            for name, text, found in zip(("ours ", "stock"), tokens, (ours, stock))
        )
    for h, g in zip(ours, stock):
        for name in ("score", "positional_scores"):
            if not torch.allclose(h[name], g[name], atol=tolerance, rtol=tolerance, equal_nan=True):
                return f"{name} {h[name].tolist()} and {g[name].tolist()} of {h['tokens'].tolist()}"
        if len(g["alignment"]):
            if not torch.allclose(h["attention"], g["attention"], atol=tolerance, equal_nan=True):
                return f"attention {h['attention']} and {g['attention']}"
            if not same_alignment(h["alignment"], g["alignment"], g["attention"], tolerance):
                return f"alignment {h['alignment']} and {g['alignment']}"
    return ""


def has_stray_attention(case: Case, row: int, ours: list[dict], stock: list[dict]) -> bool:
    """Where a prefix closes the text, stock copies tokens and scores from the first beam to the others, but not
    attention: there it is that of tokens with a probability of zero, which depend on the order of equal numbers.
    True if that is all that differs, and the first beam is the same."""
    closes = case.prefixes is not None and 2 in case.prefixes[row]
    plain = [[h | {"alignment": []} for h in found] for found in (ours, stock)]
    return closes and not difference(*plain) and any(not difference([h], [g]) for h in ours for g in stock)


def same_alignment(ours, stock, attention: torch.Tensor, tolerance: float) -> bool:
    """Hard ones are pairs of positions of words, soft ones decimal numbers for each target token. attention: [n, t].
    Where two words have the same weight but for rounding, either may be aligned."""
    if isinstance(stock[0], list):
        mine, other = (torch.tensor([[float(weight) for weight in row] for row in rows]) for rows in (ours, stock))
        return torch.allclose(mine, other, atol=tolerance)
    first = int(attention.any(dim=1).nonzero()[0])  # behind padding, which has no weight
    (words, tokens), (other_words, other_tokens) = (torch.tensor(pairs).unbind(1) for pairs in (ours, stock))
    if tokens.tolist() != other_tokens.tolist():
        return False
    gaps = attention[first + words, tokens] - attention[first + other_words, tokens]
    return bool((gaps.abs() < ROUNDING).all())
