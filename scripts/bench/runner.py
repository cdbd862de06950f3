"""Runs cells in the order of their value, and appends every measurement to a file as soon as it is made.

A cell is a number of the pages: a request to a system, measured once a round. Cells of a group are compared with each
other, so that a round goes over all of them before the next begins. A run that was stopped goes on where it was.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench import environment
from bench.checkpoints import Checkpoint
from bench.environment import SYSTEMS, SystemKind
from bench.protocol import Request, fingerprint

Record = dict[str, Any]
ROUNDS = 3
BATCHES = (12, 8, 6, 4, 3, 2, 1)  # that are tried under a memory budget
LONGEST = 900.0  # seconds of one answer
LOG_LINES_SHOWN = 5
LOADING = 8.0  # seconds until a worker of BART-large is warm
FREE_SHARE = 0.55  # of the machine's memory: workers that wait may take it together


class WorkerFailed(RuntimeError):
    """A worker ended or took too long; the message has the end of its log."""


@dataclass(frozen=True)
class Cell:
    """label: its name among those of the group. budget: bytes for everything; the batch is then the largest that fits,
    of at most the request's. estimate: seconds of one answer."""

    experiment: str
    group: str
    label: str
    system: str
    request: Request
    checkpoint: Checkpoint | None = None
    rounds: int = ROUNDS
    budget: int | None = None
    estimate: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.experiment}/{self.group}/{self.label}"


