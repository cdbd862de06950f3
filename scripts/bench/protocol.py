"""What a benchmark worker is: a process that loads one system and then answers requests.

One request and one answer are a line of JSON each, on the worker's standard input and output. This
module needs nothing but Python's standard library, because workers run in different environments.
"""

import ctypes
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

THREADS = 2
PAD, EOS = 1, 2
FIRST_WORD = (
    4  # 0 to 3 are <s>, <pad>, </s>, <unk>, in fairseq's dictionaries and in Transformers' BART
)
DISTINCT_SENTENCES = 8
SEED = 20210


@dataclass(frozen=True)
class Request:
    """One generation. `length` tokens are produced for each sentence, the closing </s> among them.

    op is "generate" (text in, text out; everything is timed), "decode" (the same with the encoder's
    output at hand from an earlier request, so that only decoding is timed), "parts" (the same, but of
    the steps only some at the beginning and some at the end, see `parts.py`), "sources" (its distinct
    sources are encoded once more, which alone is timed) or "source_state" (bytes cached about the
    source, measured from the live tensors). `attention` is for systems that have a choice.

    `lengths` are those of the distinct sources where they differ; `source_length` is then the longest.
    `search` holds further options of fairseq's search. `multi_head` says for stock fairseq what becomes
    of K and V: as this release has it, "copied" for each beam, or "no-cache".
    """

    op: str
    batch: int
    source_length: int
    beam: int
    length: int
    attention: str | None = None
    lengths: tuple[int, ...] = ()
    search: dict[str, Any] = field(default_factory=dict)
    multi_head: str | None = None


@dataclass
class Answer:
    """What a worker measured. Times in seconds, sizes in bytes, None where a system doesn't
    tell."""

    seconds: float = 0.0
    encoder_seconds: float | None = None
    step_seconds: float | None = None  # from one decoding step to the next, median of the generation
    source_state_bytes: int | None = None
    state_bytes: int | None = None  # of sources and beams together, at the peak
    parts: dict[str, Any] | None = None  # for "parts" and "sources": the input of `extrapolate.py`
    tokens: list[list[int]] = field(
        default_factory=list
    )  # best hypothesis of each sentence, no </s>
    memory: dict[str, int] = field(default_factory=dict)


class System(Protocol):
    """One system under test. `vocabulary` is the number of tokens it knows."""

    vocabulary: int
    versions: dict[str, str]

    def answer(self, request: Request, sources: list[list[int]]) -> Answer: ...


def source_sentences(request: Request, vocabulary: int) -> list[list[int]]:
    """The same random sources for every system, each of exactly the requested length, closed by
    </s>. Where lengths differ, batches go through them in turn.

    Large batches repeat a few distinct sentences: time doesn't depend on the words, and a system
    that has the encoder's output of the distinct ones at hand has that of all.
    """
    sentences = []
    lengths = request.lengths or (request.source_length,) * DISTINCT_SENTENCES
    for index, length in enumerate(lengths[: request.batch]):
        words = random.Random(f"{SEED}/{length}/{index}")
        body = [words.randrange(FIRST_WORD, vocabulary) for _ in range(length - 1)]
        sentences.append(body + [EOS])
    return [sentences[index % len(sentences)] for index in range(request.batch)]


def padded(sources: list[list[int]], left: bool) -> list[list[int]]:
    """[b, n]: as long as the longest, filled up with <pad> before or behind."""
    longest = max(map(len, sources))
    fill = [[PAD] * (longest - len(source)) for source in sources]
    return [gap + source if left else source + gap for gap, source in zip(fill, sources)]


def without_eos(tokens: list[int]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] == EOS else tokens


def resident_memory() -> dict[str, int]:
    """Resident memory of this process now and at its peak since `reset_peak`, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident": int(status["VmRSS"].split()[0]) * 1024,
        "peak": int(status["VmHWM"].split()[0]) * 1024,
    }


def reset_peak() -> None:
    """Gives memory that was freed back to the system and starts the peak afresh."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def json_lines():
    """Yields a file for answers and sends whatever libraries print to the log (standard error)."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def serve(load: Callable[[dict[str, Any]], System]) -> None:
    """Loads the system described by the JSON on the command line and answers until input ends."""
    options = json.loads(sys.argv[1])
    with json_lines() as answers:

        def send(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=answers, flush=True)

        system = load(options)
        peak = resident_memory()["peak"]
        reset_peak()  # what loading has freed is not what the system takes at rest
        send({"memory": resident_memory() | {"peak": peak}, "versions": system.versions})
        for line in sys.stdin:
            request = Request(**json.loads(line))
            sources = source_sentences(request, system.vocabulary)
            reset_peak()
            answer = system.answer(request, sources)
            answer.memory = resident_memory()
            send(asdict(answer))
