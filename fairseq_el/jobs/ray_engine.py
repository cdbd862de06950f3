"""The work of a job on Ray, in many processes, on this machine or on many.

    numbers of windows -> Planner, one, where the input is -> batches -> Workers, a model each -> summaries -> here

Ray Data moves what lies between. A batch is a task of its own: Ray repeats it elsewhere if its worker dies. Nothing
that counts stays in the cluster: what arrives goes to the journal, and a driver that dies goes on from there.
Imported only by who asks for it.
"""

import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Container, Generator, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairseq_el.errors import UserError, explain
from fairseq_el.jobs.batching import Source, SourceReader
from fairseq_el.jobs.inputs import Item, Texts
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.run import Done, Finished, Work, carry_out, work_in
from fairseq_el.jobs.shards import Shard
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.plugin.log_filters import stderr_in_file
from fairseq_el.resources import TREE

RELEASE = "2.60.0"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
try:
    import pyarrow
    import ray
    import ray.data
except ImportError as error:
    raise UserError(
        f"--engine ray needs Ray, which is not installed: pip install 'ray[data]=={RELEASE}'"
    ) from error

logger = logging.getLogger(__name__)

PATIENCE = 60  # seconds for a cluster to answer
MOST_ATTEMPTS = 4  # at a batch whose workers die
MOST_PLANS = 1000  # into which the windows of a job are grouped, so that Ray has few things to remember
OBJECT_STORE = 128 << 20  # bytes, of a local cluster: a batch has some ten thousand
FOLDER = "fairseq_el-ray"  # of a local cluster, followed by the number of the process that owns it
LONGEST_FOLDER = 30  # characters of a path: Ray's sockets lie below it, and theirs has 107
Row = dict[str, Any]


# ---- in the cluster


def as_table(row: Row) -> "pyarrow.Table":
    return pyarrow.table({"row": [json.dumps(row)]})


def rows_of(table: "pyarrow.Table") -> list[Row]:
    return [json.loads(row) for row in table["row"].to_pylist()]


def failure_of(error: Exception) -> Row:
    """What a user can do something about, for the driver to report; anything else is raised."""
    message = explain(error) or (str(error) if isinstance(error, OSError) else None)
    if message is None:
        raise error
    return {"failure": message}


class Planner:
    """Forms the batches of windows, as a single process does."""

    def __init__(self, texts: Texts, reader: SourceReader, finished: Finished, window_size: int):
        self.texts = texts
        self.reader = reader
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
        """A row for each batch, or one without lines: the driver has to hear of every window."""
        if self.texts.file is None:
            self.texts.reopen()
        window = self.texts.window(number, self.window_size)
        done = self.finished.lines(number)
        batches = list(work_in(window, number * self.window_size, done, self.reader)) or [Work([], [])]
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
    """Counts how often each batch was begun and not ended. Kept outside the workers, which it is to survive."""

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}

    def begin(self, first_line: int) -> int:
        self.begun[first_line] = self.begun.get(first_line, 0) + 1
        return self.begun[first_line]

    def end(self, first_line: int) -> None:
        self.begun.pop(first_line, None)


class Warnings(logging.Handler):
    """Collects what the driver is to say."""

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
    """One model. It is loaded by the first batch, so that what goes wrong then counts as an attempt at that."""

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
                f"{before} workers died, one after the other, at {batch}, as they do when memory runs out: go on with "
                "--resume and fewer --workers or a smaller --max-tokens"
            )
        if before:
            logger.warning(f"a worker died, and {batch} is done again")

    def _loaded(self) -> Summarizer:
        if self.summarizer is None:
            torch.set_num_threads(self.threads)
            files = ModelFiles.find(self.loading["model"], self.loading["bpe"])
            if files.digest() != self.digest:
                raise UserError(
                    f"{files.checkpoint} on {socket.gethostname()} is another model than the driver's: put the same "
                    "files there"
                )
            self.summarizer = Summarizer.load(**self.loading)
        return self.summarizer


# ---- connecting


@contextmanager
def connected(address: str | None, cores: int) -> Iterator[None]:
    """To a cluster, or to one on this machine that ends with this process. cores: of the latter."""
    for name in ("ray", "ray.data"):  # which each have a level of their own
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = new_folder()
    try:
        with stderr_in_file(folder / "start.log"):  # of which some can't be switched off
            start_or_join(address, cores, folder)
        # There Ray tells of workers that died. We do that ourselves.
        with (folder / "notices.log").open("w") as notices, redirect_stdout(notices):
            try:
                yield
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_or_join(address: str | None, cores: int, folder: Path) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address, **quiet)
            return
        # For this run alone. Left to itself, Ray writes one to the user's home.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Workers are to run this copy of the code, wherever it was found.
        paths = [str(TREE), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        ray.init(
            "local", num_cpus=cores, include_dashboard=False, _temp_dir=str(folder), object_store_memory=OBJECT_STORE,
            **quiet,
        )  # fmt: skip
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())[:300]
        what = f"the Ray cluster at {address} could not be joined" if address else "Ray could not be started here"
        raise UserError(f"{what}: put that right, or leave out --engine ray ({reason})") from error


def new_folder() -> Path:
    """Removes those whose owner was killed."""
    place = Path(tempfile.gettempdir())
    place = place if len(str(place)) <= LONGEST_FOLDER else Path("/tmp")
    for old in place.glob(f"{FOLDER}.*"):
        owner = old.name.split(".")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER}.{os.getpid()}.", dir=place))


