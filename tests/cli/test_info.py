"""`fairseq-el info`: what is true of this machine and a model, and what to do about problems."""

import json
import os
import platform

import pytest
import torch

from fairseq_el.cli import engine_info, info
from fairseq_el.cli.main import main
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.kernels import build
from fairseq_el.models import costs
from helpers import DEMO, run_command

FAST = costs.Machine(flops_per_second=200e9, bytes_per_second=20e9, el_flops_per_second=150e9)


@pytest.fixture
def report(monkeypatch, capsys):
    """The report as JSON, of a machine whose peaks are known and whose cores are free."""
    monkeypatch.setattr(engine_info, "machine", lambda: FAST)
    monkeypatch.setattr(info, "free_cores", lambda: float(os.cpu_count()))

    def run(*words):
        main(["info", "--json", *map(str, words)])
        return json.loads(capsys.readouterr().out)

    return run


def test_the_machine_is_described_as_it_is(report):
    found = report()
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads of torch"] == torch.get_num_threads()
    assert found["machine"]["cores for this process"] == len(os.sched_getaffinity(0))
    assert found["peaks"]["matrix products (GFLOP/s)"] == 200
    assert "model" not in found


def test_features_are_those_that_torch_finds(report):
    features = report()["machine"]["features"]
    capability = torch.backends.cpu.get_cpu_capability()
    assert ("AVX2" in features) == (capability in ("AVX2", "AVX512"))
    assert ("AVX-512" in features) == (capability == "AVX512")


def test_the_kernels_in_use_are_named(report):
    kernels = report()["kernels"]
    if build.library() is None:
        assert kernels == {"state": "not in use"}
    else:
        assert kernels["state"] == "results checked against torch's"
        assert kernels["variant"] in (*build.supported_variants(), build.NATIVE, os.environ.get(build.VARIABLE))
        assert kernels["file"] == build.library()._name


def test_the_model_is_described_as_it_is_loaded(report):
    model = report("--model", "demo")["model"]
    loaded = Summarizer.load("demo", "demo", stock=True).generator.model.single_model
    assert model["parameters"] == sum(parameter.numel() for parameter in loaded.parameters())
    assert model["checkpoint"] == str(DEMO / "model.pt")
    if build.library() is not None:  # the demo's weights are stored in half precision
        assert model["precision"].startswith("fp16 in memory, which is exact for all")


def test_attention_follows_the_policy(monkeypatch):
    """Where EL-attention's products are fast nothing else is worth building; where they are slow, K and V are."""
    shape = costs.Shape(batch=8, beam=4, length=1024, heads=16, width=1024)
    for el_flops, expected in ((1e15, "EL-attention"), (1e9, "K and V from the first step")):
        machine = costs.Machine(200e9, 20e9, el_flops)
        monkeypatch.setattr(engine_info, "machine", lambda machine=machine: machine)
        assert engine_info.source_form(shape) == expected


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        (build.VARIABLE, "off", "unset FAIRSEQ_EL_KERNELS"),
        ("CXX", "no-such-compiler", "name another compiler in CXX"),
        ("PATH", "", "install g++ or clang++, or name a compiler in CXX"),
    ],
)
def test_missing_kernels_are_a_problem_with_a_remedy(monkeypatch, tmp_path, variable, value, problem):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is compiled yet
    monkeypatch.setenv(build.VARIABLE, build.NATIVE)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(build, "load", build.load.__wrapped__)  # as in a new process
    found, said = engine_info.describe_kernels()
    assert found == {"state": "not in use"} and said.endswith(f"torch is slower: {problem}")


def test_kernels_that_disagree_are_a_problem(monkeypatch):
    monkeypatch.setattr(build, "agrees_with_torch", lambda kernels: False)
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    found, said = engine_info.describe_kernels()
    assert found == {"state": "not in use"} and "compute wrong results" in said


def test_few_or_busy_cores_little_memory_and_missing_packages_are_problems(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(info, "container_cores", lambda: None)
    assert info.core_problems(2, 8.0) == []
    assert "one core only" in info.core_problems(1, 8.0)[0]
    assert "torch uses 2 of 8 cores: unset OMP_NUM_THREADS, or give --threads 8" in info.core_problems(8, 8.0)[0]
    assert info.core_problems(2, 3.0)[0].endswith("stop them, or give --threads 3")
    monkeypatch.setattr(info, "container_cores", lambda: 1.5)
    assert "the container may use 1.5 cores" in info.core_problems(2, None)[0]
    assert info.memory_problems({"MemAvailable": 3 << 30}) == []
    assert "only 1 GiB of memory" in info.memory_problems({"MemAvailable": 1 << 30})[0]
    monkeypatch.setattr(info.util, "find_spec", lambda name: None)
    assert [said.split("pip install ")[1] for said in info.missing_packages()] == [
        "'fairseq_el[demo]'", "'fairseq_el[demo]'", "'fairseq_el[data]'", "'fairseq_el[ray]'",
    ]  # fmt: skip


def test_the_table_has_all_that_the_json_has(report, monkeypatch, capsys):
    found = report("--model", DEMO)
    main(["info", "--model", str(DEMO)])
    text = capsys.readouterr().out
    for title in found:
        assert f"{title}\n  " in text
    assert "problems\n  " in text and found["model"]["precision"] in text


def test_a_model_that_is_not_there_is_one_line():
    done = run_command("fairseq-el", "info", "--model", "nowhere")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("info: error: there is no checkpoint nowhere")
