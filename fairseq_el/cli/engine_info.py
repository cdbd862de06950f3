"""What the engine does on this machine and with a model: kernels, measured peaks, precision and form of attention."""

import functools
import os
from typing import Any

import torch

from fairseq_el.checkpoints import packed_file
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.kernels import build, packing
from fairseq_el.kernels.weights import FP16
from fairseq_el.models import costs, policy

BEAM, STEPS, LONGEST_SOURCE, BATCHES = 4, 64, 1024, (1, 8, 32)  # typical of summaries of news


def describe_kernels() -> tuple[dict[str, Any], str | None]:
    """The kernels in use and why they were chosen, and the problem with its remedy if there is one."""
    kernels, problem = build.load()
    if kernels is not None:
        found = {"state": "results checked against torch's", "variant": kernels.variant, "because": kernels.reason}
        return found | {"file": str(kernels.file)}, None
    if os.environ.get(build.VARIABLE) == build.OFF:
        remedy = f"unset {build.VARIABLE}"
    elif "no C++ compiler was found" in problem:
        remedy = "install g++ or clang++, or name a compiler in CXX"
    else:
        remedy = "name another compiler in CXX"
    return {"state": "not in use"}, f"{problem}, torch is slower: {remedy}"


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
    if packed_file.is_packed(state["model"]):
        file = packed_file.find([files.checkpoint], state["model"])
        is_language_model = "language_modeling" in str(state["cfg"].task._name)
        return {
            "checkpoint": str(files.checkpoint.resolve()),
            "architecture": str(getattr(settings, "arch", None) or getattr(settings, "_name", None)),
            "precision": f"{file.contents['precision']}, packed (version {file.version} of the format)",
            **attention_forms(settings, is_language_model),
        }
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
