"""Runs workers side by side and sends each its requests, one at a time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.checkpoints import Checkpoint
from bench.environment import SCRIPTS, peers_python
from bench.protocol import Request
from bench.systems import SystemKind

LOG_LINES_SHOWN = 15


class WorkerFailed(RuntimeError):
    """A worker ended or broke; the message shows the end of its log."""


class Worker:
    """The driver's end of one worker process."""

    def __init__(self, kind: SystemKind, checkpoint: Checkpoint, logs: Path):
        self.kind = kind
        self.log = logs / f"{kind.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        python = peers_python() if kind.needs_peers else sys.executable
        self.started = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "-m", kind.module, json.dumps(kind.worker_options(checkpoint))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=worker_environment(),
            )
        assert self.process.stdin and self.process.stdout
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def __enter__(self) -> "Worker":
        self.loaded = self.receive()
        self.loaded["seconds"] = time.perf_counter() - self.started
        return self

    def __exit__(self, *error) -> None:
        self.requests.close()
        if error[0] is not None:  # don't wait for an answer that nobody will read
            self.process.terminate()
        self.process.wait()
        self.answers.close()

    def receive(self) -> dict[str, Any]:
        line = self.answers.readline()
        if not line:
            self.process.wait()  # the log is complete only then
            tail = "\n".join(self.log.read_text().splitlines()[-LOG_LINES_SHOWN:])
            raise WorkerFailed(
                f"the worker for {self.kind.title} ended; the end of {self.log}:\n{tail}"
            )
        return json.loads(line)

    def ask(self, request: Request) -> dict[str, Any]:
        try:
            self.requests.write(json.dumps(asdict(request)) + "\n")
            self.requests.flush()
        except BrokenPipeError:
            pass  # the worker has ended; receive says why
        return self.receive()


def worker_environment() -> dict[str, str]:
    """Workers find this package and fairseq_el in the source tree, and no peer asks the network."""
    path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Cell:
    """Requests that are compared with each other, by system, interleaved in every round."""

    figure: str
    requests: list[tuple[str, Request]]
    repeats: int | None = None  # None: as often as the run says


def progress_bar(planned_seconds: float) -> tqdm:
    """A progress bar in seconds of work, which can tell the time left."""
    return tqdm(
        total=planned_seconds * (1 + 1e-9),  # its parts may add up to a little more, by rounding
        bar_format="{percentage:3.0f}%|{bar:25}| {elapsed}<{remaining} {desc}",
    )


def expected_seconds(system: str, request: Request) -> float:
    """Rough estimate for the progress bar: BART-large in stock fairseq on two cores."""
    scale = request.source_length / 1024
    step = 0.15 + 0.035 * request.batch * scale * max(1, request.beam / 4)
    if system == "transformers":
        step *= 6
    encoder = 3.0 * request.batch * scale if request.op == "generate" else 0
    return encoder + build_seconds(system, request) + step * request.length


def build_seconds(system: str, request: Request) -> float:
    """For the first step, where it outweighs the others: outputs of `source_state` are short."""
    if request.op != "source_state" or request.attention == "always":
        return 0.0
    copies = request.beam if system == "stock-copied" else 1
    return 0.4 * request.batch * copies * request.source_length / 1024


def run(
    kinds: Iterable[SystemKind], cells: list[Cell], repeats: int, checkpoint: Checkpoint, logs: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Starts all workers, then measures cell by cell, each in `repeats` rounds over its systems.

    Returns what each worker reported when it was loaded, and one record for every answer.
    """
    rounds = [(cell, repeat) for cell in cells for repeat in range(cell.repeats or repeats)]
    planned = sum(expected_seconds(*pair) for cell, _ in rounds for pair in cell.requests)
    records = []
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(planned))
        workers = {}
        for kind in kinds:  # one after the other: loading is timed too
            bar.set_description_str(f"loading {kind.title}")
            workers[kind.name] = stack.enter_context(Worker(kind, checkpoint, logs))
        for worker in workers.values():
            worker.ask(warm_up(worker.kind))
        for cell, repeat in rounds:
            for name, request in cell.requests:
                bar.set_description_str(f"{cell.figure}: {name}, batch {request.batch}")
                answer = workers[name].ask(request)
                context = {"figure": cell.figure, "system": name, "repeat": repeat}
                records.append(context | asdict(request) | answer)
                bar.update(expected_seconds(name, request))
        bar.set_description_str("done")
        loaded = {name: worker.loaded for name, worker in workers.items()}
    return loaded, records


def warm_up(kind: SystemKind) -> Request:
    attention = "auto" if kind.name.startswith("el") else None
    return Request("generate", batch=1, source_length=16, beam=2, length=3, attention=attention)
