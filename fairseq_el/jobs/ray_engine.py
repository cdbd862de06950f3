"""The work of a job on Ray, in many processes, on this machine or on many. Needs Ray, so import it only when asked for.

    numbers of windows -> Planner, one, where the input is -> batches -> Workers, a model each -> results -> driver

Ray Data moves the data between them. Each batch is a task: Ray repeats it elsewhere if its worker dies. The cluster
keeps nothing that matters: results go to the driver's journal, from which a killed driver resumes.
"""

import json
import logging
import socket
from collections.abc import Container, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fairseq_el.errors import UserError, explain
from fairseq_el.jobs.batching import Batcher, Source
from fairseq_el.jobs.inputs import Item, Texts
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.ray_cluster import Pool, connected, pool_for, pyarrow, ray
from fairseq_el.jobs.run import Done, Finished, Work, carry_out, missing_work
from fairseq_el.jobs.shards import Shard
from fairseq_el.jobs.summarizer import Summarizer

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 4  # at a batch whose workers die
MOST_PLANS = 1000  # groups of windows, so that Ray has few objects to keep
Row = dict[str, Any]


# ---- in the cluster


def as_table(row: Row) -> "pyarrow.Table":
    return pyarrow.table({"row": [json.dumps(row)]})


def rows_of(table: "pyarrow.Table") -> list[Row]:
    return [json.loads(row) for row in table["row"].to_pylist()]


def failure_of(error: Exception) -> Row:
    """An error that a user can act on, for the driver to report; others are raised."""
    message = explain(error) or (str(error) if isinstance(error, OSError) else None)
    if message is None:
        raise error
    return {"failure": message}


class Planner:
    """Forms the batches of windows, the same as a single process does."""

    def __init__(self, texts: Texts, batcher: Batcher, finished: Finished, window_size: int):
        self.texts = texts
        self.batcher = batcher
        self.finished = finished
        self.window_size = window_size

    def __call__(self, numbers: "pyarrow.Table") -> Iterator["pyarrow.Table"]:
        for number in numbers["window"].to_pylist():
            try:
                rows = self._plan(number)
            except Exception as error:
                rows = [failure_of(error)]
            yield from map(as_table, rows)

    def _plan(self, number: int) -> list[Row]:
        """A row for each batch, or one without lines: the driver needs a row for every window."""
        if self.texts.file is None:
            self.texts.reopen()
        window = self.texts.window(number, self.window_size)
        done = self.finished.lines(number)
        batches = list(missing_work(window, number * self.window_size, done, self.batcher)) or [Work([], [])]
        missing = sum(len(work.lines) for work in batches)
        return [
            {
                "window": number,
                "missing": missing,
                "lines": work.lines,
                "sources": [[source.tokens, source.is_cut] for source in work.sources],
            }
            for work in batches
        ]


class Attempts:
    """Counts how often each batch was begun and not ended. An actor of its own, which outlives workers."""

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}

    def begin(self, first_line: int) -> int:
        self.begun[first_line] = self.begun.get(first_line, 0) + 1
        return self.begun[first_line]

    def end(self, first_line: int) -> None:
        self.begun.pop(first_line, None)


