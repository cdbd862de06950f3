"""The benchmark: every number is a whole measurement, a run can be stopped, and pages show what the results say."""

import json
import tomllib
from collections import Counter
from dataclasses import replace
from statistics import median

import pytest

import benchmark
from bench import pages, plan, report, runner
from bench.environment import SYSTEMS
from bench.protocol import EOS, Request, fingerprint, source_sentences
from bench.runner import Cell, Pool, Results, Run, WorkerFailed
from helpers import ROOT

FACTS = {"commit": "c", "machine": "m", "quick": False, "cores": 2, "memory_bytes": 10**9, "system": "s",
         "versions": {}, "date": "d", "command": "scripts/benchmark.py run"}  # fmt: skip


class FakeWorker:
    """Takes 10 seconds and 100 bytes a sentence, or fails."""

    def __init__(self, asked: list[str], system: str):
        self.asked, self.system = asked, system
        self.loaded = {"rest_bytes": 50, "versions": {}, "settings": ""}

    def ask(self, request: Request) -> dict:
        self.asked.append(self.system)
        if self.system == "stock-fp16":
            raise WorkerFailed("out of memory")
        return {"seconds": 10.0 * len(self.asked), "peak_bytes": 100 * request.batch, "tokens": [[7, 8]]}


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Which systems were asked, in their order."""
    calls: list[str] = []
    monkeypatch.setattr(Pool, "get", lambda pool, cell: FakeWorker(calls, cell.system))
    return calls


def cell(system: str, **options) -> Cell:
    return Cell("peers", "cnndm/8/main", system, system, Request("generate", 8), **options)


def test_rounds_go_over_all_systems(asked, tmp_path):
    Run(Results(tmp_path / "r.jsonl", FACTS), None).over([[cell("stock"), cell("el")]], tmp_path)
    assert asked == ["stock", "el"] * 3


def test_a_stopped_run_goes_on_where_it_was(asked, tmp_path):
    group, file = [cell("stock"), cell("el"), cell("stock-fp16")], tmp_path / "r.jsonl"
    run = Run(Results(file, FACTS), None)
    for number, own in ((0, group[0]), (0, group[1]), (0, group[2]), (1, group[0])):
        run.measure(own, number, Pool(tmp_path))
    with file.open("a") as lines:
        lines.write('{"cell": "peers/cnndm/8/main/el", "rou')  # the process was killed here
    assert not Run(Results(file, FACTS), minutes=1e-9).over([group], tmp_path)  # no time at all
    asked.clear()
    assert Run(Results(file, FACTS), None).over([group], tmp_path)
    assert asked == ["el", "stock", "el"]  # what failed isn't tried again
    records = [json.loads(line) for line in file.read_text().splitlines()][1:]
    rounds = Counter((record["cell"], record["round"]) for record in records)
    assert set(rounds.values()) == {1} and len(rounds) == 3 + 3 + 1
    asked.clear()
    assert Run(Results(file, FACTS), None).over([group], tmp_path) and not asked


def test_what_would_end_too_late_is_not_begun(asked, tmp_path):
    results = Results(tmp_path / "r.jsonl", FACTS)
    results.append({"cell": cell("el").key, "round": 0, "seconds": 100.0})
    assert not Run(results, minutes=1).over([[cell("el")]], tmp_path) and not asked


def test_results_are_of_one_commit_and_one_machine(tmp_path):
    Results(tmp_path / "r.jsonl", FACTS)
    for name in ("commit", "machine", "quick"):
        with pytest.raises(SystemExit, match=name):
            Results(tmp_path / "r.jsonl", FACTS | {name: "other"})


def test_a_group_that_is_too_long_leaves_its_time_to_the_next(asked, tmp_path):
    long, short = cell("stock", estimate=100.0), cell("el", estimate=10.0)
    results = Results(tmp_path / "r.jsonl", FACTS)
    assert not Run(results, minutes=2).over([[long], [short]], tmp_path)
    assert asked == ["el"] * 3


def test_estimates_follow_the_pace_of_what_was_measured(asked, tmp_path):
    measured, other = cell("stock", estimate=5.0), cell("el", estimate=7.0)
    results = Results(tmp_path / "r.jsonl", FACTS)
    results.append({"cell": measured.key, "round": 0, "seconds": 10.0})
    results.set_pace([measured, other])
    assert results.seconds(other) == 14.0
    assert results.seconds_left([measured, other]) == 2 * 10.0 + 3 * 14.0 + 2 * runner.LOADING


def test_a_run_continues_what_was_published_of_the_same_code_and_machine(asked, tmp_path):
    group, file = [cell("stock"), cell("el")], tmp_path / "r.jsonl"
    Run(Results(file, FACTS), None).over([group], tmp_path)
    report.split(file, tmp_path / "published")
    again = tmp_path / "again.jsonl"
    for other in ({"commit": "d"}, {"machine": "other"}):
        report.continue_published(tmp_path / "published", again, FACTS | other)
        assert not again.exists()
    report.continue_published(tmp_path / "published", again, FACTS)
    results = Results(again, FACTS)
    assert results.records == Results(file, FACTS).records and not any(map(results.rounds_left, group))


def test_under_a_budget_the_largest_batch_is_the_one_whose_measured_peak_fits(asked, tmp_path):
    own, file = cell("stock", budget=450), tmp_path / "r.jsonl"
    results = Results(file, FACTS)
    Run(results, None).over([[own]], tmp_path)
    assert [(r["batch"], r.get("over_budget", False)) for r in results.records] == [
        (8, True), (6, True), (4, False), (4, False), (4, False)]  # fmt: skip
    asked.clear()
    assert Run(Results(file, FACTS), None).over([[own]], tmp_path) and not asked
    never = replace(own, label="never", budget=90)
    Run(results, None).over([[never]], tmp_path)
    assert results.of(never)[-1]["failed"] == "does not fit"


def test_the_committed_set_takes_less_than_three_hours(tmp_path):
    results = Results(tmp_path / "r.jsonl", FACTS)
    seconds = [results.seconds_left(group) for group in plan.plan(plan.FULL)]
    assert sum(seconds) < 3 * 3600 and max(seconds) < 20 * 60
    assert all(cell.estimate > 0 for group in plan.plan(plan.FULL) for cell in group)


def test_the_first_screen_says_what_was_slower_than_a_peer(tmp_path):
    """A peer that takes half of our time, and `auto` at a half of the copied baseline's speed."""
    lines = [{"kind": "run"} | FACTS]
    groups = [plan.peers(plan.FULL, "cnndm", 8), plan.table2(plan.FULL, "xsum", "beam", "equal")]
    for own in (own for group in groups for own in group):
        seconds = {"ctranslate2": 5.0, "ctranslate2-int8": 20.0, "copied": 5.0}.get(own.label, 10.0)
        measured = {"cell": own.key, "system": own.system, "batch": 8, "seconds": seconds, "peak_bytes": 1}
        lines += [measured | {"round": number, "outputs": ["a"] * 8} for number in range(3)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.split(tmp_path / "r.jsonl", tmp_path)
    text = "\n".join(pages.summary(tmp_path, plan.FULL))
    assert "CTranslate2 float32 2.00 times as fast as fairseq_el (cnndm, batch 8)." in text
    assert "CTranslate2 int8 " not in text.partition("**Slower")[2].partition("\n")[0]
    (line,) = (line for line in text.splitlines() if line.startswith("| XSum, beam"))
    assert "0.50x" in line and "**no**" in line


def test_plans_have_each_cell_once_and_the_most_valuable_first():
    for sizes in (plan.FULL, plan.QUICK):
        cells = [cell for group in plan.plan(sizes) for cell in group]
        assert max(Counter(cell.key for cell in cells).values()) == 1
        assert {cell.experiment for cell in cells} == set(pages.PAGES)
        assert {cell.system for cell in cells} <= set(SYSTEMS)
        timed = [cell for cell in cells if cell.experiment in ("peers", "table2", "table3", "growth", "figure4")]
        assert min(cell.rounds for cell in timed) >= 3
    first = plan.plan(plan.FULL)[0]
    assert {"stock", "el", "el-bf16", "el-int8", "ctranslate2-int8", "openvino"} <= {cell.system for cell in first}
    assert {(c.experiment, c.request.batch) for c in first} == {("peers", 8)}


def test_each_peer_has_an_environment_with_one_torch():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = {f"peer-{kind.environment}" for kind in SYSTEMS.values() if kind.environment}
    assert {name for name in groups if name.startswith("peer-")} == wanted
    for name in wanted:
        assert "torch==2.13.0" in groups[name] and all("==" in line for line in groups[name])


# ---- real workers, at toy size


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A run of the cells that need no other system: its folder, and its records."""
    file = tmp_path_factory.mktemp("quick") / "results.jsonl"
    groups = ("peers/cnndm/8/main", "peers/gpt2-small/8/main", "quality/demo")
    only = ["table1", "table4", *(f"{group}/{system}" for group in groups for system in ("stock", "el"))]
    benchmark.main(["run", "--quick", "--output", str(file), "--only", *only])
    return file.parent, [json.loads(line) for line in file.read_text().splitlines()][1:]


def of(records: list[dict], key: str) -> list[dict]:
    return [record for record in records if record["cell"] == key]


def test_exact_mode_gives_stocks_hypotheses(quick):
    _, records = quick
    assert not [record for record in records if "failed" in record]
    for task in ("cnndm", "gpt2-small"):
        group = f"peers/{task}/8/main"
        stock, ours = of(records, f"{group}/stock"), of(records, f"{group}/el")
        assert len(stock) == len(ours) == 3
        assert len(stock[0]["outputs"]) == 8 and {str(r["outputs"]) for r in stock + ours} == {str(stock[0]["outputs"])}
    scores = of(records, "quality/demo/el")[0]["scores"]
    assert scores == of(records, "quality/demo/stock")[0]["scores"] and scores["ROUGE-1"] > 10


def test_counted_flops_are_the_formulas(quick):
    from bench.operations import operation_costs

    (record,) = of(quick[1], "table1/count/count")
    costs = operation_costs(plan.QUICK.shape)
    assert record["flops"] == {name: cost.flops for name, cost in costs.items()}


def test_source_state_is_the_formulas_to_the_byte(quick):
    """The copied baseline keeps K and V for every beam, stock fairseq 0.12 once."""
    for batch, n in plan.QUICK.table4:
        for system in plan.TABLE4_FORMS:
            (record,) = of(quick[1], f"table4/state/{batch}/{n}/{system}")
            expected = plan.table4_bytes(plan.QUICK, system, batch, n, element_size=4)
            assert record["source_bytes"] == expected


def test_pages_show_medians_of_what_was_measured(quick):
    folder, records = quick
    own = [record["seconds"] / 8 for record in of(records, "peers/cnndm/8/main/el")]
    shown = f"{median(own):.3g} ({min(own):.3g} to {max(own):.3g})"
    for page in ("benchmarks.md", "benchmarks/peers.md"):
        text = (folder / page).read_text()
        assert shown in text and "Toy sizes" in text + (folder / "benchmarks/peers.md").read_text()
    assert report.NOT_MEASURED in (folder / "benchmarks/table2.md").read_text()


def test_two_rounds_are_not_a_number(quick, tmp_path):
    folder, _ = quick
    results = json.loads((folder / "results" / "peers.json").read_text())
    results["records"] = [record for record in results["records"] if record["round"] < 2]
    (tmp_path / "peers.json").write_text(json.dumps(results))
    found = report.Measured(tmp_path, "peers")
    own = plan.peers(plan.QUICK, "cnndm", 8)[0]
    assert len(found.of(own.key)) == 2 and found.spread(own) is None


def test_sources_are_the_same_for_all_systems_and_of_the_lengths_asked_for():
    sentences = source_sentences(Request("generate", 5, (4, 6)), vocabulary=50)
    assert [len(sentence) for sentence in sentences] == [4, 6, 4, 6, 4] and all(s[-1] == EOS for s in sentences)
    assert fingerprint(sentences[0]) == fingerprint(sentences[2]) != fingerprint(sentences[1])


# ---- what is committed


def test_pages_and_readme_are_made_of_the_committed_results(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    for page in report.write_pages(ROOT / "docs" / "results", tmp_path, readme):
        assert page.read_text() == (ROOT / "docs" / page.relative_to(tmp_path)).read_text()
    assert readme.read_text() == (ROOT / "README.md").read_text()


def test_committed_results_are_of_one_commit_and_one_machine():
    files = [ROOT / "docs" / "results" / f"{name}.json" for name in pages.PAGES]
    runs = [json.loads(file.read_text())["environment"] for file in files if file.exists()]
    assert len({(run["commit"], run["machine"]) for run in runs}) <= 1
    assert not any(run["quick"] or run["commit"].endswith("-dirty") for run in runs)
    assert runner.ROUNDS >= 3
