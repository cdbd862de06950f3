"""The file of summaries or translations, or standard output."""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_el.jobs.atomic_file import AtomicFile
from fairseq_el.jobs.inputs import Item
from fairseq_el.jobs.run import Candidate

SCORE_DIGITS = 4  # after the point: further ones depend on batches and threads
SUMMARY = "summary"  # the field of summaries, unless another is named
FIELDS = (SUMMARY, "translation")  # those that the other fields need not name


def added_fields(summary_field: str) -> list[str]:
    """Names of the fields that JSON objects get: summary, score and alternatives."""
    prefix = "" if summary_field in FIELDS else f"{summary_field}_"
    return [summary_field, f"{prefix}score", f"{prefix}alternatives"]


class Output:
    """Writes one line per text: the summary, or a JSON object with the summary, its score and alternatives."""

    def __init__(self, target: str, is_json: bool, summary_field: str = SUMMARY, nbest: int = 1):
        """target: the name of a file, which is written atomically, or `-`."""
        self.atomic = None if target == "-" else AtomicFile(Path(target))
        self.file = sys.stdout.buffer if self.atomic is None else self.atomic.file
        self.is_json = is_json
        self.fields = added_fields(summary_field)
        self.nbest = nbest
        self.digest = hashlib.sha256()

    def write(self, item: Item, candidates: Sequence[Candidate]) -> None:
        """candidates: best first; none for a blank or skipped text."""
        best = candidates[0] if candidates else Candidate("", None)
        line = as_json(item.record | self._added(best, candidates[1:])) if self.is_json else best.summary
        encoded = line.encode("utf-8") + b"\n"
        self.file.write(encoded)
        self.digest.update(encoded)
        if self.atomic is None:
            self.file.flush()

    def _added(self, best: Candidate, others: Sequence[Candidate]) -> dict[str, Any]:
        summary, score, alternatives = self.fields
        added: dict[str, Any] = {summary: best.summary, score: rounded(best.score)}
        if self.nbest > 1:
            name = summary if summary in FIELDS else SUMMARY
            added[alternatives] = [{name: other.summary, "score": rounded(other.score)} for other in others]
        return added

    def finish(self) -> None:
        if self.atomic is not None:
            self.atomic.finish()

    def close(self) -> None:
        """Removes an unfinished file; the journal has its contents."""
        if self.atomic is not None:
            self.atomic.discard()


def rounded(score: float | None) -> float | None:
    return None if score is None else round(score, SCORE_DIGITS)


def as_json(record: dict[str, Any]) -> str:
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape and UTF-8 can't encode
        line = json.dumps(record)
    return line
