"""scripts/soak.py, small: killed again and again, short of memory, a job loses nothing."""

import json

from test_summarize import exit_of

import soak  # scripts/soak.py


def test_a_job_under_faults_ends_as_the_undisturbed_one(tmp_path, monkeypatch):
    words = ["--texts", 220, "--batch-size", 4, "--batches-to-live", 12, 20, "--folder", tmp_path / "soak"]
    assert exit_of(soak, [*words, "--page", tmp_path / "page.md"], monkeypatch) is None
    page = (tmp_path / "page.md").read_text()
    figures = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in page.splitlines() if "|" in line}
    assert figures["texts"] == "220" and int(figures["processes killed on the way"]) >= 2
    assert all(figures[name] == "0" for name in ("lost", "duplicated", "out of order"))
    assert figures["different from the undisturbed run"] == "0"


def test_the_soak_test_sees_what_is_lost_doubled_out_of_order_and_different(tmp_path):
    lines = [json.dumps({"id": place, "summary": "x"}) for place in range(5)]
    (tmp_path / "undisturbed.jsonl").write_text("\n".join(lines))
    broken = [lines[0], lines[2], lines[1], lines[1], '{"id": 4, "summary": "y"}']
    (tmp_path / "disturbed.jsonl").write_text("\n".join(broken))
    found = soak.compare(tmp_path, 5)
    assert found == {"lost": 1, "duplicated": 1, "out_of_order": 1, "different": 4, "summaries": 5}
