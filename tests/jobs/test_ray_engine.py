"""--engine ray: the file of a single process, whoever is killed on the way."""
# Over 400 lines: all tests share one Ray cluster, which takes seconds to start.

import contextlib
import io
import json
import os
import pickle
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fairseq_el.cli import summarize
from fairseq_el.errors import UserError
from fairseq_el.jobs import presets
from fairseq_el.jobs.inputs import Texts
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.run import Finished, OneProcess, Run
from fairseq_el.jobs.shards import Shard
from fairseq_el.jobs.summarizer import Summarizer
from helpers import DEMO, ROOT, TEXTS, exit_of, load_once, make_language_model, write_lines

pytest.importorskip("ray")
engine = __import__("fairseq_el.jobs.ray_engine", fromlist=["engine"])
cluster = __import__("fairseq_el.jobs.ray_cluster", fromlist=["cluster"])

WINDOW = 16
LONG = 11  # the index of the text for which the model computes NaN
LINES = [TEXTS[n % len(TEXTS)][: 40 + 2 * n] for n in range(48)]
LINES[3] = LINES[30] = ""
LINES[LONG] = " ".join(TEXTS)
OPTIONS = ["--preset", "demo", "--el-attention", "always", "--window", WINDOW, "--batch-size", 2, "--on-error", "skip",
    "--nbest", 2]  # fmt: skip
