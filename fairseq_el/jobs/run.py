"""A job over many texts, batch by batch: what is still to do, in which order it comes out, what is kept of it.

An engine does the work: `OneProcess` here, or the processes of `ray_engine.py`. Batches are formed alike
whichever it is, and whether or not the job was interrupted; so sums are those of an undisturbed run, to the last bit.
"""

import ctypes
from collections.abc import Container, Iterator
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from fairseq_el.jobs.batching import Source, SourceReader
from fairseq_el.jobs.inputs import Item, Texts
from fairseq_el.jobs.journal import Journal, from_line
from fairseq_el.jobs.shards import Shard
from fairseq_el.jobs.summarizer import Summarizer, report_problem

# ---- batches


class Work(NamedTuple):
    """Texts of one batch that have no summary yet."""

    lines: list[int]  # of the input, counted from 0
    sources: list[Source]


class Done(NamedTuple):
    """What became of texts of one batch."""

    lines: list[int]
    summaries: list[str]
    cut: int  # how many texts were too long
    problem: str = ""  # why a text, then the only one, got "" instead of a summary


def work_in(window: list[Item], first: int, done: Container[int], reader: SourceReader) -> Iterator[Work]:
    """What is missing. Of a batch that went through in parts, that is only the rest.

    first: the line that the window begins with; done: lines that have a summary.
    """
    if not any(item.text.strip() and first + place not in done for place, item in enumerate(window)):
        return
    sources = [reader.encode(item.text) for item in window]
    for batch in reader.batches(sources):
        missing = [place for place in batch if first + place not in done]
        if missing:
            yield Work([first + place for place in missing], [sources[place] for place in missing])


def carry_out(work: Work, summarizer: Summarizer) -> Iterator[Done]:
    for part in summarizer.outcomes(work.sources):
        cut = sum(work.sources[place].is_cut for place in part.places)
        yield Done([work.lines[place] for place in part.places], part.summaries, cut, part.problem)


# ---- engines


class Engine(Protocol):
    reader: SourceReader

    def parts(self, number: int, window: list[Item], done: Container[int]) -> Iterator[Done]:
        """All that is missing in a window; what is finished of later windows may come along.

        number: of the window, each asked for once and in order; done: lines that have a summary from before.
        """
        ...


class OneProcess:
    """The work is done here, when it is asked for."""

    def __init__(self, summarizer: Summarizer, window_size: int):
        self.reader: SourceReader = summarizer
        self.summarizer = summarizer
        self.window_size = window_size

    def parts(self, number: int, window: list[Item], done: Container[int]) -> Iterator[Done]:
        for work in work_in(window, number * self.window_size, done, self.reader):
            yield from carry_out(work, self.summarizer)


# ---- what is kept


class Finished:
    """What an earlier run has left in the journal, window by window. Records may stand in any order there."""

    def __init__(self, journal: Journal | None, window_size: int):
        self.path = journal.path if journal else None
        self.places: dict[int, list[int]] = {}  # in the file, of the records of a window
        for place, record in journal.places() if journal else ():
            self.places.setdefault(record["lines"][0] // window_size, []).append(place)

    def of(self, window: int) -> list[dict[str, Any]]:
        if self.path is None or window not in self.places:
            return []
        with self.path.open("rb") as file:
            return [read_record(file, place) for place in self.places[window]]

    def lines(self, window: int) -> set[int]:
        return {line for record in self.of(window) for line in record["lines"]}


def read_record(file: Any, place: int) -> dict[str, Any]:
    file.seek(place)
    return from_line(file.readline())


def return_freed_memory() -> None:
    """To the system. Batches of ever new sizes leave gaps in the heap, for which glibc has no use and which it keeps: a
    process would grow for hours. Once a window takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # where there is none, there is another malloc
    if trim is not None:
        trim(0)


class Run:
    """Summaries in the order of the texts, each batch of them recorded in the journal once it is done."""

    def __init__(self, engine: Engine, journal: Journal | None, finished: Finished, bar: tqdm, on_error: str):
        self.engine = engine
        self.journal = journal
        self.finished = finished
        self.bar = bar
        self.on_error = on_error
        self.cut = 0
        self.skipped = 0
        self.waiting: dict[int, str] = {}  # summaries by line, until their turn comes

    def over(self, texts: Texts, window_size: int, shard: Shard) -> Iterator[tuple[Item, str]]:
        for number, window in texts.windows(window_size, shard):
            first = number * window_size
            done = self._from_journal(number)
            self._pass_over(len(done) + sum(not item.text.strip() for item in window))
            for part in self.engine.parts(number, window, done):
                self._keep(part, texts)
            for place, item in enumerate(window):
                yield item, self.waiting.pop(first + place, "")
            return_freed_memory()

    def _from_journal(self, window: int) -> set[int]:
        """Takes over what is recorded of a window; returns its lines."""
        lines: set[int] = set()
        for record in self.finished.of(window):
            self._take(record["lines"], record["summaries"], record["cut"], record["skipped"])
            lines.update(record["lines"])
        return lines

    def _take(self, lines: list[int], summaries: list[str], cut: int, skipped: int) -> None:
        self.waiting.update(zip(lines, summaries, strict=True))
        self.cut += cut
        self.skipped += skipped

    def _keep(self, part: Done, texts: Texts) -> None:
        if part.problem:
            self._report(texts.describe(part.lines[0]), part.problem)
        skipped = int(bool(part.problem))
        if self.journal:
            record = {"lines": part.lines, "summaries": part.summaries, "cut": part.cut, "skipped": skipped}
            self.journal.append(record)
        self._take(part.lines, part.summaries, part.cut, skipped)
        self.bar.update(len(part.lines))

    def _report(self, where: str, problem: str) -> None:
        resume = "--resume " if self.journal else ""
        kept = "what was finished is kept, " if self.journal else ""
        report_problem(where, problem, self.on_error, f"; {kept}leave it out with {resume}--on-error skip")

    def _pass_over(self, count: int) -> None:
        """Counts texts as done without counting them as speed."""
        self.bar.initial += count
        self.bar.n += count
        self.bar.refresh()
