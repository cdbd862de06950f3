"""What the engine does on this machine and with a model: kernels, measured peaks, precision and form of attention."""

import functools
import os
import shutil
import subprocess
from typing import Any

import torch

from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.kernels import build, packing
from fairseq_el.kernels.weights import FP16
from fairseq_el.models import costs, policy

BEAM, STEPS, LONGEST_SOURCE, BATCHES = 4, 64, 1024, (1, 8, 32)  # typical of summaries of news
COMPILERS = ("c++", "g++", "clang++")


def describe_kernels() -> tuple[dict[str, Any], str | None]:
    """The state of the compiled kernels, and the problem with its remedy if there is one."""
    if os.environ.get(build.OFF) == "0":
        return {"state": "switched off"}, f"{build.OFF}=0 switches the kernels off, torch is slower: unset {build.OFF}"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        remedy = "install g++ or clang++, or name a compiler in CXX"
        return {"state": "not compiled"}, f"there is no C++ compiler for the kernels, torch is slower: {remedy}"
    try:
        file = build.compiled_library()
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"the kernels were not compiled, torch is slower ({error}): name another compiler in CXX"
        return {"state": "not compiled", "compiler": compiler}, problem
    found = {"compiler": compiler_version(compiler), "file": str(file)}
    if build.library() is None:
        problem = f"the kernels fail their check, torch is slower: name another compiler than {compiler} in CXX"
        return {"state": "compiled, but the results differ from torch's", **found}, problem
    return {"state": "compiled, results checked against torch's", **found}, None


def compiler_version(compiler: str) -> str:
    try:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    return said.partition("\n")[0] or compiler


def cpu_flags() -> set[str]:
    return set(build.cpu_features().split())


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def machine() -> costs.Machine:
    return costs.measure_machine(device(), torch.float32, BEAM)


def describe_peaks() -> dict[str, Any]:
    return {
        "device": str(device()),
        "matrix products (GFLOP/s)": round(machine().flops_per_second / 1e9, 1),
        "EL-attention (GFLOP/s)": round(machine().el_flops_per_second / 1e9, 1),
        "memory (GB/s)": round(machine().bytes_per_second / 1e9, 1),
    }


def describe_model(name: str) -> dict[str, Any]:
    """name: what `--model` takes."""
    files = ModelFiles.find(name)
    state = files.load_state()
    settings = state["cfg"].model
    weights = {name: weight for name, weight in state["model"].items() if not name.endswith(".version")}
    layers = [weight for name, weight in weights.items() if is_linear(name, weight)]
    return {
        "checkpoint": str(files.checkpoint.resolve()),
        "architecture": str(getattr(settings, "arch", None) or getattr(settings, "_name", None)),
        "parameters": sum({weight.data_ptr(): weight.numel() for weight in weights.values()}.values()),
        "precision": precision(layers),
        **attention_forms(settings, is_language_model=not any(name.startswith("encoder.") for name in weights)),
    }


def is_linear(name: str, weight: torch.Tensor) -> bool:
    return name.endswith("weight") and weight.dim() == 2 and weight.is_floating_point() and ".embed_" not in name


def precision(layers: list[torch.Tensor]) -> str:
    """Of the packed weights of linear layers on a CPU. Sums are in single precision in any case."""
    if device().type != "cpu":
        return "as in the checkpoint, or fp16 with --fp16"
    kinds = [packing.choose_kind([weight.float()], "auto") for weight in layers]
    half = sum(kind == FP16 for kind in kinds)
    if half == len(kinds):
        return f"fp16 in memory, which is exact for all {half} linear layers; fp32 arithmetic"
    if half == 0:
        return f"fp32 ({len(kinds)} linear layers)"
    return f"fp16 in memory for {half} linear layers, where it is exact, fp32 for {len(kinds) - half}; fp32 arithmetic"


def attention_forms(settings: Any, is_language_model: bool) -> dict[str, str]:
    """The form that --el-attention auto chooses, by batch size."""
    heads, width = int(settings.decoder_attention_heads), int(settings.decoder_embed_dim)
    limit = getattr(settings, "max_target_positions" if is_language_model else "max_source_positions", None)
    length = min(LONGEST_SOURCE, int(limit or LONGEST_SOURCE))
    found = {}
    for batch in BATCHES:
        shape = costs.Shape(batch, BEAM, length, heads, width)
        label = f"attention, {batch} x {length} tokens, beam {BEAM}"
        found[label] = prompt_form(shape) if is_language_model else source_form(shape)
    return found


def prompt_form(shape: costs.Shape) -> str:
    return "K and V of the prompt" if policy.AttentionPolicy().prefers_key_values(shape, machine) else "EL-attention"


def source_form(shape: costs.Shape) -> str:
    """Runs the policy over an output of a typical length."""
    attention_policy, state = policy.AttentionPolicy(), policy.PolicyState(expected_steps=STEPS)
    for step in range(1, STEPS + 1):
        if attention_policy.wants_key_values(shape, machine, state):
            return "K and V from the first step" if step == 1 else f"EL-attention, K and V from step {step}"
    return "EL-attention"
