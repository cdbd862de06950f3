"""Shows what this machine offers, and problems with their remedies: `fairseq-el info`."""

import argparse
import json
import logging
import os
import platform
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from fairseq_el import __version__
from fairseq_el.cli import cuda_check, engine_info
from fairseq_el.cli.fairseq_command import human_size
from fairseq_el.plugin import threads
from fairseq_el.text.rouge import available_cores

FEATURES = {
    "AVX2": {"avx2"},
    "AVX-512": {"avx512f"},
    "VNNI (int8)": {"avx512_vnni", "avx_vnni"},
    "BF16": {"avx512_bf16", "amx_bf16", "bf16"},
    "NEON": {"asimd"},
}
GIB = 1 << 30
LITTLE_MEMORY = 2 * GIB
BUSY = 0.25  # share of the cores that other processes may take without a word
OPTIONAL = {
    "sentencepiece": ("demo", "models with a sentencepiece.model, such as the demo"),
    "rouge_score": ("demo", "ROUGE"),
    "pyarrow": ("data", "fairseq-el prepare on parquet and arrow files"),
    "ray": ("ray", "--engine ray"),
}


def main(args: argparse.Namespace) -> None:
    """args: of `options.info`."""
    logging.getLogger("fairseq_el").setLevel(logging.ERROR)  # the report says what the warnings would
    report = collect(args.model)
    if args.device is not None:
        report["cuda"], problems = cuda_check.check(torch.device(args.device, 0))
        report["problems"] = problems + report.pop("problems")
    print(json.dumps(report, indent=2) if args.json else as_text(report))


def collect(model: str | None) -> dict[str, Any]:
    """Sections by name; `problems` is a list of lines."""
    free = free_cores()  # before this process is busy itself
    cores, memory = available_cores(), memory_bytes()
    kernels, kernel_problem = engine_info.describe_kernels()
    report: dict[str, Any] = {
        "versions": versions(),
        "machine": describe_machine(cores, memory),
        "kernels": kernels,
        "peaks": engine_info.describe_peaks(),
    }
    if model is not None:
        report["model"] = engine_info.describe_model(model)
    problems = [kernel_problem] if kernel_problem else []
    report["problems"] = problems + core_problems(cores, free) + memory_problems(memory) + missing_packages()
    return report


# ---- facts


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("fairseq", "fairseq-fixed"):  # two distributions of the same package
        try:
            found["fairseq"] = f"{metadata.version(name)} ({name})"
        except metadata.PackageNotFoundError:
            continue
    return found | {"fairseq_el": __version__}


def describe_machine(cores: int, memory: dict[str, int]) -> dict[str, Any]:
    flags = engine_info.cpu_flags()
    features = [name for name, any_of in FEATURES.items() if flags & any_of]
    found: dict[str, Any] = {
        "CPU": cpu_name(),
        "features": features,
        "cores": os.cpu_count(),
        "cores for this process": cores,
        "threads of torch": torch.get_num_threads(),
    }
    if memory:
        found["memory (GiB)"] = round(memory["MemTotal"] / GIB, 1)
        found["memory available (GiB)"] = round(memory["MemAvailable"] / GIB, 1)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return found | {"GPU": [torch.cuda.get_device_name(i) for i in range(count)]}


def cpu_name() -> str:
    for line in read_system_file("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> dict[str, int]:
    """MemTotal and MemAvailable; empty where the system does not say."""
    lines = (line.split() for line in read_system_file("/proc/meminfo").splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[0] in ("MemTotal:", "MemAvailable:")}


def free_cores(seconds: float = 0.3) -> float | None:
    """How many cores are idle while this process waits; None where the system does not say."""
    before = threads.CpuTime.now()
    time.sleep(seconds)
    return threads.free_cores(before)


def read_system_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


# ---- problems: what is wrong, and what to do


def core_problems(cores: int, free: float | None) -> list[str]:
    found = []
    threads, limit = torch.get_num_threads(), container_cores()
    if cores == 1:
        found.append("this process may use one core only: allow it more (taskset, or the job's or container's limits)")
    elif threads < cores:
        found.append(f"torch uses {threads} of {cores} cores: unset OMP_NUM_THREADS, or give --threads {cores}")
    if limit is not None and limit < threads:
        found.append(
            f"the container may use {limit:.1f} cores, but torch has {threads} threads: give --threads "
            f"{max(1, int(limit))}"
        )
    if free is not None and free < (1 - BUSY) * (os.cpu_count() or 1):
        found.append(
            f"other processes keep the cores busy, {free:.1f} of {os.cpu_count()} are free and measured peaks too low: "
            f"stop them, or give --threads {max(1, int(free))}"
        )
    return found


def container_cores() -> float | None:
    """The CPU limit of the container (cgroup v2); None if there is none."""
    words = read_system_file("/sys/fs/cgroup/cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def memory_problems(memory: dict[str, int]) -> list[str]:
    available = memory.get("MemAvailable", LITTLE_MEMORY)
    if available >= LITTLE_MEMORY:
        return []
    return [
        f"only {human_size(available)} of memory are available: stop other processes, or give a smaller --max-tokens"
    ]


def missing_packages() -> list[str]:
    return [
        f"{package} is not installed, which {use} needs: pip install 'fairseq_el[{extra}]'"
        for package, (extra, use) in OPTIONAL.items()
        if util.find_spec(package) is None
    ]


# ---- printing


def as_text(report: dict[str, Any]) -> str:
    blocks = []
    for title, content in report.items():
        if isinstance(content, dict):
            width = max(map(len, content))
            lines = [f"{name:<{width}}  {as_cell(value)}" for name, value in content.items()]
        else:
            lines = content or ["none"]
        blocks.append("\n".join([title, *(f"  {line}" for line in lines)]))
    return "\n\n".join(blocks)


def as_cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
