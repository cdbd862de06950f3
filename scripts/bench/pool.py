"""Workers of one checkpoint that are started when they are needed, a run that goes on when one dies, and its clock."""

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.checkpoints import Checkpoint
from bench.driver import Worker, WorkerFailed, progress_bar
from bench.environment import ensure_peers
from bench.protocol import Request
from bench.systems import SystemKind

Record = dict[str, Any]
LEFT_OUT = "time"
MOST_FAILURES = 2  # of one worker; then it is not started again


class Timetable:
    """Shows how far a run has come, and says what would take it beyond the time it has."""

    def __init__(self, planned_seconds: float, allowed_seconds: float):
        """allowed_seconds: what does not fit any more is left out."""
        self.ends = time.monotonic() + allowed_seconds
        self.bar = progress_bar(planned_seconds)

    def __enter__(self) -> "Timetable":
        return self

    def __exit__(self, *error) -> None:
        self.bar.set_description_str("done" if error[0] is None else "stopped")
        self.bar.close()

    def has_time_for(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self.ends

    def begin(self, what: str) -> None:
        self.bar.set_description_str(what)

    def end(self, planned_seconds: float) -> None:
        self.bar.update(min(planned_seconds, self.bar.total - self.bar.n))


class Pool:
    """Asks workers one at a time. One that ended is started again for the next request."""

    def __init__(
        self, kinds: Iterable[SystemKind], checkpoint: Checkpoint, logs: Path, warm_up: dict[str, list[Request]]
    ):
        """warm_up: by system what it does first, without being timed."""
        self.kinds = {kind.name: kind for kind in kinds}
        self.checkpoint, self.logs, self.warm_up = checkpoint, logs, warm_up
        self.workers: dict[str, Worker] = {}
        self.loaded: dict[str, Any] = {}
        self.failures: dict[str, int] = dict.fromkeys(self.kinds, 0)

    def __enter__(self) -> "Pool":
        self.checkpoint.ensure()
        if any(kind.needs_peers for kind in self.kinds.values()):
            ensure_peers()
            self.checkpoint.ensure_converted()
        return self

    def __exit__(self, *error) -> None:
        for name in list(self.workers):
            self.stop(name, *error)

    def stop(self, name: str, *error: Any) -> None:
        self.workers.pop(name).__exit__(*(error or (None, None, None)))

    def worker(self, name: str) -> Worker:
        if name not in self.workers:
            worker = Worker(self.kinds[name], self.checkpoint, self.logs)
            try:
                worker.__enter__()
            except BaseException as error:
                worker.__exit__(type(error), error, None)
                raise
            self.workers[name] = worker
            self.loaded[name] = worker.loaded
            for request in self.warm_up.get(name, []):
                worker.ask(request)
        return self.workers[name]

    def ask(self, name: str, request: Request, facts: Record) -> Record:
        """What the worker measured, or why it did not."""
        context = facts | {"system": name} | asdict(request)
        if self.failures[name] >= MOST_FAILURES:
            return context | {"failed": "its worker ended too often"}
        try:
            return context | self.worker(name).ask(request)
        except WorkerFailed as error:
            self.forget(name)
            self.failures[name] += 1
            return context | {"failed": str(error).splitlines()[-1][:200] or "the worker ended"}

    def forget(self, name: str) -> None:
        """Clears away what is left of a worker that died."""
        if name in self.workers:
            self.stop(name, WorkerFailed, None, None)


def tiny(beam: int, **options: Any) -> Request:
    """Enough for libraries to set themselves up, and for fairseq_el to measure the machine at this beam size."""
    return Request("generate", batch=2, source_length=16, beam=beam, length=3, **options)


def tiny_and_padded(beam: int, **options: Any) -> Request:
    """For models with an encoder, whose first batch with padding takes seconds in stock fairseq."""
    return tiny(beam, lengths=(16, 12), **options)


def why_missing(record: Record | None) -> str | None:
    """In words for a table; None if it was measured."""
    if record is None or record.get("left_out") == LEFT_OUT:
        return "no time"
    if "failed" in record:
        return "failed"
    return "does not fit" if record.get("left_out") else None
