"""`--scoring rouge`: ROUGE at the end of `fairseq-generate`, on text, with the package rouge-score.

fairseq gives a scorer the target and the best hypothesis of each sentence, decoded by `--bpe`, `--tokenizer` and
`--post-process`, in any order. Scores are F-measures in per cent with Porter's stemmer, averaged over the pairs.
"""

import functools
import json
import multiprocessing
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fairseq.data.encoders import build_bpe
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.scoring import BaseScorer
from fairseq.utils import strip_pad
from torch import Tensor

from fairseq_el.errors import UserError
from fairseq_el.text.sentences import split_sentences

KINDS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
PAIRS_PER_CALL = 250  # a process scores them in less than a second
RESAMPLES = 1000  # as ROUGE-1.5.5 does for its intervals


def rouge(references: Sequence[str], summaries: Sequence[str], lsum: bool = False) -> dict[str, np.ndarray]:
    """F-measures of each pair in per cent, by name: ROUGE-1, ROUGE-2 and ROUGE-L, or ROUGE-Lsum for `lsum`.

    ROUGE-L compares whole texts. ROUGE-Lsum compares sentence by sentence: the lines of a text that has several, else
    the result of `split_sentences`. Large sets use all cores.
    """
    if len(references) != len(summaries) or not references:
        raise UserError(
            f"there are {len(references):,} references and {len(summaries):,} summaries: "
            "ROUGE needs one summary for each reference, and at least one"
        )
    kinds = ("rouge1", "rouge2", "rougeLsum" if lsum else "rougeL")
    _rouge_score()  # if it is missing, report it once, before starting processes
    pairs = list(zip(references, summaries, strict=True))
    calls = [pairs[i : i + PAIRS_PER_CALL] for i in range(0, len(pairs), PAIRS_PER_CALL)]
    scored = map_over_cores(functools.partial(_score_pairs, kinds), calls)
    table = 100 * np.concatenate(scored)  # [pairs, kinds]
    return {KINDS[kind]: table[:, column] for column, kind in enumerate(kinds)}


def _score_pairs(kinds: tuple[str, ...], pairs: list[tuple[str, str]]) -> np.ndarray:
    """[pairs, kinds], F-measures from 0 to 1."""
    scorer = _scorer(kinds)
    if "rougeLsum" in kinds:
        pairs = [(one_sentence_a_line(a), one_sentence_a_line(b)) for a, b in pairs]
    scores = [scorer.score(reference, summary) for reference, summary in pairs]
    return np.array([[score[kind].fmeasure for kind in kinds] for score in scores])


def one_sentence_a_line(text: str) -> str:
    return text if "\n" in text else "\n".join(split_sentences(text))


def _rouge_score():
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError("ROUGE needs the package rouge-score: pip install rouge-score") from error
    return RougeScorer


@functools.cache
def _scorer(kinds: tuple[str, ...]):
    return _rouge_score()(list(kinds), tokenizer=CachingTokenizer())


class CachingTokenizer:
    """rouge-score's tokenizer with caches of stems and lines.

    Stemming would take half of the time, and ROUGE-Lsum tokenises each text twice, whole and by line. Tokens never
    cross a line, so the tokens of a text are those of its lines.
    """

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer
        from rouge_score.tokenize import tokenize

        self.stem = functools.cache(PorterStemmer().stem)
        self.tokenize_line = functools.lru_cache(64)(lambda line: tokenize(line, stemmer=self))

    def tokenize(self, text: str) -> list[str]:
        return [token for line in text.split("\n") for token in self.tokenize_line(line)]


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_over_cores(function: Callable, calls: list) -> list:
    """Applies a plain-Python function to each call, in as many processes as there are cores."""
    processes = min(available_cores(), len(calls))
    if processes == 1:
        return [function(call) for call in calls]
    # Other start methods would import torch in each process, which takes seconds. Python warns of forking a process
    # with threads; here these are torch's, and the function does not use torch.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        with ProcessPoolExecutor(processes, multiprocessing.get_context(method)) as pool:
            return list(pool.map(function, calls))