class Warnings(logging.Handler):
    """Collects the warnings that the driver has to print."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("fairseq_el").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fairseq_el").removeHandler(self)


class Worker:
    """One model. The first batch loads it, so that a death during loading counts as an attempt at that batch."""

    def __init__(self, loading: dict[str, Any], digest: str, threads: int, attempts: Any):
        self.loading = loading
        self.digest = digest
        self.threads = threads
        self.attempts = attempts
        self.summarizer: Summarizer | None = None

    def __call__(self, batch: "pyarrow.Table") -> "pyarrow.Table":
        (row,) = rows_of(batch)
        if "failure" not in row:
            try:
                row = self._answer(row)
            except Exception as error:
                row = failure_of(error)
        return as_table(row)

    def _answer(self, row: Row) -> Row:
        answer: Row = {"window": row["window"], "missing": row["missing"], "parts": [], "warnings": []}
        if row["lines"]:
            work = Work(row["lines"], [Source(*source) for source in row["sources"]])
            with Warnings() as answer["warnings"]:
                self._begin(row["lines"][0])
                answer["parts"] = list(carry_out(work, self._loaded()))
            self.attempts.end.remote(row["lines"][0])
        return answer

    def _begin(self, first: int) -> None:
        before = ray.get(self.attempts.begin.remote(first)) - 1
        batch = f"the batch of line {first + 1}"
        if before >= MOST_ATTEMPTS:
            raise UserError(
                f"{before} workers died, one after the other, at {batch}, as they do when memory runs out: continue "
                "with --resume and fewer --workers or a smaller --max-tokens"
            )
        if before:
            logger.warning(f"a worker died, and {batch} is done again")

    def _loaded(self) -> Summarizer:
        if self.summarizer is None:
            torch.set_num_threads(self.threads)
            files = ModelFiles.find(self.loading["model"], self.loading["bpe_dir"])
            if files.digest() != self.digest:
                raise UserError(
                    f"{files.checkpoint} on {socket.gethostname()} is another model than the driver's: put the same "
                    "files there"
                )
            self.summarizer = Summarizer.load(**self.loading)
        return self.summarizer


# ---- the engine


class RayEngine:
    """Returns the results that arrive from the cluster."""

    def __init__(self, batcher: Batcher, answers: Iterator[Row]):
        self.batcher = batcher
        self.answers = answers
        self.missing: dict[int, int] = {}  # lines that have not arrived yet, of windows that are known
        self.said: set[str] = set()

    def parts(self, number: int, window: list[Item], done: Container[int]) -> Iterator[Done]:
        while self.missing.get(number) != 0:
            answer = next(self.answers, None)
            if answer is None:
                raise RuntimeError(f"Ray has lost a batch of window {number}")
            yield from self._take(answer)
        del self.missing[number]

    def _take(self, answer: Row) -> Iterator[Done]:
        if "failure" in answer:
            raise UserError(answer["failure"])
        for warning in answer["warnings"]:
            if warning not in self.said:
                self.said.add(warning)
                logger.warning(warning)
        parts = [Done.from_json(*part) for part in answer["parts"]]
        self.missing.setdefault(answer["window"], answer["missing"])
        self.missing[answer["window"]] -= sum(len(part.lines) for part in parts)
        yield from sorted(parts, key=lambda part: bool(part.problem))  # last, since a problem may end the run


@dataclass(frozen=True)
class Job:
    """The description of a job for the cluster."""

    texts: Texts
    window_size: int
    shard: Shard
    finished: Finished
    files: ModelFiles
    options: dict[str, Any]  # of Summarizer.load
    worker: type = Worker

    def loading(self) -> dict[str, Any]:
        """Arguments of `Summarizer.load`, with absolute paths."""
        first = self.files.encoding[0].absolute()
        encoding = first if len(self.files.encoding) == 1 else first.parent
        return self.options | {"model": self.files.checkpoint.absolute(), "bpe_dir": encoding}

    def answers(self, batcher: Batcher, pool: Pool) -> Generator[Row, None, None]:
        """Rows of results, in the order in which they arrive."""
        numbers = [{"window": number} for number in self.shard.windows(self.texts.count, self.window_size)]
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        attempts = ray.remote(Attempts).options(num_cpus=0, label_selector=here).remote()
        windows = ray.data.from_items(numbers, override_num_blocks=min(len(numbers), MOST_PLANS))
        batches = windows.map_batches(
            Planner,
            fn_constructor_args=(self.texts, batcher, self.finished, self.window_size),
            batch_size=1, batch_format="pyarrow", num_cpus=0, label_selector=here,
            compute=ray.data.ActorPoolStrategy(size=1),
        )  # fmt: skip
        summaries = batches.map_batches(
            self.worker,
            fn_constructor_args=(self.loading(), self.files.digest(), pool.cores, attempts),
            batch_size=1, batch_format="pyarrow", num_cpus=pool.cores, num_gpus=pool.gpus, memory=pool.memory or None,
            # one batch waits while another is generated; more would wait behind a slow one
            compute=ray.data.ActorPoolStrategy(size=pool.workers, max_tasks_in_flight_per_actor=2),
        )  # fmt: skip
        for table in summaries.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from rows_of(table)


def configure() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # byte, so that each task has one batch


@contextmanager
def open_engine(job: Job, address: str | None, workers: int | None) -> Iterator[RayEngine]:
    """Workers load the model at their first batch. Here it is loaded to see that it can be, and dropped again."""
    batcher = Summarizer.load(**job.loading() | {"cpu": True}).batcher
    with connected(address, max(workers or 1, torch.get_num_threads())):
        configure()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        pool = pool_for(nodes, workers, job.files.size(), job.options["cpu"])
        try:
            with closing(job.answers(batcher, pool)) as answers:  # before Ray itself ends
                yield RayEngine(batcher, answers)
        except ray.exceptions.RayTaskError:
            raise  # a bug
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:300]
            kept = "what was finished is kept, continue with --resume"
            raise UserError(f"the Ray cluster failed; {kept} ({reason})") from error
