"""The experiment `scaling`: what a core and a worker do, and what the one process does that no worker can.

Four things are measured. Teams of workers generate from BART-large's shapes, for speed by core and memory by worker.
The driver's share of a job (reading, journal, output) is run with an engine that takes no time, the planner's alone,
and Ray with workers that do nothing. Last, the whole command, on the demo's texts. What follows from these numbers
for large jobs is in `scaling_report.py`.
"""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from bench.checkpoints import Checkpoint
from bench.environment import ROOT, SystemKind
from bench.protocol import Request
from bench.runner import Record, Worker, worker_environment
from bench.tasks import TINY_BART
from fairseq_el.jobs import presets, ray_engine
from fairseq_el.jobs.batching import TOKENS_PER_BATCH, Batcher
from fairseq_el.jobs.inputs import Item, Texts
from fairseq_el.jobs.journal import Journal
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.output import Output
from fairseq_el.jobs.run import Candidate, Done, Finished, Run, missing_work
from fairseq_el.jobs.shards import Shard
from fairseq_el.jobs.summarizer import Summarizer

WINDOW = 1024


@dataclass(frozen=True)
class Settings:
    """Articles of CNN/DailyMail's mean size, in batches as fairseq-el summarize forms them."""

    checkpoint: Checkpoint = Checkpoint("bart_large")
    tokens_in: float = 628.6
    tokens_out: float = 67.4
    beam: int = 4
    precision: str = "auto"
    batch: int = TOKENS_PER_BATCH // 629
    teams: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 1))  # workers, and threads of each
    articles: int = 20 * WINDOW  # for what takes milliseconds each
    ray_batches: int = 2000
    demo_texts: tuple[int, int] = (1000, 3000)  # a short run and a long one: the difference is without start-up


QUICK = Settings(
    checkpoint=TINY_BART.checkpoint,
    tokens_in=31.6,
    tokens_out=7.4,
    batch=2,
    articles=2 * WINDOW,
    ray_batches=20,
    demo_texts=(4, 12),
)


def versions() -> dict[str, str]:
    return {"fairseq": version("fairseq-fixed"), "torch": version("torch"), "ray": version("ray")}


def measure(settings: Settings, repeats: int, logs: Path) -> list[Record]:
    settings.checkpoint.ensure()
    records = [record for team in settings.teams for record in measure_team(settings, team, repeats, logs)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "articles.jsonl")
        article, summary = text_of(settings.tokens_in), text_of(settings.tokens_out)
        line = json.dumps({"id": "0123456789", "article": article}) + "\n"
        source.write_text(line * settings.articles)
        for repeat in tqdm(range(repeats), desc="driver and planner", leave=False):
            records.append(measure_driver(settings, source, summary) | {"repeat": repeat})
            records.append(measure_planner(source) | {"repeat": repeat})
        with quiet():
            records.append(measure_ray(settings, source))
        for repeat in tqdm(range(repeats), desc="the whole command", leave=False):
            records += [record | {"repeat": repeat} for record in measure_commands(settings, Path(folder))]
    return records


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()):
        yield


# ---- workers


def measure_team(settings: Settings, team: tuple[int, int], repeats: int, logs: Path) -> list[Record]:
    """All workers of a team at once, a batch each a round, after a round to warm up."""
    workers, threads = team
    kinds = [
        SystemKind(f"scaling-{number}", "fairseq_el", "bench.worker_fairseq",
                   {"precision": settings.precision, "threads": threads})
        for number in range(workers)
    ]  # fmt: skip
    lengths = (round(settings.tokens_in),) * settings.batch
    request = Request("generate", settings.batch, lengths, settings.beam, round(settings.tokens_out), attention="auto")
    warm_up = Request("generate", 1, (16,), 2, 3, attention="auto")
    records = []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(workers) as together:
        running = [Worker(kind, settings.checkpoint, logs) for kind in kinds]
        for worker in running:
            stack.callback(worker.stop)
            worker.ask(warm_up)
        for repeat in tqdm(range(repeats), desc=f"{workers} workers with {threads} threads", leave=False):
            started = time.perf_counter()
            answers = list(together.map(lambda worker: worker.ask(request), running))
            seconds = time.perf_counter() - started
            memory = [answer["peak_bytes"] for answer in answers]
            loading = [worker.loaded["loading_bytes"] for worker in running]
            facts = {"kind": "team", "workers": workers, "threads": threads, "repeat": repeat}
            measured = {"sentences": workers * settings.batch, "seconds": seconds}
            records.append(facts | measured | {"peak_bytes": memory, "loading_bytes": loading})
    return records


# ---- what one process does for all workers


@functools.cache
def demo_batcher() -> Batcher:
    """The demo's encoding, for texts as long as BART-large reads."""
    batcher = Summarizer.load("demo", "demo").batcher
    batcher.longest_text = 1023
    batcher.preset = presets.load("demo", "beam").changed(max_tokens=TOKENS_PER_BATCH)
    return batcher


