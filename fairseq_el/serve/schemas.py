"""Requests and answers as JSON: their types, their limits, and one sentence for a mistake."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fairseq_el.serve.messages import Facts, Search
from fairseq_el.serve.settings import Limits

LARGEST = 1_000_000  # of any number; the limits of the server are below


class InvalidRequest(Exception):
    """A mistake in a request. The message is one sentence for the client."""


def whole_characters(text: str) -> str:
    """JSON can escape one half of a character beyond U+FFFF."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode: it has half of a surrogate pair") from None
    return text


SourceText = Annotated[str, AfterValidator(whole_characters)]


class Options(BaseModel):
    """How to search. What is left out is the preset's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    precision: str | None = Field(None, max_length=20, description="one of the server's (GET /v1/model)")
    attention: Literal["auto", "always", "never"] | None = Field(
        None, description="EL-attention always, never (keys and values instead), or where it is faster"
    )
    min_len: int | None = Field(None, ge=0, le=LARGEST, description="least tokens of a summary")
    max_len: int | None = Field(None, ge=1, le=LARGEST, description="most tokens of a summary")
    timeout: float | None = Field(None, gt=0, le=LARGEST, allow_inf_nan=False, description="seconds to wait")


def given(name: str, other: str) -> dict[str, Any]:
    """For the OpenAPI description: one field is there, and the other is not, or null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}}}


class SummariesRequest(Options):
    """One text, or several."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given("text", "texts"), given("texts", "text")]})

    text: SourceText | None = Field(None, description="the text to summarize")
    texts: list[SourceText] | None = Field(None, min_length=1, description="or several")
    search: str | None = Field(None, max_length=40, description="one of the preset's: beam, diverse, greedy ...")
    beam: int | None = Field(None, ge=1, le=LARGEST, description="beams of the search")
    nbest: int = Field(1, ge=1, le=LARGEST, description="summaries of each text, at most the beam")

    @model_validator(mode="after")
    def has_text_or_texts(self) -> "SummariesRequest":
        if (self.text is None) == (self.texts is None):
            raise ValueError("give either text or texts")
        return self

    def all_texts(self) -> list[str]:
        return [self.text] if self.text is not None else self.texts or []


class StreamRequest(Options):
    """One text, for greedy search."""

    text: SourceText = Field(description="the text to summarize")


class Alternative(BaseModel):
    summary: str
    score: float


class SummaryResult(BaseModel):
    """Of one text. With an `error`, summary and score are null."""

    summary: str | None
    score: float | None = Field(description="the sum of the tokens' log-probabilities / length ** lenpen")
    alternatives: list[Alternative] = Field(description="the next best, if nbest is more than 1")
    source_tokens: int
    summary_tokens: int
    truncated: bool = Field(description="the text was longer than the model reads, only its beginning was read")
    mostly_unknown: bool = Field(description="most of the text is unknown to the model, as another script may be")
    queue_seconds: float = Field(description="until the text's batch began")
    model_seconds: float = Field(description="in its batch")
    batch_texts: int = Field(description="texts in its batch, of all clients")
    source_state_bytes: int = Field(description="peak of what its batch cached of the sources")
    beam_state_bytes: int = Field(description="peak of what its batch cached of the summaries")
    error: str | None = Field(None, description="why this text has no summary")


class SummariesResponse(BaseModel):
    results: list[SummaryResult] = Field(description="in the order of the texts")
    seconds: float = Field(description="in the server, from the whole request to its answer")


class SearchDescription(BaseModel):
    beam: int
    min_len: int
    max_len: int | None


class ModelDescription(BaseModel):
    """What the server runs, and what requests may ask for."""

    model: str
    preset: str
    search: str = Field(description="of requests that name none")
    searches: dict[str, SearchDescription]
    precisions: list[str]
    attention: str
    longest_text: int = Field(description="tokens of a text that are read")
    streams: bool
    threads: int
    load_seconds: float
    version: str
    limits: dict[str, float]


class Problem(BaseModel):
    """Every answer with a status of 400 and above."""

    error: str = Field(description="one sentence")


EMPTY_RESULT: dict[str, Any] = {
    "summary": None, "score": None, "alternatives": [], "source_tokens": 0, "summary_tokens": 0, "truncated": False,
    "mostly_unknown": False, "model_seconds": 0.0, "batch_texts": 0, "source_state_bytes": 0, "beam_state_bytes": 0,
}  # fmt: skip
"""Of a text with an error."""


def search_of(request: SummariesRequest | StreamRequest, default: str, facts: Facts, limits: Limits) -> Search:
    """The options of a request, checked against the model as far as the front knows it."""
    streams = isinstance(request, StreamRequest)
    name = "greedy" if isinstance(request, StreamRequest) else request.search or default
    beam = None if isinstance(request, StreamRequest) else request.beam
    if streams and not facts.streams:
        raise InvalidRequest("this model has no greedy search whose summaries can be streamed: use /v1/summaries")
    if name not in facts.searches:
        raise InvalidRequest(f"search {name!r} does not exist: it is one of {', '.join(facts.searches)}")
    precision = request.precision or facts.precisions[0]
    if precision not in facts.precisions:
        raise InvalidRequest(f"precision {precision!r} is not served here: it is one of {', '.join(facts.precisions)}")
    used = beam or facts.searches[name].beam
    if used > max(limits.beam, facts.searches[name].beam):
        raise InvalidRequest(f"beam {used} is too large: at most {limits.beam}")
    if name == "greedy" and used != 1:
        raise InvalidRequest(f"greedy search has a beam of 1, not of {used}: leave beam out, or take another search")
    nbest = 1 if isinstance(request, StreamRequest) else request.nbest
    if nbest > used:
        raise InvalidRequest(f"nbest {nbest} is too large: at most the beam, which is {used}")
    if (request.max_len or 0) > limits.max_len:
        raise InvalidRequest(f"max_len {request.max_len} is too large: at most {limits.max_len}")
    return Search(name, precision, request.attention, beam, request.min_len, request.max_len)


def first_mistake(errors: list[Any]) -> str:
    """One sentence about the first of pydantic's errors."""
    error = errors[0]
    where = ".".join(str(part) for part in error["loc"] if part != "body")[:80]
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:300]
    return f"{where}: {message}" if where else message
