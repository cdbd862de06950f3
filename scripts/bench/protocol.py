"""What a benchmark worker is: a process that loads one system and then answers requests.

A request and its answer are a line of JSON each, on the worker's standard input and output. This module needs nothing
but Python's standard library, because workers run in environments of their own.
"""

import ctypes
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THREADS = 2
PAD, EOS = 1, 2
FIRST_WORD = 4  # 0 to 3 are <s>, <pad>, </s>, <unk>, in fairseq's dictionaries and in Transformers' BART
SEED = 20210
PR_SET_PDEATHSIG = 1

Sentences = list[list[int]]


@dataclass(frozen=True)
class Request:
    """One piece of work for a worker.

    op: "generate" (random sources in, exactly `length` tokens out for each, the closing </s> among them; everything is
    timed), "texts" (the sentences of a file in, of any length out), "encode" (the encoder alone), "source_state" (bytes
    that are cached of the source, from the live tensors), or one of `operations.py`.
    lengths: of distinct sources, which a batch goes through in turn. search: further options of fairseq's search.
    attention: of fairseq_el. multi_head: what becomes of K and V in stock fairseq: None as this release has it,
    "copied" for each beam, or "no-cache". options: of operations.
    """

    op: str
    batch: int = 1
    lengths: tuple[int, ...] = ()
    beam: int = 1
    length: int = 1
    search: dict[str, Any] = field(default_factory=dict)
    attention: str | None = None
    multi_head: str | None = None
    texts: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


Answer = dict[str, Any]  # at least `seconds` and `tokens` where something was generated
System = Any  # with `vocabulary`, `versions`, `settings` as a user writes them, and `generate(request, sources)`


def source_sentences(request: Request, vocabulary: int) -> Sentences:
    """The same random sources for every system, of exactly the requested lengths, closed by </s>."""
    distinct = []
    for index, length in enumerate(request.lengths[: request.batch]):
        words = random.Random(f"{SEED}/{length}/{index}")
        distinct.append([words.randrange(FIRST_WORD, vocabulary) for _ in range(length - 1)] + [EOS])
    return [distinct[index % len(distinct)] for index in range(request.batch)]


def padded(sources: Sentences, left: bool) -> Sentences:
    """[b, n]: as long as the longest, filled up with <pad> before or behind."""
    longest = max(map(len, sources))
    fill = [[PAD] * (longest - len(source)) for source in sources]
    return [gap + source if left else source + gap for gap, source in zip(fill, sources)]


def without_eos(tokens: list[int]) -> list[int]:
    """Up to the closing </s>."""
    return tokens[: tokens.index(EOS)] if EOS in tokens else [token for token in tokens if token != PAD]


def in_batches(sentences: Sentences, size: int) -> list[Sentences]:
    return [sentences[start : start + size] for start in range(0, len(sentences), size)]


def fingerprint(tokens: list[int]) -> str:
    """Of an output, to count those that are the same in two systems."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:8]


def memory(field: str) -> int:
    """Of this process, in bytes: VmRSS is what it holds, VmHWM the most that it held since `reset_peak`."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def reset_peak() -> None:
    """Gives memory that was freed back to the system and starts the peak afresh."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def serve(load: Callable[[dict[str, Any]], System]) -> None:
    """Loads the system described by the JSON on the command line and answers until input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # stopped between requests, it would not notice
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the log

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    system = load(json.loads(sys.argv[1]))
    loading = memory("VmHWM")
    reset_peak()  # what loading has freed is not what the system takes at rest
    facts = {"versions": system.versions, "settings": system.settings}
    send(facts | {"rest_bytes": memory("VmRSS"), "loading_bytes": loading})
    for line in sys.stdin:
        request = Request(**json.loads(line))
        sources = json.loads(Path(request.texts).read_text()) if request.texts else []
        if not request.texts and request.lengths:
            sources = source_sentences(request, system.vocabulary)
        reset_peak()
        answer = system.generate(request, sources)
        send(answer | {"peak_bytes": memory("VmHWM")})