TOKEN = secrets.token_hex(32)  # with which drivers come to the cluster of these tests, and no one else


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`in.jsonl`, and what a single process makes of it, with a model that fails at long texts."""
    folder = tmp_path_factory.mktemp("ray")
    model = Path(shutil.copytree(DEMO, folder / "model"))
    state = torch.load(model / "model.pt", weights_only=True)
    positions = state["model"]["encoder.embed_positions.weight"].float()
    positions[150:] = 3e38  # finite, but their sum is not
    state["model"]["encoder.embed_positions.weight"] = positions
    torch.save(state, model / "model.pt")
    write_lines(folder / "in.jsonl", [json.dumps({"id": str(n), "text": text}) for n, text in enumerate(LINES)])
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(Summarizer, "load", load_once)
        assert exit_of(summarize, words_of(folder, "alone.jsonl"), patch) is None
    (folder / "alone.stderr").write_text(said.getvalue())
    return folder


def words_of(folder: Path, output: str, *options) -> list:
    files = ["--model", folder / "model", "--input", folder / "in.jsonl", "--output", folder / output]
    return [*files, *OPTIONS, *options]


def check_same(folder: Path, output: str) -> None:
    found = (folder / output).read_bytes()
    assert found == (folder / "alone.jsonl").read_bytes()
    records = [json.loads(line) for line in found.splitlines()]
    assert [n for n, record in enumerate(records) if not record["summary"]] == [3, LONG, 30]
    assert all(record["score"] < 0 and len(record["alternatives"]) == 1 for record in records if record["summary"])
    assert not (folder / f"{output}.journal").exists()


# ---- on a cluster


@pytest.fixture
def start():
    """`fairseq-el summarize --engine ray`, as a user types it; whatever is left of it is killed in the end."""
    started = []

    def run(folder: Path, output: str, *options) -> subprocess.Popen:
        words = words_of(folder, output, "--engine", "ray", *options)
        command = [sys.executable, "-m", "fairseq_el", "summarize", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(list(map(str, command)), env=environment, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def records_in(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def wait_for_records(journal: Path, count: int, driver: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while records_in(journal) < count:
        assert driver.poll() is None and time.monotonic() < deadline, driver.communicate()[1]
        time.sleep(0.005)


def workers_of(ancestor: int) -> list[int]:
    """Processes of workers that a process has started, itself or through others."""
    parents, workers = {}, []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if b"(Worker)" in (path / "cmdline").read_bytes():
                workers.append(int(path.name))

    def is_below(process: int) -> bool:
        return process == ancestor or (process in parents and is_below(parents[process]))

    return [worker for worker in workers if is_below(worker)]


def test_a_worker_that_is_killed_changes_nothing(folder, start):
    """On a cluster of this machine's, which leaves nothing behind. The worker is stopped before it is killed:
    the run then can't end without what it was about to do. That may be a batch it has begun, of which the user is
    told, or one that waits for it, which goes to another worker without a word."""
    driver = start(folder, "killed.jsonl", "--workers", 2)
    journal = folder / "killed.jsonl.journal"
    wait_for_records(journal, 3, driver)
    victim = workers_of(driver.pid)[0]
    os.kill(victim, signal.SIGSTOP)
    time.sleep(1)
    assert driver.poll() is None and 3 <= records_in(journal) < 24
    os.kill(victim, signal.SIGKILL)
    printed, said = driver.communicate(timeout=240)
    assert driver.returncode == 0 and not printed, said
    check_same(folder, "killed.jsonl")
    texts = said, (folder / "alone.stderr").read_text()
    crowded = "warning: other processes"  # which depends on what else this machine does
    shown, shown_alone = (re.findall(f"summarize: (?!{crowded})(.*)", text) for text in texts)
    notices = [line for line in shown if "a worker died, and the batch of line" in line]
    assert sorted(shown) == sorted(shown_alone + notices) and len(shown_alone) == 3 and len(notices) <= 2
    assert f'line {LONG + 1} of {folder}/in.jsonl (id "{LONG}") was skipped: ' in "".join(shown_alone)
    assert not re.search("error:|Traceback|raylet|Ray ", said)
    assert not workers_of(driver.pid)
    assert not list(Path("/tmp").glob(f"{cluster.FOLDER}.{driver.pid}.*"))


@pytest.fixture(scope="module")
def address():
    """Of a cluster that was there before."""
    place = Path(cluster.tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", port]
    command += ["--node-ip-address", "127.0.0.1", "--num-cpus", 1, "--include-dashboard", "false"]
    command += ["--object-store-memory", 10**8, "--temp-dir", place, "--disable-usage-stats"]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    log = place / "head.log"
    head = subprocess.Popen(list(map(str, command)), stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert head.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        head.kill()  # with which all of it ends, where terminate waits for half a minute
        head.wait()
        shutil.rmtree(place, ignore_errors=True)


def test_a_driver_that_is_killed_goes_on(folder, start, address, monkeypatch, tmp_path):
    """With Ray, or without it: the journal is the same."""
    journal = folder / "resumed.jsonl.journal"
    options = ["--ray-address", address, "--workers", 1]
    driver = start(folder, "resumed.jsonl", *options)
    wait_for_records(journal, 4, driver)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    finished = records_in(journal)
    assert 4 <= finished < 24 and not (folder / "resumed.jsonl").exists()
    resumed = start(folder, "resumed.jsonl", *options, "--resume")

    shutil.copy(journal, tmp_path / "out.jsonl.journal")
    lines_done = sum(len(record["lines"]) for record in records_of(tmp_path / "out.jsonl.journal"))
    done_now = []
    attempt = Summarizer._attempt
    monkeypatch.setattr(Summarizer, "_attempt", lambda *words: done_now.append(part := attempt(*words)) or part)
    monkeypatch.setattr(Summarizer, "load", load_once)
    words = words_of(folder, "resumed.jsonl", "--output", tmp_path / "out.jsonl", "--resume")
    assert exit_of(summarize, words, monkeypatch) is None
    assert (tmp_path / "out.jsonl").read_bytes() == (folder / "alone.jsonl").read_bytes()
    whole = sum(len(part.hypotheses) for part in done_now if not part.problem or len(part.hypotheses) == 1)
    assert whole == len(LINES) - 2 - lines_done  # none twice

    _, said = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, said
    check_same(folder, "resumed.jsonl")


def records_of(journal: Path) -> list[dict]:
    return [json.loads(line.partition(" ")[2]) for line in journal.read_text().splitlines()[1:]]


# ---- the parts, without a cluster


class Begun:
    """Stands for the actor that counts attempts."""

    def __init__(self, attempts: int = 1):
        self.begin = self.end = self
        self.attempts = attempts

    def remote(self, first_line: int) -> int:
        return self.attempts


@pytest.fixture
def job(folder, monkeypatch):
    """Planner and worker here, and the parts of a run over all texts."""
    monkeypatch.setattr(cluster.ray, "get", lambda value: value)
    monkeypatch.setattr(Summarizer, "load", load_once)
    return Pipeline(folder)


@pytest.fixture(scope="module")
def answers(folder) -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.ray, "get", lambda value: value)
        patch.setattr(Summarizer, "load", load_once)
        return Pipeline(folder).answers()


class Pipeline:
    def __init__(self, folder: Path, attempts: int = 1):
        self.texts = Texts(str(folder / "in.jsonl"), True, None)
        files = ModelFiles.find(folder / "model")
        preset = presets.load("demo", "beam").changed(el_attention="always", batch_size=2, nbest=2)
        options = {"preset": preset, "stock": False, "fp16": False, "cpu": False, "seed": 1}
        self.job = engine.Job(self.texts, WINDOW, Shard(), Finished(None, WINDOW), files, options)
        self.summarizer = Summarizer.load(**self.job.loading())
        self.planner = engine.Planner(over(self.texts), over(self.summarizer.batcher), self.job.finished, WINDOW)
        self.worker = engine.Worker(self.job.loading(), files.digest(), 1, Begun(attempts))

    def plans(self) -> list:
        numbers = engine.pyarrow.table({"window": list(Shard().windows(self.texts.count, WINDOW))})
        return list(self.planner(numbers))

    def answers(self) -> list[dict]:
        return [row for plan in self.plans() for row in engine.rows_of(self.worker(plan))]

    def run(self, engine, on_error: str = "skip") -> list[str]:
        bar = summarize.tqdm(file=io.StringIO())
        run = Run(engine, None, Finished(None, WINDOW), bar, on_error)
        return [found for _, found in run.over(self.texts, WINDOW, Shard())]


def over(thing):
    """As another process gets it."""
    return cluster.ray.cloudpickle.loads(cluster.ray.cloudpickle.dumps(thing))


def test_answers_may_come_in_any_order(job, answers, caplog):
    expected = job.run(OneProcess(job.summarizer, WINDOW))
    (said,) = [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]
    for seed in range(5):
        caplog.clear()
        shuffled = random.Random(seed).sample(answers, len(answers))
        assert job.run(engine.RayEngine(job.summarizer.batcher, iter(shuffled))) == expected
        assert [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()] == [said]
    with pytest.raises(RuntimeError, match="lost a batch"):
        job.run(engine.RayEngine(job.summarizer.batcher, iter(answers[1:])))


def test_each_batch_is_a_row_of_its_own_and_every_window_has_one(job):
    windows = [job.texts.window(number, WINDOW) for number in range(3)]
    expected = []
    for number, window in enumerate(windows):
        for batch in job.summarizer.batcher.batches([job.summarizer.batcher.encode(item.text) for item in window]):
            expected.append([number * WINDOW + place for place in batch])
    rows = [row for plan in job.plans() for row in engine.rows_of(plan)]
    assert [row["lines"] for row in rows] == expected and len(rows) > 20
    assert all(plan.num_rows == 1 for plan in job.plans())
    job.planner.finished.lines = lambda window: set(range(len(LINES)))
    assert [row["lines"] for plan in job.plans() for row in engine.rows_of(plan)] == [[], [], []]


def test_an_error_ends_the_run_with_the_text_and_after_what_is_finished(job, folder, answers):
    with pytest.raises(UserError, match=re.escape(f'line {LONG + 1} of {folder}/in.jsonl (id "{LONG}") can')) as ours:
        job.run(engine.RayEngine(job.summarizer.batcher, iter(answers)), on_error="abort")
    with pytest.raises(UserError) as alone:
        job.run(OneProcess(job.summarizer, WINDOW), on_error="abort")
    assert str(ours.value) == str(alone.value)
    parts = [[[0], [[]], {}, "NaN"], [[1], [[["fine", -0.5]]], {}, ""]]
    row = {"window": 0, "missing": 2, "warnings": [], "parts": parts}
    first, second = engine.RayEngine(job.summarizer.batcher, iter([row])).parts(0, [], ())
    assert first.results == [[("fine", -0.5)]] and second.problem == "NaN"


def failure(job) -> str:
    """What the driver reports of the first batch."""
    with pytest.raises(UserError) as raised:
        job.run(engine.RayEngine(job.summarizer.batcher, iter(engine.rows_of(job.worker(job.plans()[0])))))
    return str(raised.value)


def test_a_batch_whose_worker_died_is_done_again_and_the_user_is_told(job):
    plan = job.plans()[0]
    (first,) = engine.rows_of(job.worker(plan))
    job.worker.attempts = Begun(2)
    (second,) = engine.rows_of(job.worker(plan))
    line = engine.rows_of(plan)[0]["lines"][0] + 1
    assert first["warnings"] == [] and second["warnings"] == [
        f"a worker died, and the batch of line {line} is done again"
    ]
    assert second["parts"] == first["parts"]


def test_a_batch_that_kills_its_workers_ends_the_run_and_is_named(folder, job):
    job.worker.attempts = Begun(engine.MOST_ATTEMPTS)
    assert "failure" not in engine.rows_of(job.worker(job.plans()[0]))[0]
    job.worker.attempts = Begun(engine.MOST_ATTEMPTS + 1)
    assert re.search(r"4 workers died, .* at the batch of line \d+, .*--resume and fewer --workers", failure(job))
    counter = engine.Attempts()
    assert [counter.begin(7), counter.begin(8), counter.begin(7)] == [1, 1, 2]
    counter.end(7)
    assert [counter.begin(7), counter.begin(8)] == [1, 2]


def test_another_model_on_a_workers_machine_is_refused(job, folder):
    job.worker.digest = "other"
    assert "is another model than the driver's: put the same files there" in failure(job)
    shutil.move(folder / "model" / "dict.txt", folder / "dict.txt")
    try:
        job.worker.summarizer, job.worker.digest = None, job.job.files.digest()
        job.worker.loading = job.worker.loading | {"model": folder / "gone"}
        assert "there is no checkpoint" in failure(job)
    finally:
        shutil.move(folder / "dict.txt", folder / "model" / "dict.txt")


def test_an_input_that_changes_during_the_run_is_noticed(job, folder):
    """A copy, in its place, is another file."""
    content = (folder / "in.jsonl").read_bytes()
    (folder / "in.jsonl").write_bytes(content)
    assert "has changed since the run began" in failure(job)


def test_warnings_of_workers_are_said_once(job, caplog):
    rows = [{"window": n, "missing": 0, "warnings": ["memory is short"] * 2, "parts": []} for n in range(3)]
    assert len(job.run(engine.RayEngine(job.summarizer.batcher, iter(rows)))) == len(LINES)
    assert [record.getMessage() for record in caplog.records] == ["memory is short"]


def test_a_worker_hands_its_warnings_over(job, monkeypatch):
    job.worker.summarizer = job.summarizer
    monkeypatch.setattr(job.summarizer, "has_warned", False)
    monkeypatch.setattr(job.summarizer, "generate", lambda *_: (_ for _ in ()).throw(MemoryError()))
    (row,) = engine.rows_of(job.worker(job.plans()[0]))
    assert len(row["warnings"]) == 1 and row["warnings"][0].startswith("memory does not suffice for 2 texts at a time")
    assert [part[3] for part in row["parts"]] == ["there is not enough memory for it, even alone"] * 2


def test_what_reads_texts_goes_to_other_processes_whatever_the_encoding(tmp_path):
    gpt2 = Summarizer.load(make_language_model(tmp_path / "gpt2"), "gpt2_cnndm", max_new_tokens=20)
    for summarizer in (load_once("demo", "demo"), gpt2):
        batcher = over(summarizer.batcher)
        assert not any(isinstance(value, torch.nn.Module) for value in vars(batcher).values())
        sources = [batcher.encode(text) for text in TEXTS[:4]]
        assert sources == [summarizer.batcher.encode(text) for text in TEXTS[:4]]
        assert batcher.batches(sources) == summarizer.batcher.batches(sources)
        assert len(pickle.dumps(sources)) < 100_000


# ---- a journal in any order


def test_a_journal_may_be_in_any_order(folder, tmp_path, monkeypatch):
    """As batches of several windows finish in turns."""
    monkeypatch.setattr(Summarizer, "load", load_once)
    words = words_of(folder, "x", "--output", tmp_path / "out.jsonl")
    with monkeypatch.context() as patch:
        calls = []
        attempt = Summarizer._attempt

        def stopping(self, *words):
            calls.append(words)
            if len(calls) > 16:
                raise KeyboardInterrupt
            return attempt(self, *words)

        patch.setattr(Summarizer, "_attempt", stopping)
        assert "--resume" in exit_of(summarize, words, patch)
    journal = tmp_path / "out.jsonl.journal"
    first, *records = journal.read_bytes().splitlines(keepends=True)
    assert len(records) > 10
    random.Random(1).shuffle(records)
    journal.write_bytes(first + b"".join(records[3:]))
    assert exit_of(summarize, [*words, "--resume"], monkeypatch) is None
    assert (tmp_path / "out.jsonl").read_bytes() == (folder / "alone.jsonl").read_bytes()


# ---- workers and places for them

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "gibibytes", "workers", "expected"),
    [
        ([2], [8], 1, (1, 2)),
        ([2], [8], 2, (2, 1)),
        ([8, 2], [9, 9], 2, (2, 4)),  # 5 cores each would leave the second without a place
        ([3, 3], [9, 9], 4, (4, 1)),
        ([4, 4], [9, 9], None, (8, 1)),
        ([16], [7.5], None, (7, 2)),  # memory for so many
        ([16, 0], [0.1, 9], None, (1, 16)),
    ],
)
def test_workers_share_the_cores_of_the_machines_that_have_room(cores, gibibytes, workers, expected):
    nodes = [{"CPU": float(c), "memory": m * GIB} for c, m in zip(cores, gibibytes)]
    pool = cluster.pool_for(nodes, workers, model_bytes=0, cpu=False)
    assert (pool.workers, pool.cores) == expected and pool.gpus == 0
    assert sum(count // pool.cores for count in cores) >= pool.workers
    assert pool.memory * pool.workers <= sum(gibibytes) * GIB


def test_workers_take_gpus_where_there_are_any():
    nodes = [{"CPU": 8.0, "GPU": 2.0, "memory": 9 * GIB}, {"CPU": 8.0, "memory": 9 * GIB}]
    assert cluster.pool_for(nodes, None, 0, cpu=False) == cluster.Pool(2, 1, 1)
    assert cluster.pool_for(nodes, None, 0, cpu=True) == cluster.Pool(16, 1, 0, GIB)
    for workers, cpu, what in ((3, False, "2 GPUs"), (17, True, "16 cores")):
        with pytest.raises(UserError, match=f"the cluster has {what}: ask for at most"):
            cluster.pool_for(nodes, workers, 0, cpu)


# ---- one line for what can go wrong at the start


def test_without_ray_the_command_to_install_it_is_shown(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fairseq_el.jobs.ray_engine")
    monkeypatch.delitem(sys.modules, "fairseq_el.jobs.ray_cluster")
    said = exit_of(summarize, words_of(folder, "none", "--engine", "ray"), monkeypatch)
    assert said == ("summarize: error: --engine ray needs Ray, which is not installed: pip install 'ray[data]==2.60.0'")
    assert "\nray==2.60.0 " in (ROOT / "requirements.lock").read_text(encoding="utf-8")


@pytest.mark.parametrize("given", ["nonsense", "ray://127.0.0.1:10001", "127.0.0.1:port", "127.0.0.1:99999999"])
def test_an_address_that_is_none_is_one_line(folder, monkeypatch, given):
    words = words_of(folder, "none", "--engine", "ray", "--ray-address", given)
    said = exit_of(summarize, words, monkeypatch)
    assert re.fullmatch(f"summarize: error: .*{re.escape(given)}.*: give the address of its head.*", said)


def test_a_cluster_that_does_not_answer_is_not_waited_for(folder, monkeypatch):
    """Neither where nothing listens, nor where what listens says nothing."""
    monkeypatch.setattr(cluster, "PATIENCE", 6)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        given = f"127.0.0.1:{silent.getsockname()[1]}"
        for listens, reason in ((False, "Connection refused"), (True, "no answer in 6 seconds")):
            if listens:
                silent.listen()
            started = time.monotonic()
            words = words_of(folder, "none", "--engine", "ray", "--ray-address", given)
            said = exit_of(summarize, words, monkeypatch)
            assert "\n" not in said and f"answers at {given}" in said and reason in said
            assert time.monotonic() - started < 30
    assert not list(folder.glob("none*"))


def test_a_cluster_that_wants_a_token_says_so(monkeypatch):
    said = "gcs_client.cc:210: Failed to get cluster ID: InvalidAuthToken: Authentication token is missing or incorrect"
    ended = subprocess.CompletedProcess([], 1, "", f"{said}\nConnectionError: Failed to connect")
    monkeypatch.setattr(cluster.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(UserError, match=r"\(it wants its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN\)"):
        cluster.check_address("auto")


def test_a_folder_of_a_killed_driver_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "LONGEST_FOLDER", 1000)
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, used = (tmp_path / f"{cluster.FOLDER}.{number}.x" for number in (ended.pid, os.getpid()))
    left.mkdir()
    used.mkdir()
    made = cluster.new_folder()
    assert made.is_dir() and used.is_dir() and not left.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "ray", "--input", "-"], "--engine ray needs an --input and an --output that are files"),
        (["--workers", 2], "--workers and --ray-address are for --engine ray"),
        (["--engine", "ray", "--workers", 0], "--workers 0 is out of range: at least 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder, monkeypatch, capsys, options, message):
    assert exit_of(summarize, words_of(folder, "none", *options), monkeypatch) == 2
    assert message in capsys.readouterr().err
