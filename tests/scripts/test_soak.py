"""scripts/soak.py, small: killed again and again, short of memory, a job loses nothing."""

import ctypes
import io
import json

import pytest
from tqdm import tqdm

import soak  # scripts/soak.py
from fairseq_el.jobs.inputs import Texts
from fairseq_el.jobs.run import Finished, Run
from fairseq_el.jobs.shards import Shard
from helpers import exit_of


def test_a_job_under_faults_ends_as_the_undisturbed_one(tmp_path, monkeypatch):
    words = ["--texts", 220, "--batch-size", 4, "--batches-to-live", 12, 20, "--folder", tmp_path / "soak"]
    assert exit_of(soak, [*words, "--page", tmp_path / "page.md"], monkeypatch) is None
    page = (tmp_path / "page.md").read_text()
    figures = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in page.splitlines() if "|" in line}
    assert figures["texts"] == "220" and int(figures["processes killed on the way"]) >= 2
    assert all(figures[name] == "0" for name in ("lost", "duplicated", "out of order"))
    assert figures["different from the undisturbed run"] == "0"


def test_the_soak_test_sees_what_is_lost_doubled_out_of_order_and_different(tmp_path):
    lines = [json.dumps({"id": number, "summary": "x"}) for number in range(5)]
    (tmp_path / "undisturbed.jsonl").write_text("\n".join(lines))
    broken = [lines[0], lines[2], lines[1], lines[1], '{"id": 4, "summary": "y"}']
    (tmp_path / "disturbed.jsonl").write_text("\n".join(broken))
    found = soak.compare(tmp_path, 5)
    assert found == {"lost": 1, "duplicated": 1, "out_of_order": 1, "different": 4, "summaries": 5}


class Nothing:
    """An engine with nothing to do."""

    def parts(self, number, window, done):
        return iter(())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another malloc than glibc's")
def test_memory_that_was_freed_goes_back_to_the_system_after_each_window(tmp_path):
    """A hundred million bytes in small blocks, of which the last stays and would keep glibc from shrinking the heap."""
    (tmp_path / "in.txt").write_text("\n\n\n\n")
    texts = Texts(str(tmp_path / "in.txt"), False, None)
    run = Run(Nothing(), None, Finished(None, 2), tqdm(file=io.StringIO()), "abort")
    blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
    summaries = run.over(texts, 2, Shard())
    assert [summary for _, summary in (next(summaries), next(summaries))] == [[], []]
    del blocks[:-1]
    before = soak.resident_bytes()
    next(summaries)  # of the second window
    assert soak.resident_bytes() < before - 50_000_000
