"""The queue of texts, and which of them form the next batch."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fairseq_el.serve.messages import Facts, Search, Text

SPREAD = 4.0  # the longest text of a batch is at most so many times as long as the shortest, about
FIRST_RATIO = 0.25  # tokens per character, until results tell


class QueueFull(Exception):
    """retry_after: seconds until there may be room."""

    def __init__(self, retry_after: int):
        super().__init__(f"the queue is full: try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False)
class Job:
    """One text of a request."""

    number: int
    text: str
    search: Search
    nbest: int = 1
    on_token: Callable[[str], None] | None = None
    tokens: int = 1  # estimated
    arrived: float = field(default_factory=time.monotonic)
    due: float = 0.0
    attempts: int = 0  # that ended with the worker's

    def message(self) -> Text:
        return Text(self.number, self.text, self.nbest, self.on_token is not None)


class Rates:
    """Tokens per character and seconds per token, as far as results have shown. Only the order of batches and
    Retry-After depend on them."""

    def __init__(self) -> None:
        self.tokens_per_character = FIRST_RATIO
        self.seconds_per_token = 0.0

    def learn(self, characters: int, tokens: int, seconds: float) -> None:
        if characters and tokens:
            self.tokens_per_character += 0.1 * (tokens / characters - self.tokens_per_character)
            self.seconds_per_token += 0.1 * (seconds / tokens - self.seconds_per_token)


class Queue:
    """Texts that wait. The one that is due first leads the next batch; texts of the same options and of similar length
    join it, within the batch's size.

    A text is due when it arrived, plus the time that it and the texts before it in its request will take. So a short
    text passes a long one, and the rest of a large request, that came shortly before it. But nothing waits behind what
    arrives after it is due: neither long nor short texts starve.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.jobs: dict[int, Job] = {}
        self.alone: list[Job] = []  # texts of a batch in which the worker died; each gets a batch of its own
        self.rates = Rates()
        self.longest_text = 1024
        self.batch_size: int | None = None
        self.max_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.jobs) + len(self.alone)

    def fit(self, facts: Facts) -> None:
        self.longest_text, self.batch_size, self.max_tokens = facts.longest_text, facts.batch_size, facts.max_tokens

    def add(self, jobs: list[Job]) -> None:
        """All texts of a request, or none."""
        if len(self) + len(jobs) > self.limit:
            raise QueueFull(self.retry_after())
        before = 0
        for job in jobs:
            estimate = int(len(job.text) * self.rates.tokens_per_character) + 1
            job.tokens = min(estimate, self.longest_text)
            before += job.tokens
            job.due = job.arrived + before * self.rates.seconds_per_token
            self.jobs[job.number] = job

    def put_back(self, jobs: Iterable[Job]) -> None:
        self.alone += jobs

    def remove(self, job: Job) -> bool:
        if job in self.alone:
            self.alone.remove(job)
            return True
        return self.jobs.pop(job.number, None) is not None

    def next_batch(self) -> tuple[list[Job], bool]:
        """The batch, which stays in the queue, and whether it is full."""
        if self.alone:
            return self.alone[:1], True
        leader = min(self.jobs.values(), key=lambda job: (job.due, job.number))
        fitting = [job for job in self.jobs.values() if job.search == leader.search]
        fitting.sort(key=lambda job: (distance(job, leader), job.due, job.number))
        batch, longest = [leader], leader.tokens
        for job in fitting:
            if job is leader or distance(job, leader) > math.log(SPREAD):
                continue
            longest = max(longest, job.tokens)
            if self._exceeds(len(batch) + 1, longest):
                return batch, True
            batch.append(job)
        return batch, len(batch) == self.batch_size

    def _exceeds(self, size: int, longest: int) -> bool:
        tokens = size * (longest + 1)  # with the end of the sentence
        return bool((self.batch_size and size > self.batch_size) or (self.max_tokens and tokens > self.max_tokens))

    def retry_after(self) -> int:
        waiting = sum(job.tokens for job in self.jobs.values()) * self.rates.seconds_per_token
        return min(max(math.ceil(waiting), 1), 60)


def distance(job: Job, leader: Job) -> float:
    return abs(math.log(job.tokens / leader.tokens))
