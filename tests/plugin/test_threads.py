"""Threads that share the machine: libgomp's spinning, and a warning where others take the cores."""

import os
import subprocess
import sys

import pytest

from fairseq_el.plugin import threads
from helpers import ROOT

STAT = """cpu  900 0 100 5000 0 0 0 0 0 0
cpu0 300 50 50 2000 70 10 20 0 0 0
cpu1 600 0 50 3000 0 0 0 0 0 0
intr 12345
ctxt 678
"""


def test_busy_time_is_that_of_the_cores_of_this_process():
    tick = os.sysconf("SC_CLK_TCK")
    assert threads.busy_seconds(STAT, {0}) == pytest.approx(430 / tick)  # without waiting for disks
    assert threads.busy_seconds(STAT, {0, 1}) == pytest.approx(1080 / tick)
    assert threads.busy_seconds(STAT, {7}) == 0


@pytest.mark.parametrize(("count", "free", "advice"), [(2, 2.0, None), (2, 1.4, None), (2, 1.0, 1), (2, 0.0, 1),
    (64, 63.0, None), (64, 30.2, 30), (1, 0.1, None), (2, None, None)])  # fmt: skip
def test_a_run_is_crowded_only_if_clearly_so(count, free, advice):
    said = threads.describe_crowding(count, free)
    assert said is None if advice is None else f"--threads {advice} suits better" in said


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/stat")
def test_another_process_takes_a_core_and_this_one_does_not_count(monkeypatch):
    monkeypatch.undo()
    at = iter([threads.CpuTime(0.0, 10.0, 100.0), threads.CpuTime(2.0, 11.0, 104.0)])
    monkeypatch.setattr(threads.CpuTime, "now", classmethod(lambda cls: next(at)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert threads.free_cores(threads.CpuTime.now()) == pytest.approx(0.5)  # 4 seconds of 2, of which 1 was our own
    monkeypatch.undo()
    assert threads.CpuTime.now() is not None


def spin_count(**environment: str) -> str:
    code = "import fairseq_el, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    kept = {name: value for name, value in os.environ.items() if name not in threads.CHOSEN_BY_USER}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_spinning_is_limited_unless_the_user_has_chosen():
    assert spin_count() == str(threads.SPIN_COUNT)
    assert spin_count(GOMP_SPINCOUNT="77") == "77"
    assert spin_count(OMP_WAIT_POLICY="ACTIVE") == "None"