def text_of(tokens: float) -> str:
    """So many tokens of the demo's texts."""
    batcher = demo_batcher()
    words = (ROOT / "demo" / "test.source").read_text(encoding="utf-8").split()
    pieces = batcher.tokenizer.encode(" ".join(words[: round(tokens)]))  # a word has a piece at least
    return batcher.tokenizer.decode(pieces[: round(tokens)])


class Instant:
    """An engine that takes no time."""

    def __init__(self, summary: str, batch: int):
        self.summary = summary
        self.batch = batch

    def parts(self, number: int, window: list[Item], done: Container[int]) -> Iterator[Done]:
        first, end = number * WINDOW, number * WINDOW + len(window)
        for start in range(first, end, self.batch):
            lines = list(range(start, min(start + self.batch, end)))
            yield Done(lines, [[Candidate(self.summary, 0.0)]] * len(lines))


def measure_driver(settings: Settings, source: Path, summary: str) -> Record:
    output = source.with_name("out.jsonl")
    started = time.perf_counter()
    texts = Texts(str(source), True, None)
    checked = time.perf_counter()
    journal = Journal(Path(f"{output}.journal"), {}, overwrite=True)
    written = Output(str(output), True)
    bar = tqdm(file=io.StringIO())
    run = Run(Instant(summary, settings.batch), journal, Finished(None, WINDOW), bar, "abort")
    for item, found in run.over(texts, WINDOW, Shard()):
        written.write(item, found)
    written.finish()
    ended = time.perf_counter()
    journal.remove()
    sizes = {"input_bytes": source.stat().st_size, "output_bytes": output.stat().st_size}
    seconds = {"check_seconds": checked - started, "run_seconds": ended - checked}
    return {"kind": "driver", "articles": texts.count} | sizes | seconds


def measure_planner(source: Path) -> Record:
    """Its rows as they go to workers, so that the bytes of these are known too."""
    texts, batcher = Texts(str(source), True, None), demo_batcher()
    planner = ray_engine.Planner(texts, batcher, Finished(None, WINDOW), WINDOW)
    windows = min(texts.count // WINDOW, 2)
    numbers = ray_engine.pyarrow.table({"window": list(range(windows))})
    started = time.perf_counter()
    rows = list(planner(numbers))
    seconds = time.perf_counter() - started
    size = sum(row.nbytes for row in rows)
    return {"kind": "planner", "articles": windows * WINDOW, "seconds": seconds, "row_bytes": size}


class Idle:
    """A worker that answers at once."""

    def __init__(self, *_: object):
        self.summary = "x"

    def __call__(self, batch):
        (row,) = ray_engine.rows_of(batch)
        parts = [Done(row["lines"], [[Candidate(self.summary, 0.0)]] * len(row["lines"]))]
        return ray_engine.as_table({"window": row["window"], "missing": row["missing"], "parts": parts, "warnings": []})


def measure_ray(settings: Settings, source: Path) -> Record:
    """Batches a second that pass through a local cluster, counted from the first to arrive to the last."""
    texts = Texts(str(source), True, None)
    batcher = demo_batcher()
    window = texts.window(0, WINDOW)
    a_window = len(list(missing_work(window, 0, (), batcher)))
    texts.count = WINDOW * max(1, min(settings.articles // WINDOW, settings.ray_batches // a_window))
    files = ModelFiles.find("demo")
    job = ray_engine.Job(texts, WINDOW, Shard(), Finished(None, WINDOW), files, {"cpu": True}, worker=Idle)
    os.environ["PYTHONPATH"] = worker_environment()["PYTHONPATH"]
    with ray_engine.connected(None, 2):
        ray_engine.configure()
        arrivals = [time.perf_counter() for _ in job.answers(batcher, ray_engine.Pool(2, 1, 0))]
    return {"kind": "ray", "batches": len(arrivals), "seconds": arrivals[-1] - arrivals[0]}


# ---- the whole command


def measure_commands(settings: Settings, folder: Path) -> list[Record]:
    texts = (ROOT / "demo" / "test.source").read_text(encoding="utf-8").splitlines()
    records = []
    for count in settings.demo_texts:
        source = folder / f"{count}.txt"
        source.write_text("".join(f"{texts[n % len(texts)]}\n" for n in range(count)), encoding="utf-8")
        for engine, workers, threads in (("one", 1, 1), ("one", 1, 2), ("ray", 2, 1)):
            words = ["--model", "demo", "--preset", "demo", "--input", source, "--output", folder / "out.txt"]
            words += ["--overwrite", "--engine", engine, *(["--workers", workers] if engine == "ray" else [])]
            environment = worker_environment() | {"OMP_NUM_THREADS": str(workers * threads)}
            command = [sys.executable, "-m", "fairseq_el", "summarize", *words]
            started = time.perf_counter()
            subprocess.run(list(map(str, command)), check=True, env=environment, capture_output=True)
            seconds = time.perf_counter() - started
            facts = {"kind": "command", "engine": engine, "workers": workers, "threads": threads}
            records.append(facts | {"texts": count, "seconds": seconds})
    return records
