"""Where the benchmark runs: the machine, the versions, and the environments of the systems that it compares with."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent
ROOT = SCRIPTS.parent
BUILD = ROOT / "build" / "benchmark"
GROUP = "peer-"  # of dependency-groups in pyproject.toml
# optimum-intel asks for torchvision, which text doesn't need and whose build on PyPI doesn't fit torch's for CPUs.
UNWANTED = "torchvision"


def peer_python(environment: str) -> str:
    return str(BUILD / "environments" / environment / "bin" / "python")


def peer_requirements(environment: str) -> list[str]:
    """The exact versions in pyproject.toml. With torch among them, pip keeps to it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return groups[GROUP + environment]


def ensure_environment(environment: str) -> None:
    """Makes the environment of a peer unless it is there with these very versions.

    Each has its own: their requirements suit neither fairseq's nor each other's.
    """
    wanted = "\n".join(peer_requirements(environment))
    folder = BUILD / "environments" / environment
    stamp = folder / "requirements.txt"  # written last: its presence means that all went well
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing {environment} into {folder.relative_to(ROOT)}", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = [peer_python(environment), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, "install", *peer_requirements(environment)]).returncode:
        sys.exit(f"benchmark: {environment} could not be installed; --only measures without it")
    subprocess.run([*pip, "uninstall", "--yes", UNWANTED], check=True, stderr=subprocess.DEVNULL)
    stamp.write_text(wanted)


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
    """The processor's name and its widest vector instructions, which decide how fast it
    multiplies."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "no AVX")
    return f"{facts.get('model name', platform.machine())} ({widest})"


def commit() -> str:
    """The last commit that changed code, marked where files differ from it; "unknown" outside a repository.

    Pages and results don't count: a run that goes on after its first results were committed is still of one code.
    """
    code = ("--", ".", ":!docs", ":!*.md")

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    name = git("log", "-1", "--format=%h", "--abbrev=10", *code)
    changed = git("status", "--porcelain", "--untracked-files=no", *code)
    return f"{name or 'unknown'}{'-dirty' * bool(changed)}"
