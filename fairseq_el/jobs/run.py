"""A job over many texts, batch by batch: what is missing, in which order results come out, what the journal keeps.

An engine does the work: `OneProcess` here, or the processes of `ray_engine.py`. Both form the same batches, and so does
a resumed job; so scores equal those of an undisturbed run.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from fairseq_el import heap
from fairseq_el.jobs.batching import Batcher, Source
from fairseq_el.jobs.inputs import Item, Texts
from fairseq_el.jobs.journal import Journal, from_line
from fairseq_el.jobs.shards import Shard
from fairseq_el.jobs.summarizer import Summarizer, report_problem

# ---- batches


class Work(NamedTuple):
    """Texts of one batch that have no result yet."""

    lines: list[int]  # of the input, counted from 0
    sources: list[Source]


class Candidate(NamedTuple):
    """A summary and its score, as journals and Ray carry them."""

    summary: str
    score: float | None


class Done(NamedTuple):
    """Results of texts of one batch."""

    lines: list[int]
    results: list[list[Candidate]]  # of each text, best first; none for a text with a problem
    counts: Mapping[str, int] = {}  # of texts that were cut or are mostly unknown
    problem: str = ""  # why a text, which is then the only one, has no result

    @classmethod
    def from_json(cls, lines: list[int], results: list[Any], counts: Mapping[str, int], problem: str = "") -> "Done":
        return cls(lines, [[Candidate(*found) for found in candidates] for candidates in results], counts, problem)


def missing_work(window: list[Item], first: int, done: Container[int], batcher: Batcher) -> Iterator[Work]:
    """The batches of a window, without the texts that are done.

    first: the line that the window begins with; done: lines that have a result.
    """
    if not any(item.text.strip() and first + index not in done for index, item in enumerate(window)):
        return
    sources = [batcher.encode(item.text) for item in window]
    batcher.check_known(sources)
    for batch in batcher.batches(sources):
        missing = [index for index in batch if first + index not in done]
        if missing:
            yield Work([first + index for index in missing], [sources[index] for index in missing])


def carry_out(work: Work, summarizer: Summarizer) -> Iterator[Done]:
    for part in summarizer.outcomes(work.sources, summarizer.nbest):
        sources = [work.sources[index] for index in part.indices]
        counts = {
            "cut": sum(source.is_cut for source in sources),
            "unknown": sum(map(summarizer.batcher.is_mostly_unknown, sources)),
        }
        results = [[Candidate(found.summary, found.score) for found in hypotheses] for hypotheses in part.hypotheses]
        yield Done([work.lines[index] for index in part.indices], results, counts, part.problem)


# ---- engines


class Engine(Protocol):
    batcher: Batcher

    def parts(self, number: int, window: list[Item], done: Container[int]) -> Iterator[Done]:
        """All that is missing in a window; finished parts of later windows may be among them.

        number: of the window; each is asked for once and in order; done: lines that have a result from before.
        """
        ...


class OneProcess:
    """Works in this process, when asked."""

    def __init__(self, summarizer: Summarizer, window_size: int):
        self.batcher = summarizer.batcher
        self.summarizer = summarizer
        self.window_size = window_size

    def parts(self, number: int, window: list[Item], done: Container[int]) -> Iterator[Done]:
        for work in missing_work(window, number * self.window_size, done, self.batcher):
            yield from carry_out(work, self.summarizer)


# ---- the journal


class Finished:
    """The records that an earlier run left in the journal, by window. They may be in any order there."""

    def __init__(self, journal: Journal | None, window_size: int):
        self.path = journal.path if journal else None
        self.offsets: dict[int, list[int]] = {}  # in the file, of the records of each window
        for offset, record in journal.offsets() if journal else ():
            self.offsets.setdefault(record["lines"][0] // window_size, []).append(offset)

    def of(self, window: int) -> list[dict[str, Any]]:
        if self.path is None or window not in self.offsets:
            return []
        with self.path.open("rb") as file:
            return [read_record(file, offset) for offset in self.offsets[window]]

    def lines(self, window: int) -> set[int]:
        return {line for record in self.of(window) for line in record["lines"]}


def read_record(file: Any, offset: int) -> dict[str, Any]:
    file.seek(offset)
    return from_line(file.readline())


class Run:
    """Yields results in the order of the texts, and records each batch in the journal once it is done."""

    def __init__(self, engine: Engine, journal: Journal | None, finished: Finished, bar: tqdm, on_error: str):
        self.engine = engine
        self.journal = journal
        self.finished = finished
        self.bar = bar
        self.on_error = on_error
        self.counts: Counter[str] = Counter()  # of texts: cut, unknown, skipped
        self.waiting: dict[int, list[Candidate]] = {}  # results by line, until their turn comes

    def over(self, texts: Texts, window_size: int, shard: Shard) -> Iterator[tuple[Item, list[Candidate]]]:
        for number, window in texts.windows(window_size, shard):
            first = number * window_size
            done = self._from_journal(number)
            self._advance(len(done) + sum(not item.text.strip() for item in window))
            for part in self.engine.parts(number, window, done):
                self._keep(part, texts)
            for index, item in enumerate(window):
                yield item, self.waiting.pop(first + index, [])
            heap.trim()  # batches of ever new sizes leave gaps: a process would grow for hours

    def _from_journal(self, window: int) -> set[int]:
        """Takes the recorded results of a window; returns their lines."""
        lines: set[int] = set()
        for record in self.finished.of(window):
            self._take(Done.from_json(**record))
            lines.update(record["lines"])
        return lines

    def _take(self, part: Done) -> None:
        self.waiting.update(zip(part.lines, part.results, strict=True))
        self.counts.update(part.counts)

    def _keep(self, part: Done, texts: Texts) -> None:
        if part.problem:
            self._report(texts.describe(part.lines[0]), part.problem)
            part = part._replace(counts={**part.counts, "skipped": 1}, problem="")
        if self.journal:
            self.journal.append({"lines": part.lines, "results": part.results, "counts": part.counts})
        self._take(part)
        self.bar.update(len(part.lines))

    def _report(self, where: str, problem: str) -> None:
        resume = "--resume " if self.journal else ""
        kept = "what was finished is kept, " if self.journal else ""
        report_problem(where, problem, self.on_error, f"; {kept}leave it out with {resume}--on-error skip")

    def _advance(self, count: int) -> None:
        """Counts texts as done without counting them as speed."""
        self.bar.initial += count
        self.bar.n += count
        self.bar.refresh()
