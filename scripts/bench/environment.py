"""Where the benchmark runs: the machine, the versions, and the environment of the systems it
compares with."""

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
PEERS = BUILD / "venv-peers"


def peers_python() -> str:
    return str(PEERS / "bin" / "python")


def peer_requirements() -> list[str]:
    """The exact versions in pyproject.toml. With torch among them, pip keeps to it."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["peers"]


def ensure_peers() -> None:
    """Makes the environment of the peers unless it is there with these very versions.

    It is separate because their dependencies need not suit fairseq's.
    """
    wanted = "\n".join(peer_requirements())
    stamp = PEERS / "requirements.txt"  # written last: its presence means that all went well
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing the systems to compare with into {PEERS.relative_to(ROOT)}", flush=True)
    venv.create(PEERS, clear=True, with_pip=True)
    subprocess.run(
        [peers_python(), "-m", "pip", "install", "--quiet", *peer_requirements()], check=True
    )
    stamp.write_text(wanted)


def describe(loaded: dict[str, Any]) -> dict[str, Any]:
    """Machine, versions, commit, date and command of a run, for its results."""
    versions = {"python": platform.python_version()}
    for worker in loaded.values():
        versions |= worker["versions"]
    return {
        "machine": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["scripts/benchmark.py", *sys.argv[1:]]),
    }


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
    """The commit of the source tree, marked where files differ from it; "unknown" outside a
    repository. Pages don't count: the experiments of one run write them in turn."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    name = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return f"{name or 'unknown'}{'-dirty' * bool(changed)}"
