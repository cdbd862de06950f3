"""The prediction for GPUs: counted right, timed right, fitted on the baseline alone, and near the paper's figures."""

import json
from collections import Counter
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch

from bench.tasks import QUICK_TASKS, paper_tasks
from gpu import model as gpu_model
from gpu import report as gpu_report
from gpu.counts import Generation, Phase, count_generation, count_phases
from gpu.model import V100, Efficiency, Workload
from helpers import ROOT
from simulated.costs import Kernel

RESULTS = json.loads((ROOT / "docs" / "results" / "gpu-model.json").read_text())
HALF_OF_ALL = Efficiency(launch=1e-5, arithmetic=0.5, bandwidth=0.5, beam_loop=0.0)


@pytest.mark.parametrize("system", ["baseline", "always", "triton"])
@pytest.mark.parametrize("task", QUICK_TASKS, ids=lambda task: task.name)
def test_layers_are_alike(task, system):
    """So what one and two of them cost tells what any number does."""
    three = replace(task, model=replace(task.model, layers=3))
    counted = count_generation(three, "beam", 2, 24, system, torch.float16)
    direct = count_phases(three, "beam", 2, 24, system, torch.float16, 3, True)
    for name, phase in zip(("source", "first", "early", "late"), direct):
        expected = getattr(counted, name)
        assert {k: n for k, n in expected.kernels.items() if n} == dict(phase.kernels) and expected.reads == phase.reads
        assert expected.peak == pytest.approx(phase.peak, rel=0.02)


def one_kernel(flops: int = 0, moved: int = 0) -> Workload:
    source, empty = Phase(Counter({Kernel("x", flops, moved): 1}), 0, 0), Phase(Counter(), 0, 0)
    return Workload.of(Generation(source, empty, empty, empty), [(9, 1.0)], 0)


def test_a_kernel_takes_as_long_as_its_launch_its_arithmetic_or_its_traffic():
    assert one_kernel().seconds(V100, "fp16", HALF_OF_ALL) == pytest.approx(1e-5)
    assert one_kernel(flops=112_000_000_000).seconds(V100, "fp16", HALF_OF_ALL) == pytest.approx(2e-3)
    assert one_kernel(moved=900_000_000).seconds(V100, "fp16", HALF_OF_ALL) == pytest.approx(2e-3)


def test_steps_of_a_batch_have_the_papers_mean_length():
    for task in paper_tasks()[:3]:
        for batch in (8, 64, 320):
            steps = gpu_model.unfinished(task, batch)
            assert sum(n * share for n, share in steps) == pytest.approx(gpu_model.LENGTHS[task.name][1], rel=0.02)
            assert sum(n for n, _ in steps) > gpu_model.LENGTHS[task.name][1]  # the longest output


def test_the_fit_finds_known_efficiencies():
    known = Efficiency(launch=2e-5, arithmetic=0.3, bandwidth=0.6, beam_loop=1e-4)
    rows = []
    for flops, moved, beam_steps in ((1e6, 1e4, 0), (1e11, 1e4, 0), (1e6, 1e9, 0), (1e6, 1e4, 100), (1e9, 1e7, 5)):
        work = Workload(*(np.full(50, x) for x in (flops, moved, 1.0, 1.0)), waits=3.0, beam_steps=beam_steps)
        rows.append((work, 32, 32 / work.seconds(V100, "fp16", known)))
    found = gpu_model.fit_efficiency(rows, "fp16")
    assert vars(found) == pytest.approx(vars(known), rel=0.05)


def test_predicted_speed_ups_are_near_the_papers():
    """None of which the fit has seen."""
    rows = RESULTS["table2"]["fp16"]
    assert len(rows) == 13
    assert fmean(abs(row["error"]) for row in rows) <= 0.25


def test_the_page_shows_the_results():
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert gpu_report.render(RESULTS) in page and "No GPU was used" in page
