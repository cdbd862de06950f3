"""`fairseq-el info --device cuda`: what the first person with a GPU runs."""

import json

import pytest
import torch
from cuda_models import kernels

from fairseq_el.cli import cuda_check, engine_info, info
from fairseq_el.cli.main import main
from fairseq_el.errors import UserError
from fairseq_el.kernels import fallback
from fairseq_el.models.costs import Machine
from simulated import SimulatedDevice
from simulated.triton import SimulatedKernels

SMALL = cuda_check.Sizes(heads=2, width=32, length=20, batches=(1, 3), repeats=2)
MACHINE = Machine(1e12, 1e11, 1e11)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(cuda_check, "measure_machine", lambda *arguments: MACHINE)
    monkeypatch.setattr(cuda_check, "TEXTS", 2)

    def run(choice: str = "triton"):
        with SimulatedDevice() as device, kernels(device, choice):
            return cuda_check.check(CUDA, SMALL)

    return run


def test_a_gpu_that_works(checked):
    found, problems = checked()
    assert found["kernels"] == "Triton" and found["demo"] == "2 of 2 summaries are the CPU's"
    assert found["host reads per step"] < 2
    assert set(found) >= {f"attention of a layer, {batch} x 20 tokens, beam 4" for batch in SMALL.batches}
    assert not [problem for problem in problems if "auto" not in problem]  # which the simulation can't be judged by


def test_without_triton(checked):
    found, problems = checked("torch")
    assert found["kernels"] == "torch" and problems[0].startswith("Triton's kernels can't be used")


def test_kernels_that_compute_something_else_are_a_problem(checked, monkeypatch):
    def wrong(self, queries, *arguments):
        context, _ = fallback.decoder_attention(queries, *arguments[:3], None, None)
        return context * 1.01

    monkeypatch.setattr(SimulatedKernels, "_attention", wrong)
    found, problems = cuda_check_kernels()
    assert "differ from torch in fp32" in problems[0]


def cuda_check_kernels():
    with SimulatedDevice() as device, kernels(device, "triton"):
        return cuda_check.check_kernels(CUDA, SMALL)


def test_a_machine_without_a_gpu_is_told_so():
    with pytest.raises(UserError, match="no GPU"):
        cuda_check.check(CUDA, SMALL)


def test_the_command_prints_it(monkeypatch, capsys):
    monkeypatch.setattr(engine_info, "machine", lambda: MACHINE)
    monkeypatch.setattr(info, "free_cores", lambda: None)
    monkeypatch.setattr(cuda_check, "check", lambda device: ({"GPU": "X"}, ["a problem"]))
    main(["info", "--device", "cuda", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["cuda"] == {"GPU": "X"} and report["problems"][0] == "a problem"
