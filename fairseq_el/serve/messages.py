"""What the front and the worker say to each other. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

# ---- to the worker


@dataclass(frozen=True)
class Search:
    """Options that texts of one batch have in common; None is the preset's."""

    search: str
    precision: str
    attention: str | None = None
    beam: int | None = None
    min_len: int | None = None
    max_len: int | None = None


class Text(NamedTuple):
    job: int
    text: str
    nbest: int
    streams: bool


class Batch(NamedTuple):
    search: Search
    texts: list[Text]


class Cancel(NamedTuple):
    job: int  # in work; its batch is given up once all of its texts are cancelled


# ---- from the worker


class Ready(NamedTuple):
    facts: "Facts"


class LoadFailed(NamedTuple):
    message: str


class Token(NamedTuple):
    job: int
    text: str  # what this token adds to the summary


class Result(NamedTuple):
    """Of one text. kind: `ok`, or of the problem: `invalid` (the options), `failed` (this text) or `internal`."""

    job: int
    fields: dict[str, Any]
    problem: str = ""
    kind: str = "ok"


class PartDone(NamedTuple):
    results: list[Result]
    is_last: bool  # of the batch


@dataclass(frozen=True)
class SearchFacts:
    beam: int
    min_len: int
    max_len: int | None  # None where lengths are relative to the source's


@dataclass(frozen=True)
class Facts:
    """About the model, for validation, batching and the page."""

    model: str
    preset: str
    searches: dict[str, SearchFacts]
    precisions: tuple[str, ...]
    attention: str  # of requests that name none
    longest_text: int  # tokens
    batch_size: int | None
    max_tokens: int | None  # in a batch, padding included
    streams: bool
    threads: int
    load_seconds: float
