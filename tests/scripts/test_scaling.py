"""What docs/scaling.md says of large jobs is arithmetic on what was measured."""

import json
import math
from dataclasses import asdict

import pytest

from helpers import ROOT, parse_tables

pytest.importorskip("ray")
import scaling as script  # noqa: E402  (scripts/scaling.py)
import scaling_measure as scaling  # noqa: E402
import scaling_report  # noqa: E402
from fairseq_el.jobs.inputs import Texts  # noqa: E402

TEAMS = {(1, 1): (10.0, 3e9), (1, 2): (6.0, 3.2e9), (2, 1): (11.0, 3e9)}  # seconds for batches of 20, and bytes


@pytest.fixture
def records() -> list[dict]:
    """As if this had been measured."""
    made = []
    for (workers, threads), (seconds, size) in TEAMS.items():
        for slower in (0.9, 1.0, 1.2):
            measured = {"sentences": 20 * workers, "seconds": seconds * slower}
            peaks = {"peak_bytes": [int(size)] * workers, "loading_bytes": [int(size) - 5] * workers}
            made.append({"kind": "team", "workers": workers, "threads": threads} | measured | peaks)
    driver = {"articles": 1000, "input_bytes": 4_000_000, "output_bytes": 5_000_000}
    made.append({"kind": "driver", "check_seconds": 0.5, "run_seconds": 1.5} | driver)
    made.append({"kind": "planner", "articles": 1000, "seconds": 4.0, "row_bytes": 3_000_000})
    made.append({"kind": "ray", "batches": 101, "seconds": 0.5})
    for engine, seconds in (("one", (15.0, 35.0)), ("ray", (20.0, 30.0))):
        for texts, taken in zip((1000, 3000), seconds):
            run = {"engine": engine, "workers": 1, "threads": 1, "texts": texts, "seconds": taken}
            made.append({"kind": "command"} | run)
    return made


@pytest.fixture
def results(records) -> dict:
    settings = scaling.Settings(batch=20)
    environment = {"machine": "m", "cores": 2, "memory_bytes": 1, "system": "s", "versions": {}, "commit": "c",
                   "date": "d", "command": "scripts/scaling.py"}  # fmt: skip
    facts = {"quick": False, "environment": environment, "settings": asdict(settings)}
    return json.loads(json.dumps(facts | {"figures": scaling_report.figures(settings, records)}))


def test_speed_is_by_core_and_memory_by_worker(results):
    rows = results["figures"]["teams"]
    assert [row["rate"]["median"] for row in rows] == pytest.approx([2.0, 20 / 6, 40 / 11])
    assert [row["rate_per_core"] for row in rows] == pytest.approx([2.0, 10 / 6, 20 / 11])
    assert [row["bytes_per_worker"] for row in rows] == [3e9, 3.2e9, 3e9]
    assert "2 workers with 1 thread each do 1.09 times the work of 1 worker with 2 threads, in 1.88 times" in (
        scaling_report.teams_sentence(rows)
    )


def test_start_up_is_apart_from_speed(results):
    one, ray = results["figures"]["commands"]
    assert (one["rate"], one["start"]) == pytest.approx((100.0, 5.0))
    assert (ray["rate"], ray["start"]) == pytest.approx((200.0, 15.0))


def test_jobs_follow_from_the_fastest_core(results):
    """2 sentences a second and core; the planner, with 250, is the narrowest: 125 cores."""
    tables = parse_tables(scaling_report.render(results))
    jobs = [scaling_report.job_row(results["settings"], results["figures"], n) for n in scaling_report.JOBS]
    for job, articles in zip(jobs, (10**6, 10**8, 10**9), strict=True):
        hours = articles / 2 / 3600
        cores = math.ceil(hours / 24)
        assert job["core_hours"] == pytest.approx(hours) and job["cores"] == job["workers"] == cores
        assert job["memory_bytes"] == cores * 3e9
        assert (job["input_bytes"], job["output_bytes"]) == (4000 * articles, 5000 * articles)
        assert job["journal_records"] == articles // 20 and job["drivers"] == math.ceil(cores * 2 / 250)
    allowed = scaling_report.limits(results["settings"], results["figures"])
    assert list(allowed.values()) == pytest.approx([250, 500, 4000, 1.25e8 / 8000])
    text = scaling_report.render(results)
    assert "Up to 125 cores the model is the bottleneck: an article takes 0.5 seconds of a core, and 4 milli" in text
    assert [row["core-hours"] for row in tables["Done in 24 hours"]] == ["139", "13,889", "138,889"]
    assert [row["hours on 64 cores"] for row in tables["Hours"]] == ["2.17", "217", "2,170"]
    busy = [row["cores busy"] for row in tables["What becomes the bottleneck first"]]
    assert busy == ["125", "250", "2,000", "7,812"]


def test_no_number_is_on_the_page_that_was_not_measured(results, tmp_path, monkeypatch):
    """The page is made from a file of results, and only from that."""
    monkeypatch.setattr(script, "PAGE", tmp_path / "scaling.md")
    (tmp_path / "scaling.md").write_text("# Scaling\n\n<!-- scaling: begin -->\n<!-- scaling: end -->\n\nafter\n")
    (tmp_path / "scaling.json").write_text(json.dumps(results))
    script.main(["--report", "--output", str(tmp_path)])
    page = (tmp_path / "scaling.md").read_text()
    assert page.startswith("# Scaling\n\n<!-- scaling: begin -->\n## Measured") and page.endswith("end -->\n\nafter\n")
    ours = (ROOT / "docs" / "scaling.md").read_text()
    kept = ROOT / "docs" / "results" / "scaling.json"
    section = ours.partition("<!-- scaling: begin -->")[2].partition("<!-- scaling: end -->")[0].strip()
    if kept.exists():
        assert section == scaling_report.render(json.loads(kept.read_text())).strip()
    else:
        assert "|" not in section


def test_what_one_process_does_is_really_done(tmp_path):
    """The driver writes every article once; planned batches hold every token once."""
    settings = scaling.QUICK
    article, summary = scaling.text_of(settings.tokens_in), scaling.text_of(settings.tokens_out)
    batcher = scaling.demo_batcher()
    assert [len(batcher.encode(text).tokens) for text in (article, summary)] == pytest.approx([32, 7], abs=1)
    source = tmp_path / "in.jsonl"
    source.write_text((json.dumps({"id": "1", "article": article}) + "\n") * (scaling.WINDOW + 300))
    record = scaling.measure_driver(settings, source, summary)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [{"id": "1", "article": article, "summary": summary, "score": 0.0}] * (scaling.WINDOW + 300)
    assert record["articles"] == len(lines) and record["output_bytes"] == (tmp_path / "out.jsonl").stat().st_size
    assert not list(tmp_path.glob("*.journal")) and min(record["check_seconds"], record["run_seconds"]) > 0
    planned = scaling.measure_planner(source)
    assert planned["articles"] == scaling.WINDOW and planned["seconds"] > 0
    tokens = len(batcher.encode(article).tokens) * scaling.WINDOW
    assert tokens < planned["row_bytes"] < 20 * tokens
    assert Texts(str(source), True, None).count == len(lines)
