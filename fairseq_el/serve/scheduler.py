"""Dynamic batching: takes texts of all clients, gives the worker one batch after the other, and hands out results.

Everything here runs in the event loop. The worker has one batch at a time, so that what arrives meanwhile can be
sorted.
"""

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fairseq_el.serve.batches import Job, Queue
from fairseq_el.serve.messages import Batch, Cancel, Facts, LoadFailed, PartDone, Ready, Result, Search, Token
from fairseq_el.serve.metrics import Metrics
from fairseq_el.serve.settings import Limits, ModelSettings
from fairseq_el.serve.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 2  # at a text with which the worker dies: in its batch, and alone


class NotReady(Exception):
    """The server has no model yet, or is about to end."""


class Answer(NamedTuple):
    result: Result
    queue_seconds: float


class Scheduler:
    """on_failure: called with a message when there is no worker and none can be started."""

    def __init__(self, model: ModelSettings, limits: Limits, metrics: Metrics):
        self.model = model
        self.limits = limits
        self.metrics = metrics
        self.queue = Queue(limits.queue)
        self.worker = WorkerProcess(self._on_message, self._on_exit)
        self.facts: Facts | None = None  # once a worker has loaded the model
        self.is_ready = self.is_stopping = self.is_refusing = False
        self.on_failure: Callable[[str], None] = logger.error
        self.answers: dict[Job, asyncio.Future[Answer]] = {}  # of texts that clients wait for
        self.in_work: dict[int, Job] = {}
        self.began = 0.0  # the batch in work
        self.had_company = False  # whether the last batch had texts of several requests
        self.numbers = itertools.count()
        self.timer: asyncio.TimerHandle | None = None

    # ---- for the application

    def start(self) -> None:
        self.worker.start(self.model)

    def stop(self) -> None:
        self.is_stopping = self.is_refusing = True
        self.worker.stop()

    def refuse_new(self) -> None:
        """From now on only what has been accepted is finished."""
        self.is_refusing = True

    def check_open(self) -> Facts:
        if self.is_refusing:
            raise NotReady("the server is shutting down")
        if self.facts is None:
            raise NotReady("the model is being loaded")
        return self.facts

    def submit(
        self, texts: list[str], search: Search, nbest: int = 1, on_token: Callable[[str], None] | None = None
    ) -> list[asyncio.Future[Answer]]:
        """Cancelling a future takes its text out of the queue, or out of its batch."""
        jobs = [Job(next(self.numbers), text, search, nbest, on_token) for text in texts]
        self.queue.add(jobs)
        loop, futures = asyncio.get_running_loop(), []
        for job in jobs:
            future: asyncio.Future[Answer] = loop.create_future()
            future.add_done_callback(functools.partial(self._forget_if_cancelled, job))
            self.answers[job] = future
            futures.append(future)
        self._give_work()
        return futures

    # ---- the queue

    def _forget_if_cancelled(self, job: Job, future: asyncio.Future[Answer]) -> None:
        if not future.cancelled():
            return
        self.answers.pop(job, None)
        if not self.queue.remove(job) and job.number in self.in_work:
            self.worker.send(Cancel(job.number))
        self._observe_queue()

    def _give_work(self) -> None:
        self._observe_queue()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if not self.is_ready or self.in_work or not len(self.queue):
            return
        batch, is_full = self.queue.next_batch()
        oldest = min(job.arrived for job in batch)
        wait = oldest + self.limits.batch_wait - time.monotonic()
        if not is_full and self.had_company and wait > 0:
            self.timer = asyncio.get_running_loop().call_later(wait, self._give_work)
            return
        self._begin(batch)

    def _begin(self, batch: list[Job]) -> None:
        self.began = time.monotonic()
        self.had_company = len({job.arrived for job in batch}) > 1
        for job in batch:
            self.queue.remove(job)
            self.in_work[job.number] = job
        self.worker.send(Batch(batch[0].search, [job.message() for job in batch]))
        self.metrics.batch_texts.observe(len(batch))
        self._observe_queue()

    def _observe_queue(self) -> None:
        self.metrics.queue_texts.set(len(self.queue))

    # ---- the worker

    def _on_message(self, message: Any) -> None:
        if isinstance(message, PartDone):
            self._take(message)
        elif isinstance(message, Token):
            job = self.in_work.get(message.job)
            if job in self.answers and job.on_token:
                job.on_token(message.text)
        elif isinstance(message, Ready):
            self.facts, self.is_ready = message.facts, True
            self.queue.fit(message.facts)
            self._give_work()
        elif isinstance(message, LoadFailed):
            self._fail(message.message)

    def _take(self, part: PartDone) -> None:
        """Gives the worker its next batch before clients get the results of this one: it should not wait."""
        began, jobs = self.began, dict(self.in_work)
        for result in part.results:
            del self.in_work[result.job]
        if part.is_last:
            self.in_work.clear()  # texts of a cancelled batch
            self._learn(part, jobs, time.monotonic() - began)
            self._give_work()
        for result in part.results:
            self._answer(jobs[result.job], result, began)

    def _learn(self, part: PartDone, jobs: dict[int, Job], seconds: float) -> None:
        done = [result for result in part.results if result.kind == "ok"]
        characters = sum(len(jobs[result.job].text) for result in done if not result.fields["truncated"])
        tokens = sum(result.fields["source_tokens"] for result in done if not result.fields["truncated"])
        self.queue.rates.learn(characters, tokens, seconds)

    def _answer(self, job: Job, result: Result, began: float) -> None:
        future = self.answers.pop(job, None)
        if result.kind == "ok":
            self.metrics.count_result(result.fields)
        if future is not None and not future.done():
            future.set_result(Answer(result, began - job.arrived))

    def _on_exit(self, status: int) -> None:
        """Texts of the batch in which a worker died are tried once more, each alone: one of them may be the cause."""
        was_ready, self.is_ready = self.is_ready, False
        if self.is_stopping:
            return
        jobs, began = list(self.in_work.values()), self.began
        self.in_work.clear()
        again = []
        for job in jobs:
            job.attempts += 1
            if job.attempts < MOST_ATTEMPTS and job.on_token is None:
                again.append(job)
            else:
                problem = "the model's process ended while it worked on this text, for example for lack of memory"
                self._answer(job, Result(job.number, {}, problem, "failed"), began)
        self.queue.put_back(job for job in again if job in self.answers)
        if not was_ready:
            return self._fail(f"the model's process ended with status {status} while it loaded the model")
        logger.warning(f"the model's process ended with status {status}; it is started again")
        self.metrics.worker_restarts.inc()
        self.worker = WorkerProcess(self._on_message, self._on_exit)
        self.worker.start(self.model)

    def _fail(self, message: str) -> None:
        if not self.is_stopping:
            self.is_stopping = self.is_refusing = True
            self.on_failure(message)
