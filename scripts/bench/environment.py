"""Where and in what the benchmark runs: the machine, the systems that are compared, and the environments of peers."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.checkpoints import Checkpoint

SCRIPTS = Path(__file__).resolve().parent.parent
ROOT = SCRIPTS.parent
BUILD = ROOT / "build" / "benchmark"
GROUP = "peer-"  # of dependency-groups in pyproject.toml
# optimum-intel asks for torchvision, which text doesn't need and whose build on PyPI doesn't fit torch's for CPUs.
UNWANTED = "torchvision"
# What the numbers depend on. Pages, tests and documents may change between a run and the next that continues it.
MEASURED_CODE = (
    "fairseq_el", "configs", "demo", "setup.py", "scripts/bench", "scripts/make_checkpoint.py", ":!*.md",
    *(f":!scripts/bench/{name}.py" for name in ("pages", "paper", "plots", "report")),
)  # fmt: skip


# ---- systems


@dataclass(frozen=True)
class SystemKind:
    """A peer has an `environment` of its own, and the `form` of weights that `checkpoints.py` makes for it.

    exact: the system of the same library that computes in single precision; None where this is that system.
    """

    name: str
    title: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    exact: str | None = None
    form: str | None = None

    @property
    def environment(self) -> str | None:
        return self.form.partition("-")[0] if self.form else None

    @property
    def is_ours(self) -> bool:
        return self.options.get("precision") is not None

    def worker_options(self, checkpoint: "Checkpoint | None") -> dict[str, Any]:
        """Paths are relative to the source tree, so that results show commands that run anywhere."""
        if checkpoint is None:
            return self.options
        facts = {"language_model": checkpoint.is_language_model, "vocabulary": checkpoint.vocabulary}
        if self.form:
            return facts | {"model": relative(checkpoint.converted(self.form))} | self.options
        return facts | {"checkpoint": relative(checkpoint.model), "data": relative(checkpoint.folder)} | self.options

    def command(self, checkpoint: "Checkpoint | None") -> list[str]:
        python = relative(peer_python(self.environment)) if self.environment else sys.executable
        return [python, "-m", self.module, json.dumps(self.worker_options(checkpoint))]


def relative(path: Path) -> str:
    return os.path.relpath(path, ROOT)


FAIRSEQ, GENERATE, CT2 = "bench.worker_fairseq", "bench.worker_transformers", "bench.worker_ctranslate2"
EXACT, BF16, INT8 = "el", "el-bf16", "el-int8"
OURS = (EXACT, BF16, INT8)


def peer(name: str, title: str, form: str, exact: str | None = None, **options: Any) -> SystemKind:
    library = form.partition("-")[0]
    if library == "ctranslate2":
        return SystemKind(name, title, CT2, options, exact, form)
    return SystemKind(name, title, GENERATE, {"library": library, **options}, exact, form)


SYSTEMS = {
    kind.name: kind
    for kind in (
        SystemKind("stock", "stock fairseq", FAIRSEQ),
        SystemKind("stock-copied", "stock fairseq, cache copied per beam", FAIRSEQ, {"copied": True}),
        SystemKind("stock-fp16", "stock fairseq `--fp16`", FAIRSEQ, {"half": True}, "stock"),
        SystemKind(EXACT, "fairseq_el", FAIRSEQ, {"precision": "auto"}),
        SystemKind("el-fp32", "fairseq_el, fp32 weights", FAIRSEQ, {"precision": "fp32"}),
        SystemKind(BF16, "fairseq_el bf16", FAIRSEQ, {"precision": "bf16"}, EXACT),
        SystemKind(INT8, "fairseq_el int8", FAIRSEQ, {"precision": "int8"}, EXACT),
        peer("transformers", "Transformers float32", "transformers", dtype="float32"),
        peer("transformers-bf16", "Transformers bf16", "transformers", "transformers", dtype="bfloat16"),
        peer("transformers-compile", "Transformers float32, torch.compile", "transformers", dtype="float32",
             compile=True),
        peer("ctranslate2", "CTranslate2 float32", "ctranslate2-float32", compute_type="float32"),
        peer("ctranslate2-int8", "CTranslate2 int8", "ctranslate2-int8", "ctranslate2", compute_type="int8"),
        peer("ctranslate2-workers", "CTranslate2 float32, 2 workers", "ctranslate2-float32", compute_type="float32",
             workers=2),
        peer("ctranslate2-int8-workers", "CTranslate2 int8, 2 workers", "ctranslate2-int8", "ctranslate2",
             compute_type="int8", workers=2),
        peer("openvino", "OpenVINO default (bf16 where the CPU has it)", "openvino", "openvino-f32"),
        peer("openvino-f32", "OpenVINO float32", "openvino", hints={"INFERENCE_PRECISION_HINT": "f32"}),
        peer("openvino-int8", "OpenVINO 8-bit weights", "openvino-int8", "openvino-f32"),
        peer("onnxruntime", "ONNX Runtime float32", "onnxruntime"),
        peer("onnxruntime-int8", "ONNX Runtime int8", "onnxruntime-int8", "onnxruntime"),
        SystemKind("operations", "operations", "bench.operations"),
    )
}  # fmt: skip


# ---- environments


def peer_python(environment: str) -> Path:
    return BUILD / "environments" / environment / "bin" / "python"


def peer_requirements(environment: str) -> list[str]:
    """The exact versions in pyproject.toml. With torch among them, pip keeps to it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return groups[GROUP + environment]


def is_installed(environment: str) -> bool:
    """With these very versions. The file is written last: its presence means that all went well."""
    stamp = BUILD / "environments" / environment / "requirements.txt"
    return stamp.exists() and stamp.read_text() == "\n".join(peer_requirements(environment))


def ensure_environment(environment: str) -> None:
    """Each peer has its own: their requirements suit neither fairseq's nor each other's."""
    if is_installed(environment):
        return
    folder, python = BUILD / "environments" / environment, peer_python(environment)
    print(f"installing {environment} into {relative(folder)}", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, "install", *peer_requirements(environment)]).returncode:
        sys.exit(f"benchmark: {environment} could not be installed; --only measures without it")
    subprocess.run([*pip, "uninstall", "--yes", UNWANTED], check=True, stderr=subprocess.DEVNULL)
    (folder / "requirements.txt").write_text("\n".join(peer_requirements(environment)))


# ---- the machine


def describe(versions: dict[str, str] | None = None) -> dict[str, Any]:
    """Machine, versions, commit, date and command of a run, for its results."""
    return {
        "machine": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()} | (versions or {}),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_name() -> str:
    """The processor's name and its widest vector instructions, which decide how fast it multiplies."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "no AVX")
    return f"{facts.get('model name', platform.machine())} ({widest})"


def commit() -> str:
    """The last commit that changed what is measured, marked where files differ from it; "unknown" without git."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", *MEASURED_CODE]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    name = git("log", "-1", "--format=%h", "--abbrev=10")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{name or 'unknown'}{'-dirty' * bool(changed)}"