def check_address(address: str) -> None:
    """That a cluster answers. Another process tries it first: Ray itself waits for minutes, and can't be stopped."""
    advice = "give the address of its head, such as 10.0.0.1:6379, on one of its machines; there, auto finds it"
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and "/" not in address and port.isdecimal()):
        raise UserError(f"--ray-address {address} is none of a Ray cluster: {advice}")
    try:
        if host:
            socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE / 6).close()
        trial = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"
        found = subprocess.run(
            [sys.executable, "-c", trial, address], capture_output=True, text=True, timeout=PATIENCE
        )
        reason = found.stderr.strip().rpartition("\n")[2] if found.returncode else ""
        if reason and "AuthToken" in found.stderr:
            reason = "it wants its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    except (OSError, OverflowError) as error:
        reason = str(error)
    except subprocess.TimeoutExpired:
        reason = f"no answer in {PATIENCE} seconds"
    if reason:
        raise UserError(f"no Ray cluster of release {RELEASE} answers at {address}: {advice} ({reason[:300]})")


# ---- how many workers


@dataclass(frozen=True)
class Pool:
    workers: int
    cores: int  # of each
    gpus: int  # of each
    memory: int = 0  # bytes that a machine must have free for each; 0 if that was not asked


def pool_for(nodes: list[dict[str, float]], workers: int | None, model_bytes: int, cpu: bool) -> Pool:
    """nodes: what each machine of the cluster has; workers: how many are wanted, None for as many as fit."""
    gpus = 0 if cpu else int(sum(node.get("GPU", 0) for node in nodes))
    if gpus:
        check_room(workers, gpus, "GPUs")
        return Pool(workers or gpus, 1, 1)
    cores = [int(node.get("CPU", 0)) for node in nodes]
    check_room(workers, sum(cores), "cores")
    need = 0
    if workers is None:
        need = 2 * model_bytes + (1 << 30)  # weights twice while they are loaded, and a batch
        workers = sum(min(count, int(node.get("memory", 0) // need)) for count, node in zip(cores, nodes))
        workers, need = (workers, need) if workers else (1, 0)
    # as many cores as let all of them find a place
    share = max(c for c in range(1, max(cores) + 1) if sum(count // c for count in cores) >= workers)
    return Pool(workers, share, 0, need)


def check_room(workers: int | None, most: int, what: str) -> None:
    if not most or (workers or 0) > most:
        raise UserError(f"the cluster has {most:,} {what}: ask for at most as many --workers, or start more machines")


# ---- the engine


class RayEngine:
    """Hands out what arrives from the cluster."""

    def __init__(self, reader: SourceReader, answers: Iterator[Row]):
        self.reader = reader
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
        parts = [Done(*part) for part in answer["parts"]]
        self.missing.setdefault(answer["window"], answer["missing"])
        self.missing[answer["window"]] -= sum(len(part.lines) for part in parts)
        yield from sorted(parts, key=lambda part: bool(part.problem))  # one with a problem may end the run


@dataclass(frozen=True)
class Job:
    """All that the cluster has to know."""

    texts: Texts
    window_size: int
    shard: Shard
    finished: Finished
    files: ModelFiles
    options: dict[str, Any]  # of Summarizer.load
    worker: type = Worker

    def loading(self) -> dict[str, Any]:
        """Its arguments, whatever folder a process is in."""
        first = self.files.encoding[0].absolute()
        encoding = first if len(self.files.encoding) == 1 else first.parent
        return self.options | {"model": self.files.checkpoint.absolute(), "bpe": encoding}

    def answers(self, reader: SourceReader, pool: Pool) -> Generator[Row, None, None]:
        """In whatever order they come."""
        numbers = [{"window": number} for number in self.shard.windows(self.texts.count, self.window_size)]
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        attempts = ray.remote(Attempts).options(num_cpus=0, label_selector=here).remote()
        windows = ray.data.from_items(numbers, override_num_blocks=min(len(numbers), MOST_PLANS))
        batches = windows.map_batches(
            Planner,
            fn_constructor_args=(self.texts, reader, self.finished, self.window_size),
            batch_size=1, batch_format="pyarrow", num_cpus=0, label_selector=here,
            compute=ray.data.ActorPoolStrategy(size=1),
        )  # fmt: skip
        summaries = batches.map_batches(
            self.worker,
            fn_constructor_args=(self.loading(), self.files.digest(), pool.cores, attempts),
            batch_size=1, batch_format="pyarrow", num_cpus=pool.cores, num_gpus=pool.gpus, memory=pool.memory or None,
            # one waits while one is done; more would only wait behind a slow one
            compute=ray.data.ActorPoolStrategy(size=pool.workers, max_tasks_in_flight_per_actor=2),
        )  # fmt: skip
        for table in summaries.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from rows_of(table)


def configure() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # byte: no two batches in one task


@contextmanager
def open_engine(job: Job, address: str | None, workers: int | None) -> Iterator[RayEngine]:
    """Workers load the model when they get to work; here it is loaded to see that it can be, and let go."""
    reader = Summarizer.load(**job.loading() | {"cpu": True}).reader()
    with connected(address, max(workers or 1, torch.get_num_threads())):
        configure()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        pool = pool_for(nodes, workers, job.files.size(), job.options["cpu"])
        try:
            with closing(job.answers(reader, pool)) as answers:  # before Ray itself ends
                yield RayEngine(reader, answers)
        except ray.exceptions.RayTaskError:
            raise  # a mistake of ours
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:300]
            kept = "what was finished is kept, go on with --resume"
            raise UserError(f"the Ray cluster failed; {kept} ({reason})") from error
