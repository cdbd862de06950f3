"""The load script measures what it says, and notices summaries that are lost, doubled or wrong."""

import sys

import load
from serving.client import percentile


def test_a_small_run_loses_nothing_and_writes_its_section(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- load: begin -->\nold\n<!-- load: end -->\n\nafter\n")
    words = "--texts 16 --singles 4 --rounds 1 --clients 1 8 --requests 40 --threads 1".split()
    monkeypatch.setattr(sys, "argv", ["load.py", *words, "--page", str(page)])
    load.main()
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    clients = {row[0]: row[-1] for row in rows if row[0] in ("1", "8")}
    assert clients == {"1": "0 / 0 / 0", "8": "0 / 0 / 0"}
    assert text.count("the other client got all its") == 6 and "FAILED" not in text
    assert "after 40:" in text


def test_lost_doubled_and_wrong_summaries_are_counted():
    run = {"seconds": 2.0, "latencies": [0.1], "health": [0.01], "answers": {0: [], 1: ["b", "b"], 2: ["x"], 3: ["d"]}}
    found = load.summary_of(4, [run], ["a", "b", "c", "d"], job=4.0)
    assert (found["lost"], found["twice"], found["different"], found["of_job"]) == (1, 1, 1, 0.5)
    assert len(load.failures({"clients": {"clients": [found]}})) == 3


def test_percentiles_are_of_the_nearest_rank():
    assert [percentile(list(range(1, 101)), share) for share in (50, 99, 100)] == [51, 100, 100]
