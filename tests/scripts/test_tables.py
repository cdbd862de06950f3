"""The experiments that are put together from parts, at toy size: what is shown is what was measured, and adds up."""
# Over 400 lines: the experiments share runs at toy size, which take seconds.

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from rouge_score import rouge_scorer

import benchmark
from bench import extrapolate, growth, lengths, parts, peers, pool, table2, table2_report, table3, table5, tasks
from bench.budget import GIB, Footprint, state_bytes
from bench.driver import Worker, WorkerFailed
from bench.environment import BUILD, ROOT
from bench.protocol import PAD, Request, padded, reset_peak, resident_memory, source_sentences
from bench.systems import SYSTEMS
from bench.worker_el import ELSystem
from bench.worker_language import LanguageSystem
from bench.worker_stock import StockSystem
from fairseq_el.errors import UserError
from fairseq_el.models.caches import SelfAttentionCache
from helpers import number, parse_tables

NAMES = ("table2", "table3", "table5", "growth", "peers")
BART = tasks.TINY_BART


class WorkerHere:
    """A worker in this process: what it answers is the same, and it does not have to import everything anew."""

    classes = {"bench.worker_stock": StockSystem, "bench.worker_el": ELSystem, "bench.worker_language": LanguageSystem}

    def __init__(self, kind, checkpoint, logs):
        self.system = self.classes[kind.module](kind.worker_options(checkpoint))
        self.loaded = {"memory": resident_memory(), "versions": self.system.versions}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def ask(self, request: Request) -> dict:
        reset_peak()
        answer = self.system.answer(request, source_sentences(request, self.system.vocabulary))
        answer.memory = resident_memory()
        return json.loads(json.dumps(asdict(answer)))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of one quick run of all of them; JSON and plots lie beside it. Two have workers as they are."""
    threads = torch.get_num_threads()
    output = tmp_path_factory.mktemp("tables")
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.setattr(pool, "Worker", Worker if name in ("table3", "growth") else WorkerHere)
            benchmark.main([name, "--quick", "--repeats", "1", "--output", str(output)])
    torch.set_num_threads(threads)
    return output / "benchmarks.md"


@pytest.fixture(scope="module")
def tables(page) -> dict[str, list[dict[str, str]]]:
    return parse_tables(page.read_text())


@pytest.fixture
def results(page):
    return lambda name: json.loads((page.parent / f"{name}.json").read_text())


# --- lengths ---------------------------------------------------------------------------------------


def test_lengths_are_those_of_the_real_texts():
    facts = {"cnndm_source": (128, 628.6), "xsum_source": (239, 462.4), "cnndm_output": (128, 67.4),
             "xsum_output": (256, 29.8)}  # fmt: skip
    for name, (texts, mean) in facts.items():
        assert len(lengths.all_lengths(name)) == texts
        assert lengths.mean(name) == pytest.approx(mean, abs=0.05)
    assert max(lengths.all_lengths("cnndm_source", cut=512)) == 512


def test_a_batch_of_average_length_has_real_neighbours_and_the_real_mean():
    for name in ("cnndm_source", "xsum_source"):
        batch = lengths.middle_batch(name, 8)
        every = lengths.all_lengths(name)
        start = every.index(batch[0])
        assert len(batch) == 8 and any(every[i : i + 8] == batch for i in range(start, start + 8))
        assert sum(batch) / 8 == pytest.approx(lengths.mean(name), rel=0.01)
    assert sum(lengths.near(149.4, 8)) == 1195 and set(lengths.near(149.4, 8)) == {149, 150}


def test_tasks_are_the_papers():
    found = {task.name: task for task in tasks.paper_tasks()}
    assert {name: task.output_length for name, task in found.items()} == {
        "squad": 12, "xsum": 30, "cnndm": 67, "gpt2-small": 200, "gpt2-medium": 200}  # fmt: skip
    assert [found["xsum"].beam(search) for search in ("beam", "diverse", "greedy")] == [6, 6, 1]
    assert found["cnndm"].search_options("diverse")["diverse_beam_groups"] == 4
    assert found["cnndm"].request("parts", 3, "beam").lengths == found["cnndm"].source_lengths


def test_sources_have_their_own_lengths_and_padding_fills_them_up():
    request = Request("generate", batch=5, source_length=9, beam=1, length=2, lengths=(7, 9, 8))
    sources = source_sentences(request, vocabulary=50)
    assert [len(source) for source in sources] == [7, 9, 8, 7, 9] and sources[0] == sources[3]
    assert padded(sources[:2], left=True)[0] == [PAD, PAD, *sources[0]]
    assert padded(sources[:2], left=False)[0] == [*sources[0], PAD, PAD]


# --- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [30, 637])
def test_steps_on_a_straight_line_add_up_to_what_they_add_up_to_one_by_one(steps):
    def seconds(step: int) -> float:
        return 0.2 + 0.003 * step

    timed = {"early": [[k, seconds(k)] for k in (1, 2, 3)], "late": [[k, seconds(k)] for k in range(steps - 3, steps)]}
    found = timed | {"steps": steps, "skipped": steps - 7, "first_seconds": 5.0, "sources": 4, "source_seconds": 2.0}
    assert extrapolate.steps_seconds(found) == pytest.approx(sum(map(seconds, range(1, steps))))
    assert extrapolate.batch_seconds(found, batch=40) == pytest.approx(20 + 5 + sum(map(seconds, range(1, steps))))


def test_a_whole_run_is_the_sum_of_its_steps():
    found = {"early": [[1, 0.1], [2, 0.4], [3, 0.3]], "late": [], "steps": 4, "skipped": 0, "first_seconds": 1.0,
             "sources": 0, "source_seconds": 0.0}  # fmt: skip
    assert extrapolate.is_whole(found) and extrapolate.batch_seconds(found, 8) == pytest.approx(1.8)


class Ensemble:
    """Notes how many tokens each of its steps has before it, and takes so long for one."""

    def __init__(self, clock: list[float], takes: float):
        self.clock, self.takes, self.seen = clock, takes, []

    def forward_decoder(self, tokens, encoder_outs, incremental_states):
        self.seen.append(tokens.size(1) - 1)
        self.clock.append(self.clock[-1] + self.takes + 0.01 * self.seen[-1])


def timed_parts(monkeypatch, steps: int, takes: float) -> tuple[dict, list[int], list[int]]:
    clock, aged = [0.0], []
    monkeypatch.setattr(parts.time, "perf_counter", lambda: clock[-1])
    ensemble = Ensemble(clock, takes)

    def generate():
        for step in range(steps):
            ensemble.forward_decoder(torch.zeros(2, step + 1), None, None)

    found = parts.time_parts(ensemble, steps, lambda states, by: aged.append(by), generate)
    return found, ensemble.seen, aged


@pytest.mark.parametrize(("takes", "seen"), [(0.1, [0, 1, 2, 3, 47, 48, 49]), (1.0, [0, 1, 2, 48, 49]),
                                             (2.0, [0, 1, 49])])  # fmt: skip
def test_the_first_steps_and_the_last_are_run_fewer_where_they_are_slow(monkeypatch, takes, seen):
    found, ran, aged = timed_parts(monkeypatch, steps=50, takes=takes)
    assert ran == seen and aged == [50 - len(seen)] == [found["skipped"]]
    assert [step for step, _ in [*found["early"], *found["late"]]] == seen[1:]
    exact = sum(takes + 0.01 * step for step in range(1, 50))
    assert extrapolate.steps_seconds(found) == pytest.approx(exact)


def test_a_short_generation_is_run_whole(monkeypatch):
    found, ran, aged = timed_parts(monkeypatch, steps=7, takes=0.1)
    assert ran == list(range(7)) and not aged and extrapolate.is_whole(found)
    assert extrapolate.batch_seconds(found | {"sources": 0}, 1) == pytest.approx(sum(0.1 + 0.01 * k for k in range(7)))


@pytest.fixture(scope="module")
def systems():
    BART.checkpoint.ensure()
    options = {"checkpoint": str(BART.checkpoint.model), "data": str(BART.checkpoint.data)}
    return {"stock": StockSystem(options | {"copied": False}), "el": ELSystem(options | {"packing": "fp32"})}


def state_sizes(system, request: Request) -> dict[int, list[torch.Size]]:
    """Of what is kept of the tokens so far, by their number, seen when a step begins."""
    sizes = {}
    build = system.build_generator

    def building(request):
        generator = build(request)
        decode = generator.model.forward_decoder

        def watching(tokens, encoder_outs, states, *options):
            if states[0]:
                history = SelfAttentionCache.of(states[0])
                if history is None:
                    found = [layer.self_attn._get_input_buffer(states[0])["prev_key"].shape
                             for layer in system.model.decoder.layers]  # fmt: skip
                else:
                    found = [history.beam_mask.shape, history.used, *(k.shape for k, _ in history.slots.values())]
                sizes[tokens.size(1) - 1] = found
            return decode(tokens, encoder_outs, states, *options)

        generator.model.forward_decoder = watching
        return generator

    system.build_generator = building
    try:
        system.answer(request, source_sentences(request, system.vocabulary))
    finally:
        del system.build_generator
    return sizes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stock", {}),
        ("stock", {"multi_head": "copied"}),
        ("el", {"attention": "always"}),
        ("el", {"attention": "auto"}),
    ],
)
def test_an_aged_state_is_as_large_as_that_of_a_whole_generation(systems, name, options):
    request = Request("parts", 3, 32, 4, 40, lengths=(30, 32, 31), **options)
    aged, whole = (state_sizes(systems[name], replace(request, op=op)) for op in ("parts", "generate"))
    assert set(whole) >= set(aged) and min(aged) == 1 and max(aged) >= 39 and len(aged) < 10
    assert aged == {step: whole[step] for step in aged}


def test_search_options_reach_the_search_and_the_cache_can_be_left_out(systems):
    request = Request("generate", 3, 32, 4, 8, lengths=(30, 32, 31))
    answers, diverse = {}, {"diverse_beam_groups": 4, "diverse_beam_strength": 0.5}
    searches = {"beam": {}, "no-cache": {"multi_head": "no-cache"}, "diverse": {"search": diverse}}
    for name, more in searches.items():
        asked = replace(request, **more)
        answers[name] = systems["stock"].answer(asked, source_sentences(asked, systems["stock"].vocabulary)).tokens
        if name != "no-cache":
            ours = replace(asked, attention="auto")
            assert systems["el"].answer(ours, source_sentences(ours, 1000)).tokens == answers[name]
    assert answers["beam"] == answers["no-cache"] != answers["diverse"]


@pytest.mark.parametrize("attention", ["always", "auto"])
def test_prompts_that_are_read_once_and_repeated_leave_the_state_of_prompts_read_in_full(attention):
    model = tasks.TINY_GPT2
    model.checkpoint.ensure()
    system = LanguageSystem({"checkpoint": str(model.checkpoint.model), "data": str(model.checkpoint.data),
                             "stock": False, "packing": "fp32", "unscored": True})  # fmt: skip
    found = {}
    for op in ("generate", "parts", "parts"):  # once more from what the first one has read
        request = Request(op, 6, 24, 2, 40, attention=attention)
        generators = []
        build = system.task.build_generator
        system.task.build_generator = lambda *a, build=build, kept=generators: kept.append(build(*a)) or kept[-1]
        answer = system.answer(request, source_sentences(request, system.vocabulary))
        system.task.build_generator = build
        found.setdefault(op, []).append(generators[0].profile.peak_source_bytes)
        if op == "parts":
            assert answer.parts["sources"] == 4 and answer.parts["steps"] == 40 and answer.parts["late"]
    assert found["parts"] == found["generate"] * 2


# --- memory ----------------------------------------------------------------------------------------


def test_state_is_that_of_the_formulas():
    kv = 4 * 2 * 12 * 1024  # bytes of K and V for a token
    beams = 4 * 67 * kv
    forms = {"copied": 4 * 661 * kv + 661 * 4096 + beams, "stock": 661 * kv + 661 * 4096 + beams,
             "auto": 661 * kv + 661 * 4096 + beams, "always": 661 * 4096 + beams}  # fmt: skip
    for form, size in forms.items():
        assert state_bytes(tasks.BART, 4, 661, 67, form) == pytest.approx(size, rel=1e-6)
    own = 4 * 2 * 12 * 768
    gpt2 = {"stock": 4 * 637 * own, "always": 437 * own / 2 + 4 * 200 * own, "auto": 437 * own + 4 * 200 * own}
    for form, size in gpt2.items():
        assert state_bytes(tasks.GPT2_SMALL, 4, 437, 200, form) == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("form", ["copied", "stock", "always", "auto"])
def test_the_largest_batch_fits_and_one_more_does_not(form):
    footprint = Footprint(resident=2 * 10**9, encoding=30e6, stepping=800e3)
    shape = (4, 661, 67, form)
    most = footprint.largest(tasks.BART, *shape, budget=6 * GIB, most=10_000)
    assert footprint.peak(tasks.BART, most, *shape) <= 6 * GIB < footprint.peak(tasks.BART, most + 1, *shape)
    assert footprint.largest(tasks.BART, *shape, budget=6 * GIB, most=5) == 5
    assert footprint.largest(tasks.BART, *shape, budget=2 * 10**9 + 1000, most=5) == 0


def test_a_batch_that_took_more_than_the_budget_is_measured_again_and_smaller():
    task = tasks.QUICK_TASKS[0]
    asked = []

    class Greedy:
        def ask(self, name, request, facts):
            asked.append(request.batch)
            return {"batch": request.batch, "memory": {"peak": 1000 + 100 * request.batch},
                    "parts": {"resident_bytes": 1000}}  # fmt: skip

    settings = replace(table2.QUICK, budget=1500)
    with pool.Timetable(1, 60) as timetable:
        run = table2.TaskRun(task, settings, 1, Greedy(), timetable)
        cell = table2.Cell(task, "beam", "fp32", "stock", "largest")
        assert run.measure_cell(cell, 10, 0.1)["batch"] == 5 and asked == [10, 5]
        assert run.measure_cell(cell, 0, 0.1) == {"left_out": "memory"}


def test_a_system_that_fails_at_first_is_shown_as_failed_and_the_others_are_measured(tmp_path):
    task = tasks.QUICK_TASKS[0]

    class OnlyStock:
        workers: dict = {}

        def ask(self, name, request, facts):
            context = facts | {"system": name} | asdict(request)
            if name != "stock":
                return context | {"failed": "RuntimeError"}
            timed = {"steps": 2, "skipped": 0, "first_seconds": 1.0, "early": [[1, 1.0]], "late": [], "sources": 2,
                     "source_seconds": 2.0, "source_peak_bytes": 10, "resident_bytes": 1000}  # fmt: skip
            return context | {"memory": {"peak": 2000}, "parts": timed}

    with pool.Timetable(1, 60) as timetable:
        records = table2.TaskRun(task, table2.QUICK, 1, OnlyStock(), timetable).measure()
    (row,) = [r for r in table2.figures(table2.QUICK, records)["rows"] if (r["task"], r["search"]) == ("cnndm", "beam")]
    found = {column: cell["missing"] for column, cell in row["cells"]["largest"].items()}
    assert found == {"copied": None, "stock": None, "always": "failed", "auto": "failed"}
    assert row["cells"]["largest"]["stock"]["sentences_per_second"] == pytest.approx(5 / (5 + 2))
    with pool.Timetable(1, 0.0) as timetable:
        records = table2.TaskRun(task, table2.QUICK, 1, OnlyStock(), timetable).measure()
    assert {pool.why_missing(record) for record in records} == {"no time"}


# --- runs that go on -------------------------------------------------------------------------------


class FakeWorker:
    """Dies of batch 13, as one whose memory does not suffice."""

    started: list[str] = []

    def __init__(self, kind, checkpoint, logs):
        self.kind, self.loaded = kind, {"versions": {}}
        self.started.append(kind.name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def ask(self, request):
        if request.batch == 13:
            raise WorkerFailed("the worker ended; the end of its log:\nRuntimeError: can't allocate memory")
        return {"seconds": 1.0}


def test_a_worker_that_dies_is_said_and_started_again_and_given_up_in_the_end(monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "started", [])
    kinds = [SYSTEMS["stock"], SYSTEMS["el"]]
    good, bad = (Request("parts", batch, 8, 1, 2) for batch in (4, 13))
    BART.checkpoint.ensure()
    with pool.Pool(kinds, BART.checkpoint, tmp_path, {}) as workers:
        asked = [("stock", good), ("stock", bad), ("el", good), ("stock", good), ("stock", bad), ("stock", good)]
        found = [workers.ask(name, request, {}) for name, request in asked]
    assert [pool.why_missing(record) for record in found] == [None, "failed", None, None, "failed", "failed"]
    assert found[1]["failed"] == "RuntimeError: can't allocate memory"
    assert FakeWorker.started == ["stock", "el", "stock"]


def test_what_there_is_no_time_for_is_left_out_and_shown_as_such(monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "Worker", FakeWorker)
    settings = replace(growth.QUICK, minutes=0.0)
    monkeypatch.setattr(FakeWorker, "loaded", {}, raising=False)
    loaded, records = growth.measure(settings, 1, tmp_path)
    assert records == []
    made = growth.figures(settings, records)
    assert "no time" in growth.axis_table("beam", made["axes"]["beam"])
    empty = table2.figures(table2.QUICK, [])
    assert {cell["missing"] for row in empty["rows"] for cell in row["cells"]["largest"].values()} == {"no time"}
    assert {target["met"] for target in empty["targets"]} == {None}
    assert "no time" in table2_report.largest_table(empty["rows"])


def test_all_keeps_to_its_hour_whatever_the_first_ones_take():
    shares = [minutes for _, minutes in benchmark.EXPERIMENTS.values()]
    assert sum(shares) <= benchmark.MINUTES < 60
    assert list(benchmark.EXPERIMENTS)[-len(benchmark.TIMED) :] == list(benchmark.TIMED)
    passed = 20.0  # where 12 were planned
    for name in benchmark.TIMED:
        given = benchmark.minutes_for(name, passed)
        assert given <= benchmark.EXPERIMENTS[name][1] or name == benchmark.TIMED[-1]
        passed += given
    assert passed <= benchmark.MINUTES
    for module in (table2, table3, growth):  # by their own reckoning they need no more than they get
        settings = module.EXPERIMENT.settings
        assert sum(seconds for _, seconds in module.time_plan(settings, 3)) < 1.1 * 60 * settings.minutes


# --- what is made of it ----------------------------------------------------------------------------


def test_stock_fairseq_is_measured_once_for_columns_that_are_the_same():
    squad, _, cnndm, gpt2, _ = tasks.paper_tasks()

    def canonical(task, search, precision, column):
        cell = table2.Cell(task, search, precision, column, "largest").measured_as()
        return cell.precision, cell.column

    assert canonical(cnndm, "beam", "fp16", "stock") == ("fp32", "stock")
    assert canonical(cnndm, "greedy", "fp16", "stock") == ("fp32", "copied")
    assert canonical(squad, "beam", "fp32", "stock") == canonical(gpt2, "beam", "fp32", "stock") == ("fp32", "copied")
    assert canonical(cnndm, "greedy", "fp16", "auto") == ("fp16", "auto")


def test_the_papers_numbers_give_the_papers_ratios():
    printed = {
        "beam": ["2.7 2.0", "4.7 3.9", "5.0 3.6", "1.8 1.7", "2.2 1.8"], "diverse": ["2.8 2.1", "4.6 3.8", "5.3 3.8"],
        "greedy": ["1.6 1.4", "2.5 3.0", "3.1 2.8", "1.8 1.5", "1.8 1.6"],
    }  # fmt: skip
    names = ("squad", "xsum", "cnndm", "gpt2-small", "gpt2-medium")
    for search, ratios in printed.items():
        for name, pair in zip(names, ratios):
            for precision, ratio in zip(("fp16", "fp32"), pair.split()):
                multi_head, el = table2_report.PAPER[name, search][precision]
                assert el / multi_head == pytest.approx(float(ratio), abs=0.06), (name, search)
    assert len(table2_report.PAPER) == sum(map(len, printed.values()))
    assert [table3.PAPER[batch]["always"] / 1.9 for batch in (32, 64, 128, 320)] == pytest.approx(
        [4.2, 6.6, 11.2, 15.1], abs=0.06
    )


def test_a_power_law_gives_its_exponent():
    rows = [{"value": n, "auto": {"decoding_seconds": {"median": 3 * n**1.5}, "state_bytes": 7 * n}} for n in (2, 4, 8)]
    assert growth.exponent(rows, "auto", "decoding_seconds") == pytest.approx(1.5)
    assert growth.exponent(rows, "auto", "state_bytes") == pytest.approx(1)
    assert growth.exponent(rows[:1], "auto", "state_bytes") is None


def peer_record(system: str, length: int, seconds: float, batch: int = 8, op: str = "generate") -> dict:
    return {"task": "cnndm", "peer": system, "at": str(batch), "op": op, "batch": batch, "beam": 4, "length": length,
            "seconds": seconds, "tokens": [[system]] * batch, "memory": {"peak": 10**9 * batch}}  # fmt: skip


def test_two_lengths_give_the_time_of_the_whole_and_the_fastest_float_system_is_the_target():
    settings = peers.SETTINGS
    task = next(task for task in settings.tasks if task.name == "cnndm")
    whole = {"stock": 80.0, "el": 40.0, "ctranslate2-float32": 50.0, "ctranslate2-int8": 30.0}
    records = [peer_record(system, 67, seconds) for system, seconds in whole.items()]
    records += [peer_record("transformers", 2, 20.0), peer_record("transformers", 8, 32.0)]
    made = peers.figures(settings, records)
    at_8 = {row["system"]: row for row in made["rows"] if row["task"] == "cnndm" and row["at"] == "8"}
    assert at_8["transformers"]["seconds_per_sentence"] == pytest.approx((20 + 65 * 2) / 8)
    assert (at_8["transformers"]["how"], at_8["el"]["how"]) == ("two lengths", "whole")
    assert at_8["el"]["equal_to_stock"] == 0 and at_8["stock"]["equal_to_stock"] == 8
    assert at_8["transformers"]["equal_to_stock"] is None
    (found,) = [target for target in made["targets"] if "BART-large, CNN/DailyMail" in target["figure"]]
    assert found["value"] == pytest.approx(50 / 40) and found["met"]
    records += [peer_record(system, 67, 9.0, batch=1) for system in ("stock", "el")]
    own = [r for r in records if r["peer"] == "el"]
    assert peers.largest_batch(task, own, replace(settings, budget=20 * 10**9)) == 20  # 1 GB each


def test_largest_batches_that_took_more_than_the_budget_are_counted():
    rows = [{"at": at, "missing": None, "peak_bytes": size} for at, size in
            (("8", 130), ("largest", 104), ("largest", 99))]  # fmt: skip
    assert peers.over_budget(rows, 100) == "; 1 of 2 then took more than that, by up to 4%"
    assert peers.over_budget(rows[2:] + [{"at": "largest", "missing": "no time"}], 100) == ""


def test_a_system_that_tells_its_steps_runs_some_of_them_once():
    task = next(task for task in peers.SETTINGS.tasks if task.name == "cnndm")
    kinds = peers.kinds_of(task.model, peers.SETTINGS)
    requests = {
        name: peers.Cell(task, name, kinds[name], 64, "largest").requests(peers.SETTINGS)
        for name in ("transformers", "ctranslate2-float32")
    }
    assert [request.length for request in requests["transformers"]] == [8]
    assert [request.length for request in requests["ctranslate2-float32"]] in ([2, 8], [67])
    some = peer_record("transformers", 8, 32.0) | {"step_seconds": 2.0}
    assert peers.cell_seconds(task, [some]) == pytest.approx(32 + 59 * 2) and peers.way_of(task, [some]) == "some steps"


def test_encoders_are_timed_in_rounds_over_all_systems_and_their_median_counts():
    task = tasks.QUICK_TASKS[0]
    systems = [kind.name for kind in table2.workers_of(task.model, table2.QUICK)]
    asked: list[str] = []

    class Slowing:
        """Whose encoders take 1 s in the first round, then 5, then 9."""

        kinds = workers = dict(SYSTEMS)

        def ask(self, name, request, facts):
            takes = 1.0
            if request.op == "sources":
                takes = 5.0 + 4.0 * asked.count(name)
                asked.append(name)
            timed = {"steps": 2, "skipped": 0, "first_seconds": 1.0, "early": [[1, 1.0]], "late": [], "sources": 2,
                     "source_seconds": takes, "source_peak_bytes": 10, "resident_bytes": 1000}  # fmt: skip
            return facts | {"system": name} | asdict(request) | {"memory": {"peak": 2000}, "parts": timed}

    with pool.Timetable(1, 60) as timetable:
        records = table2.TaskRun(task, table2.QUICK, 3, Slowing(), timetable).measure()
    assert asked == systems * 2
    (row,) = [r for r in table2.figures(table2.QUICK, records)["rows"] if (r["task"], r["search"]) == ("cnndm", "beam")]
    for cell in row["cells"]["largest"].values():
        assert cell["source_seconds"] == pytest.approx(5.0 / 2 * cell["batch"])
    alone = [r for r in records if r["kind"] == "footprint"]
    assert table2.source_time(alone, "cnndm", "stock") == {}  # one round says nothing that its parts don't


def test_sources_are_encoded_anew_when_they_are_timed_again(systems):
    request = Request("parts", 3, 32, 4, 40, lengths=(30, 32, 31), attention="always")
    sources = source_sentences(request, 1000)
    system = systems["el"]
    system.answer(request, sources)
    encoded = []
    compute = system.encoder.compute
    system.encoder.compute = lambda *args, **options: encoded.append(len(args[0])) or compute(*args, **options)
    try:
        again = system.answer(replace(request, op="sources"), sources)
        system.answer(request, sources)
    finally:
        system.encoder.compute = compute
    assert encoded == [3] and again.parts["sources"] == 3 and again.parts["source_seconds"] > 0


def test_rest_measures_what_the_last_run_left_out_and_nothing_again(page, tmp_path, monkeypatch):
    def run(*words: str) -> dict:
        monkeypatch.setattr(pool, "Worker", WorkerHere)
        benchmark.main(["peers", "--quick", "--output", str(tmp_path), *words])
        return json.loads((tmp_path / "peers.json").read_text())

    whole = json.loads((page.parent / "peers.json").read_text())
    left_out = [r for r in whole["records"] if (r["peer"], r["at"]) == ("el", "8")]
    kept = [r for r in whole["records"] if r not in left_out]
    key = {name: left_out[0][name] for name in ("task", "peer", "at", "batch")}
    before = whole["environment"] | {"date": "2021-05-11 00:00 UTC"}
    shortened = whole | {"environment": before, "records": [*kept, key | {"left_out": "time"}]}
    (tmp_path / "peers.json").write_text(json.dumps(shortened))
    found = run("--rest")
    assert [r for r in found["records"] if r in kept] == kept
    (new,) = [r for r in found["records"] if r not in kept]
    assert key.items() <= new.items() and new["tokens"] == left_out[0]["tokens"]
    assert "no time" not in (tmp_path / "benchmarks.md").read_text().split("### Targets of Peers")[1]
    assert "From an earlier run" in (tmp_path / "benchmarks.md").read_text()
    other = found | {"environment": found["environment"] | {"commit": "0123456789"}}
    (tmp_path / "peers.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="commit 0123456789.*leave out --rest"):
        run("--rest")
    (tmp_path / "peers.json").unlink()
    with pytest.raises(SystemExit, match="no run of peers to go on from"):
        run("--rest")


def test_batches_that_do_not_fit_are_shown_with_what_they_would_take(results):
    found = results("table3")
    settings = replace(table3.QUICK, budget=found["figures"]["rows"][0]["cells"]["always"]["peak_bytes"] // 2)
    made = table3.figures(settings, found["records"])
    assert {cell["missing"] for row in made["rows"] for cell in row["cells"].values()} == {"does not fit"}
    assert table3.batches_table(made["rows"]).count("GiB") == 4 * len(settings.batches)


def test_a_checkpoint_of_ones_own_takes_the_place_of_random_weights(tmp_path):
    BART.checkpoint.ensure()
    (changed,) = tasks.with_checkpoint(tasks.QUICK_TASKS[:1], BART.checkpoint.model)
    checkpoint = changed.model.checkpoint
    checkpoint.ensure()
    assert checkpoint.model == BART.checkpoint.model and (checkpoint.data / "dict.source.txt").is_file()
    assert checkpoint.vocabulary == BART.vocabulary and json.dumps(asdict(changed))
    with pytest.raises(UserError, match="one checkpoint.*--tasks"):
        tasks.with_checkpoint(tasks.QUICK_TASKS, BART.checkpoint.model)
    with pytest.raises(UserError, match="there is no .*nowhere.pt"):
        tasks.with_checkpoint(tasks.QUICK_TASKS[:1], tmp_path / "nowhere.pt")


# --- what is shown ---------------------------------------------------------------------------------


def test_table2_shows_the_numbers_of_the_json(tables, results):
    made = results("table2")["figures"]
    for search, title in table2_report.TITLES.items():
        rows = [row for row in made["rows"] if row["search"] == search]
        for at in ("largest", "equal"):
            for shown, row in zip(tables[f"{title}, {at} batch"], rows, strict=True):
                assert shown["model, task, weights"] == f"{row['model']}, {row['title']}, {row['precision']}"
                for column, heading in table2_report.COLUMNS.items():
                    cell = row["cells"][at][column]
                    assert number(shown[heading]) == pytest.approx(cell["sentences_per_second"], rel=6e-3)
                    assert (" w" in shown[heading]) == cell["whole"]
    assert len(tables["Targets of Table 2"]) == len(made["targets"]) > 0


def test_a_speed_is_the_batch_by_the_time_of_its_parts(results):
    found = results("table2")
    for row in found["figures"]["rows"]:
        for cell in row["cells"]["largest"].values():
            seconds = cell["source_seconds"] + cell["first_seconds"] + cell["steps_seconds"]
            assert cell["sentences_per_second"] == pytest.approx(cell["batch"] / seconds, rel=1e-6)
            assert cell["batch"] == table2.QUICK.largest_batch and cell["peak_bytes"] < 6 * GIB
    requests = [(r["system"], r["attention"], r["multi_head"]) for r in found["records"] if r["kind"] == "cell"]
    assert {("stock", None, "copied"), ("stock", None, None), ("el-fp32", "auto", None)} <= set(requests)


def test_the_other_tables_show_the_numbers_of_their_json(tables, results):
    for shown, row in zip(tables["Batch sizes"], results("table3")["figures"]["rows"], strict=True):
        for column, heading in table3.COLUMNS.items():
            assert number(shown[heading]) == pytest.approx(row["cells"][column]["sentences_per_second"], rel=6e-3)
    for shown, row in zip(tables["ROUGE"], results("table5")["figures"]["rows"], strict=True):
        assert shown["system"] == table5.ROWS[row["row"]][0]
        assert [float(shown[kind]) for kind in table5.KINDS] == [row["scores"][kind] for kind in table5.KINDS]
    made = results("growth")["figures"]
    for shown, forms in zip(tables["Fitted exponents"], made["exponents"].values(), strict=True):
        assert float(shown["decoding, `auto`"]) == pytest.approx(forms["auto"]["decoding_seconds"], abs=0.00501)
    for axis, rows in made["axes"].items():
        for shown, row in zip(tables[f"Against {growth.TITLES[axis]}"], rows, strict=True):
            assert number(shown["state"]) == pytest.approx(row["auto"]["state_bytes"] / 1e6, abs=0.00501)
    made = results("peers")["figures"]
    for shown, row in zip(tables["toy BART on CNN/DailyMail"], made["rows"], strict=True):
        assert number(shown["seconds a sentence"]) == pytest.approx(row["seconds_per_sentence"], rel=6e-3)
        assert shown["equal"] == f"{row['batch']}/{row['batch']}"  # those that run here find what stock finds
    assert len(tables["Targets of Peers"]) == 1


def test_rouge_is_that_of_rouge_score_and_summaries_are_equal(results):
    records = {record["row"]: record for record in results("table5")["records"]}
    assert set(records) == set(table5.ROWS)
    references = (ROOT / "demo" / "test.target").read_text().splitlines()[: table5.QUICK.limit]
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for record in records.values():
        scores = [scorer.score(r, s) for r, s in zip(references, record["summaries"], strict=True)]
        for kind, ours in (("rouge1", "ROUGE-1"), ("rouge2", "ROUGE-2"), ("rougeL", "ROUGE-L")):
            mean = 100 * sum(score[kind].fmeasure for score in scores) / len(scores)
            assert record["scores"][ours] == pytest.approx(mean, abs=0.00501)
    assert records["el"]["summaries"] == records["stock"]["summaries"]


@pytest.mark.parametrize("name", ["table2", "growth"])
def test_plots_are_pictures_of_something(page, name):
    picture = matplotlib.image.imread(page.with_name(f"{name}.png"))[..., :3]
    assert picture.shape[1] > 1000 and 0.005 < (picture.min(axis=2) < 0.9).mean() < 0.6
    assert f"({name}.png)" in page.read_text() and "<text" in page.with_name(f"{name}.svg").read_text()


def test_the_page_is_made_again_from_the_json_without_its_records(page, results, tmp_path):
    again = tmp_path / "benchmarks.md"
    for name in NAMES:
        kept = {key: value for key, value in results(name).items() if key != "records"}
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
        benchmark.show(tmp_path / f"{name}.json", again)
    assert again.read_text() == page.read_text()


def test_quick_runs_leave_the_results_and_the_page_of_full_runs_alone(tmp_path, monkeypatch):
    assert benchmark.parse_arguments(["table2", "--quick"]).output == BUILD / "quick"
    assert benchmark.parse_arguments(["table2"]).output == BUILD
    for name in ("PAGE", "RESULTS"):
        monkeypatch.setattr(benchmark, name, tmp_path / "docs" / name)
    monkeypatch.setattr(benchmark, "show", lambda file, page: shown.append((file, page)))
    facts = {"records": [1], "figures": {"rows": 2}}
    for quick in (True, False):
        shown: list = []
        args = benchmark.parse_arguments(["table2", "--output", str(tmp_path / str(quick))] + ["--quick"] * quick)
        benchmark.write(args, "table2", {}, {"machine": "m"}, facts)
        expected = tmp_path / "True" / "benchmarks.md" if quick else benchmark.PAGE
        assert shown == [(args.output / "table2.json", expected)]
        assert (tmp_path / "docs").exists() is not quick
    kept = json.loads((tmp_path / "docs" / "RESULTS" / "table2.json").read_text())
    assert kept["figures"] == {"rows": 2} and "records" not in kept and kept["quick"] is False


def test_the_committed_page_shows_the_committed_results():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    files = {file.stem: file for file in (ROOT / "docs" / "results").glob("*.json")}
    assert set(NAMES) <= set(files)
    del files["scaling"], files["gpu-model"]  # on pages of their own: test_scaling.py, test_gpu_model.py
    for file in files.values():
        results = json.loads(file.read_text())
        name = results["experiment"]
        rendered = (benchmark.RENDER.get(name) or benchmark.load_experiment(name).render)(results)
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        section = re.search(re.escape(begin) + "(.*?)" + re.escape(end), text, re.DOTALL)
        assert not results["quick"] and section and section[1].strip() == rendered.strip(), name