class Worker:
    """The runner's end of one worker process, which is stopped while others are measured."""

    def __init__(self, kind: SystemKind, checkpoint: Checkpoint | None, logs: Path):
        self.kind = kind
        self.log = logs / f"{kind.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = kind.command(checkpoint)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=environment.ROOT, env=worker_environment(),
            )  # fmt: skip
        assert self.process.stdin and self.process.stdout
        self.requests, self.answers = self.process.stdin, self.process.stdout
        try:
            self.loaded = self.receive()
        except BaseException:
            self.stop()
            raise
        self.peak = self.loaded["rest_bytes"]
        self.warm: set[str] = set()  # cells that it was asked for

    def receive(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.answers], [], [], LONGEST)
        line = self.answers.readline() if ready else ""
        if not line:
            self.process.kill()
            self.process.wait()  # the log is complete only then
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
            raise WorkerFailed(f"took more than {LONGEST:g} s" if not ready else tail or "the worker ended")
        return json.loads(line)

    def ask(self, request: Request) -> dict[str, Any]:
        self.process.send_signal(signal.SIGCONT)
        try:
            self.requests.write(json.dumps(asdict(request)) + "\n")
            self.requests.flush()
        except BrokenPipeError:
            pass  # the worker has ended; receive says why
        answer = self.receive()
        self.process.send_signal(signal.SIGSTOP)  # threads of some libraries spin while they wait
        self.peak = max(self.loaded["rest_bytes"], answer["peak_bytes"] // 2)
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.requests.close()
        self.answers.close()


def worker_environment() -> dict[str, str]:
    """Workers find this package and fairseq_el in the source tree, and no peer asks the network."""
    path = os.pathsep.join([str(environment.SCRIPTS), str(environment.ROOT)])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class Pool:
    """Workers that are started when they are needed and kept while they fit into memory."""

    def __init__(self, logs: Path):
        self.logs = logs
        self.workers: dict[tuple[str, str], Worker] = {}  # the one used last comes last

    def close(self) -> None:
        self.keep(set())

    def keep(self, names: set[tuple[str, str]]) -> None:
        """Ends the others."""
        for name in [name for name in self.workers if name not in names]:
            self.workers.pop(name).stop()

    @staticmethod
    def name(cell: Cell) -> tuple[str, str]:
        return cell.system, str(cell.checkpoint)

    def get(self, cell: Cell) -> Worker:
        name = self.name(cell)
        if name not in self.workers:
            prepare(SYSTEMS[cell.system], cell.checkpoint)
            limit = FREE_SHARE * environment.memory_bytes()
            while self.workers and sum(worker.peak for worker in self.workers.values()) > limit:
                self.workers.popitem()[1].stop()  # the one used last is needed last in the next round
            self.workers[name] = Worker(SYSTEMS[cell.system], cell.checkpoint, self.logs)
        worker = self.workers[name] = self.workers.pop(name)
        if cell.request.op in ("generate", "encode") and cell.key not in worker.warm:
            # what only first calls do is not what a long run costs
            worker.ask(replace(cell.request, batch=min(2, cell.request.batch), length=3))
            worker.warm.add(cell.key)
        return worker


def prepare(kind: SystemKind, checkpoint: Checkpoint | None) -> None:
    """Environment and weights, unless an earlier run has made them."""
    if checkpoint:
        checkpoint.ensure()
    if checkpoint and kind.form and kind.environment:
        for name in (kind.environment, "transformers"):  # which every conversion begins with
            environment.ensure_environment(name)
        checkpoint.ensure_converted(kind.form)


class Results:
    """A file of JSON lines: first what ran where, then the measurements. One machine and one commit."""

    def __init__(self, file: Path, facts: dict[str, Any]):
        self.file = file
        self.pace = 1.0
        self.facts: Record = {"kind": "run"} | facts
        self.records: list[Record] = []
        if file.exists():
            self.records = read_lines(file)
            first = self.records.pop(0) if self.records else {}
            changed = [name for name in ("commit", "machine", "quick") if first.get(name) != facts[name]]
            if changed:
                was = ", ".join(f"{name} {first.get(name)}" for name in changed)
                raise SystemExit(f"benchmark: {file} has results of {was}: choose another --output, or remove it")
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.append(self.facts, keep=False)

    def append(self, record: Record, keep: bool = True) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        if keep:
            self.records.append(record)

    def of(self, cell: Cell) -> list[Record]:
        return [record for record in self.records if record.get("cell") == cell.key]

    def rounds_left(self, cell: Cell) -> int:
        """0 for a cell that failed."""
        own = self.of(cell)
        if any("failed" in record for record in own):
            return 0
        return max(0, cell.rounds - sum("over_budget" not in record for record in own))

    def seconds(self, cell: Cell) -> float:
        """Of one answer: the longest that was measured, or the estimate, corrected by what others have taken."""
        known = [record["seconds"] for record in self.of(cell) if "seconds" in record]
        return max(known, default=cell.estimate * self.pace)

    def seconds_left(self, group: list[Cell]) -> float:
        """Of what is missing of a group, with loading."""
        left = [cell for cell in group if self.rounds_left(cell)]
        workers = set(map(Pool.name, left))
        tries = sum(self.seconds(cell) for cell in left if cell.budget and not self.of(cell))  # too large batches
        return sum(self.rounds_left(cell) * self.seconds(cell) for cell in left) + tries + LOADING * len(workers)

    def set_pace(self, cells: Iterable[Cell]) -> None:
        """How many times as long as estimated the measured ones took."""
        measured, estimated = 0.0, 0.0
        for cell in cells:
            found = [r["seconds"] for r in self.of(cell) if "seconds" in r and "over_budget" not in r]
            if found and cell.estimate:
                measured, estimated = measured + median(found), estimated + cell.estimate
        self.pace = measured / estimated if estimated else 1.0


def read_lines(file: Path) -> list[Record]:
    """Without a last line that a run had no time to complete."""
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


class Run:
    """minutes: the time for all. A group that would take longer than what is left is not begun."""

    def __init__(self, results: Results, minutes: float | None, score: Callable[[list[list[int]]], Any] | None = None):
        self.results = results
        self.ends = time.monotonic() + 60 * minutes if minutes else float("inf")
        self.score = score  # of outputs for real texts

    def over(self, groups: list[list[Cell]], logs: Path) -> bool:
        """Whether everything was measured. A group that is too long leaves its time to those behind it."""
        complete = True
        with closing(Pool(logs)) as pool:
            for group in groups:
                self.results.set_pace(cell for cells in groups for cell in cells)
                if not any(map(self.results.rounds_left, group)):
                    continue
                if not self.has_time_for(self.results.seconds_left(group)):
                    complete = False
                    continue
                pool.keep(set(map(pool.name, group)))
                complete = self.measure_group(group, pool) and complete
        return complete

    def measure_group(self, group: list[Cell], pool: Pool) -> bool:
        for number in range(max(cell.rounds for cell in group)):
            for cell in group:
                left = self.results.rounds_left(cell)
                if not left or cell.rounds - left != number:
                    continue
                if not self.has_time_for(self.results.seconds(cell)):
                    return False
                self.measure(cell, number, pool)
        return True

    def has_time_for(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self.ends

    def measure(self, cell: Cell, number: int, pool: Pool) -> None:
        """Under a budget, smaller batches follow until the measured peak of one keeps to it."""
        settled = bool(self.fitting(cell))
        for batch in self.batches(cell):
            print(f"{time.strftime('%H:%M:%S')} round {number + 1}, {cell.key}, batch {batch}", end="", flush=True)
            answer = self.ask(cell, replace(cell.request, batch=batch), pool)
            record = {"cell": cell.key, "round": number, "system": cell.system, "batch": batch} | answer
            if cell.budget and not settled and record.get("peak_bytes", 0) > cell.budget:
                record["over_budget"] = True
            self.results.append(record)
            print(f": {record.get('seconds', 0):.2f} s" if "failed" not in record else ": failed", flush=True)
            if "over_budget" not in record:
                return
        self.results.append({"cell": cell.key, "system": cell.system, "failed": "does not fit"})

    def fitting(self, cell: Cell) -> list[int]:
        """The batch that was found to keep to the budget."""
        own = self.results.of(cell)
        return [record["batch"] for record in own if "seconds" in record and "over_budget" not in record][:1]

    def batches(self, cell: Cell) -> list[int]:
        """The request's, or under a budget those that may keep to it."""
        if not cell.budget:
            return [cell.request.batch]
        too_large = [record["batch"] for record in self.results.of(cell) if "over_budget" in record]
        least = min([cell.request.batch + 1, *too_large])
        return self.fitting(cell) or [batch for batch in BATCHES if batch < least]

    def ask(self, cell: Cell, request: Request, pool: Pool) -> Record:
        began = time.perf_counter()
        try:
            worker = pool.get(cell)
            started = time.perf_counter()
            answer = worker.ask(request)
        except (WorkerFailed, RuntimeError) as error:
            pool.keep(set(pool.workers) - {pool.name(cell)})
            return {"failed": str(error)[-300:]}
        ended = time.perf_counter()
        facts = {"seconds": ended - started, "elapsed": ended - began}
        tokens = answer.pop("tokens", [])
        if tokens:
            answer["outputs"] = [fingerprint(sentence) for sentence in tokens]
            if request.op == "texts" and self.score:
                answer["scores"] = self.score(tokens)
        own = {"rest_bytes": worker.loaded["rest_bytes"]}
        shown = ["python" if word == sys.executable else word for word in SYSTEMS[cell.system].command(cell.checkpoint)]
        own |= {name: worker.loaded[name] for name in ("versions", "settings")} | {"command": shlex.join(shown)}
        return facts | own | answer