def bootstrap_interval(scores: np.ndarray) -> tuple[float, float]:
    """The 95% confidence interval of the mean, by bootstrap resampling with a fixed seed."""
    random = np.random.default_rng(1)
    means = [scores[random.integers(len(scores), size=len(scores))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def describe(scores: dict[str, np.ndarray], bootstrap: bool = False) -> str:
    """`ROUGE-1 41.01, ROUGE-2 21.50, ROUGE-L 37.64`, with intervals like `41.01 (39.48 to 42.57)`."""
    return ", ".join(f"{name} {_with_interval(column, bootstrap)}" for name, column in scores.items())


def _with_interval(scores: np.ndarray, bootstrap: bool) -> str:
    if not bootstrap:
        return f"{scores.mean():.2f}"
    low, high = bootstrap_interval(scores)
    return f"{scores.mean():.2f} ({low:.2f} to {high:.2f})"


@dataclass
class RougeConfig(FairseqDataclass):
    rouge_lsum: bool = field(
        default=False,
        metadata={
            "help": "ROUGE-Lsum instead of ROUGE-L: summaries of several sentences are compared sentence by "
            "sentence, as papers do for CNN/DailyMail"
        },
    )
    rouge_bootstrap: bool = field(
        default=False,
        metadata={"help": f"add 95 per cent confidence intervals, from {RESAMPLES} bootstrap resamples"},
    )


class RougeScorer(BaseScorer):
    """Collects pairs and scores them at the end. The one number of `score()` is ROUGE-1."""

    def add_string(self, ref: str, pred: str) -> None:
        if not self.ref:
            _rouge_score()  # if it is missing, fail before hours of generation and not after
        if looks_encoded(ref) or looks_encoded(pred):
            raise UserError(
                f"ROUGE needs text, but gets pieces such as {ref[:30]!r}: decode them with "
                "--bpe gpt2 or --bpe sentencepiece and its files, or with --remove-bpe (--eval-bleu-remove-bpe)"
            )
        super().add_string(ref, pred)

    def scores(self) -> dict[str, np.ndarray]:
        return rouge(self.ref, self.pred, lsum=self.cfg.rouge_lsum)

    def score(self) -> float:
        return float(self.scores()["ROUGE-1"].mean())

    def result_string(self) -> str:
        return describe(self.scores(), self.cfg.rouge_bootstrap)


def looks_encoded(text: str) -> bool:
    """True for pieces of SentencePiece (▁) or subword-nmt (@@), and ids of GPT-2's encoding."""
    if re.search(r"(?:^|\s)▁|@@(?:\s|$)", text):
        return True
    words = text.split()
    return len(words) > 4 and all(word.isdecimal() for word in words)


class RougeValidation:
    """Adds ROUGE to the validation of a translation task, in `fairseq-validate` and `fairseq-train`.

    Neither uses scorers, but with `--eval-bleu` both generate and compute BLEU. With `"rouge": true` in
    `--eval-bleu-args` the same hypotheses are also scored with ROUGE, as `rouge1`, `rouge2` and `rougeL`, or
    `rougeLsum` with `"rouge_lsum": true`. `"bpe": "gpt2"` and its files decode GPT-2's encoding.
    """

    rouge_options: dict[str, Any] = {}
    cfg: Any  # these three are the task's
    target_dictionary: Any
    tokenizer: Any

    def build_model(self, cfg, from_checkpoint=False):
        if self.cfg.eval_bleu:
            self.rouge_options = json.loads(self.cfg.eval_bleu_args)
            self.rouge_bpe = build_bpe(Namespace(**({"bpe": None} | self.rouge_options)))
        return super().build_model(cfg, from_checkpoint)

    def inference_step(self, *args, **kwargs):
        hypotheses = super().inference_step(*args, **kwargs)
        if self.rouge_options.get("rouge"):
            self.validated_hypotheses = hypotheses
        return hypotheses

    def valid_step(self, sample, model, criterion):
        loss, sample_size, logged = super().valid_step(sample, model, criterion)
        if self.rouge_options.get("rouge"):
            scorer = RougeScorer(RougeConfig(rouge_lsum=self.rouge_options.get("rouge_lsum", False)))
            for target, found in zip(sample["target"], self.validated_hypotheses, strict=True):
                target = strip_pad(target, self.target_dictionary.pad())
                scorer.add_string(self._validated_text(target), self._validated_text(found[0]["tokens"]))
            logged |= {f"_{name}": scores.sum() for name, scores in scorer.scores().items()}
            logged["_rouge_pairs"] = len(scorer.ref)
        return loss, sample_size, logged

    def _validated_text(self, tokens: Tensor) -> str:
        text = self.target_dictionary.string(tokens.int().cpu(), self.cfg.eval_bleu_remove_bpe)
        if self.rouge_bpe is not None:
            text = self.rouge_bpe.decode(text)
        return self.tokenizer.decode(text) if self.tokenizer else text

    def reduce_metrics(self, logging_outputs, criterion):
        super().reduce_metrics(logging_outputs, criterion)
        pairs = sum(logged.get("_rouge_pairs", 0) for logged in logging_outputs)
        for kind, name in KINDS.items():
            if any(f"_{name}" in logged for logged in logging_outputs):
                total = sum(logged.get(f"_{name}", 0) for logged in logging_outputs)
                metrics.log_scalar(kind, total / pairs, pairs, round=2)
