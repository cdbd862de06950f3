"""A Ray cluster to work on: one that runs, or one on this machine for the duration of a job. Needs Ray."""

import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_el.errors import UserError
from fairseq_el.plugin.log_filters import stderr_in_file
from fairseq_el.resources import TREE

RELEASE = "2.60.0"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends no statistics
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
try:
    import pyarrow  # noqa: F401  (for `ray_engine`)
    import ray
    import ray.data
except ImportError as error:
    raise UserError(
        f"--engine ray needs Ray, which is not installed: pip install 'ray[data]=={RELEASE}'"
    ) from error

PATIENCE = 60  # seconds for a cluster to answer
OBJECT_STORE = 128 << 20  # bytes, of a local cluster: a batch has some ten thousand
FOLDER = "fairseq_el-ray"  # of a local cluster, followed by the process ID of its owner
LONGEST_FOLDER = 30  # characters of its path: the paths of Ray's sockets below it are limited to 107


# ---- connecting


@contextmanager
def connected(address: str | None, cores: int) -> Iterator[None]:
    """Joins a cluster, or starts one on this machine that ends with this process. cores: of the latter."""
    for name in ("ray", "ray.data"):  # each has its own level
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = new_folder()
    try:
        with stderr_in_file(folder / "start.log"):  # some messages can't be switched off
            start_or_join(address, cores, folder)
        # Ray reports dead workers on stdout; the engine does that itself.
        with (folder / "notices.log").open("w") as notices, redirect_stdout(notices):
            try:
                yield
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_or_join(address: str | None, cores: int, folder: Path) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address, **quiet)
            return
        # For this run alone; otherwise Ray writes one to the user's home.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Workers must run this copy of the code.
        paths = [str(TREE), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        ray.init(
            "local", num_cpus=cores, include_dashboard=False, _temp_dir=str(folder), object_store_memory=OBJECT_STORE,
            **quiet,
        )  # fmt: skip
    except Exception as error:  # Ray raises many kinds
        reason = " ".join(str(error).split())[:300]
        what = f"the Ray cluster at {address} could not be joined" if address else "Ray could not be started here"
        raise UserError(f"{what}: correct that, or leave out --engine ray ({reason})") from error


def new_folder() -> Path:
    """A folder for a local cluster. Removes those whose owner was killed."""
    parent = Path(tempfile.gettempdir())
    parent = parent if len(str(parent)) <= LONGEST_FOLDER else Path("/tmp")
    for old in parent.glob(f"{FOLDER}.*"):
        owner = old.name.split(".")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER}.{os.getpid()}.", dir=parent))


def check_address(address: str) -> None:
    """Raises a `UserError` unless a cluster answers. Another process tries first: Ray waits for minutes, and can't be
    interrupted."""
    advice = "give the address of its head, such as 10.0.0.1:6379, on one of its machines; there, auto finds it"
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and "/" not in address and port.isdecimal()):
        raise UserError(f"--ray-address {address} is not the address of a Ray cluster: {advice}")
    try:
        if host:
            socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE / 6).close()
        trial = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"
        found = subprocess.run(
            [sys.executable, "-c", trial, address], capture_output=True, text=True, timeout=PATIENCE
        )
        reason = found.stderr.strip().rpartition("\n")[2] if found.returncode else ""
        if reason and "AuthToken" in found.stderr:
            reason = "it wants its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    except (OSError, OverflowError) as error:
        reason = str(error)
    except subprocess.TimeoutExpired:
        reason = f"no answer in {PATIENCE} seconds"
    if reason:
        raise UserError(f"no Ray cluster of release {RELEASE} answers at {address}: {advice} ({reason[:300]})")


# ---- how many workers


@dataclass(frozen=True)
class Pool:
    workers: int
    cores: int  # of each
    gpus: int  # of each
    memory: int = 0  # bytes that a machine must have free for each; 0 for no requirement


def pool_for(nodes: list[dict[str, float]], workers: int | None, model_bytes: int, cpu: bool) -> Pool:
    """nodes: the resources of each machine of the cluster; workers: how many, None for as many as fit."""
    gpus = 0 if cpu else int(sum(node.get("GPU", 0) for node in nodes))
    if gpus:
        check_room(workers, gpus, "GPUs")
        return Pool(workers or gpus, 1, 1)
    cores = [int(node.get("CPU", 0)) for node in nodes]
    check_room(workers, sum(cores), "cores")
    need = 0
    if workers is None:
        need = 2 * model_bytes + (1 << 30)  # weights twice while they are loaded, and a batch
        workers = sum(min(count, int(node.get("memory", 0) // need)) for count, node in zip(cores, nodes))
        workers, need = (workers, need) if workers else (1, 0)
    # the most cores per worker with which all workers find a machine
    share = max(c for c in range(1, max(cores) + 1) if sum(count // c for count in cores) >= workers)
    return Pool(workers, share, 0, need)


def check_room(workers: int | None, most: int, what: str) -> None:
    if not most or (workers or 0) > most:
        raise UserError(f"the cluster has {most:,} {what}: ask for at most as many --workers, or start more machines")
