"""Compiles the kernels in `cpp/` for this machine, checks them against torch, and loads them.

Compilation takes four seconds at first use; the library is kept in the user's cache folder. Without a compiler, or if a
result doesn't agree with torch's, `library` returns None, and `ops` falls back to torch.
"""

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).with_name("cpp").iterdir())
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-Wno-psabi"]
OFF = "FAIRSEQ_EL_NATIVE"
"""Environment variable; 0 turns the kernels off."""

POINTER, NUMBER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "decoder_attention": (
        [POINTER] * 2 + [NUMBER] * 4 + [FLOAT, POINTER, POINTER, NUMBER] + [POINTER] * 5 + [NUMBER] * 2
    ),
    "el_attention": [POINTER] * 2 + [NUMBER] * 4 + [POINTER] * 2 + [NUMBER],
    "varlen_attention": [POINTER] * 3 + [NUMBER] * 3 + [FLOAT],
    "linear": [POINTER] * 4 + [NUMBER] * 3,
    "packed_gemm": [POINTER] * 2 + [NUMBER] + [POINTER] * 2 + [NUMBER] * 5,
    "logsumexp": [POINTER] * 2 + [NUMBER] * 2,
}
"""Arguments of `fairseq_el_<name>`, as in the C++ sources."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None if they can't be used; determined once per process."""
    if os.environ.get(OFF) == "0":
        return None
    try:
        compiled = declare(ctypes.CDLL(str(compiled_library())))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.warning(f"falling back to torch (slower): the C++ kernels could not be compiled ({error})")
        return None
    if agrees_with_torch(compiled):
        return compiled
    logger.warning("falling back to torch (slower): the C++ kernels compute wrong results on this machine")
    return None


def compiled_library() -> Path:
    """Path of the shared library; compiles it unless an earlier process did."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise OSError("no C++ compiler was found; install one, or name it in CXX")
    texts = [source.read_text(encoding="utf-8") for source in SOURCES]
    built_for = [*texts, compiler, torch.__version__, cpu_features(), *FLAGS]
    name = hashlib.sha256("\n".join(built_for).encode()).hexdigest()[:16]
    library = cache_folder() / f"kernels-{name}.so"
    if not library.exists():
        compile_to(library, compiler)
    return library


def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "fairseq_el"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except OSError:
        pass
    private = tempfile.mkdtemp(prefix="fairseq_el_")  # for this process alone
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return Path(private)


def cpu_features() -> str:
    """Part of the library's name: machines with different CPUs may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()


def compile_to(library: Path, compiler: str) -> None:
    """Compiles with OpenMP but links without it, so that the library uses torch's OpenMP and its threads."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        units = [source for source in SOURCES if source.suffix == ".cpp"]
        objects = [str(Path(folder) / f"{unit.stem}.o") for unit in units]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, ([compiler, *FLAGS, "-c", str(u), "-o", o] for u, o in zip(units, objects))))
        finished = Path(folder) / "kernels.so"
        run([compiler, "-shared", *objects, "-o", str(finished)])
        os.replace(finished, library)  # atomic: other processes see a complete file or none


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{command[0]}: {lines[0]}")


def declare(compiled: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in SIGNATURES.items():
        function = getattr(compiled, f"fairseq_el_{name}")
        function.argtypes, function.restype = arguments, None
    return compiled


def agrees_with_torch(compiled: ctypes.CDLL) -> bool:
    return all(torch.allclose(ours, expected, atol=1e-4) for ours, expected in check_results(compiled))


def check_results(compiled: ctypes.CDLL) -> Iterator[tuple[Tensor, Tensor]]:
    """One small case per kernel, with torch's result: enough to notice a miscompilation."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, product = draw(16), draw(21, 16), torch.empty(21)
    compiled.fairseq_el_linear(x.data_ptr(), weight.data_ptr(), None, product.data_ptr(), 1, 16, 21)
    yield product, weight @ x

    total = torch.empty(1)
    compiled.fairseq_el_logsumexp(product.data_ptr(), total.data_ptr(), 1, 21)
    yield total[0], product.logsumexp(0)

    keys, values, out = draw(16, 21), draw(16, 21), torch.empty(16)
    begin, end = torch.tensor([1]), torch.tensor([20])
    compiled.fairseq_el_decoder_attention(
        x.data_ptr(), out.data_ptr(), 1, 1, 1, 16, 0.25,
        keys.data_ptr(), values.data_ptr(), 21, begin.data_ptr(), end.data_ptr(), None, None, None, 0, 0,
    )  # fmt: skip
    yield out, values[:, 1:20] @ (0.25 * x @ keys[:, 1:20]).softmax(0)

    context = x.clone()
    compiled.fairseq_el_el_attention(
        context.data_ptr(), weight.data_ptr(), 1, 1, 21, 16, begin.data_ptr(), end.data_ptr(), 1
    )
    yield context, (weight[1:20] @ x).softmax(0) @ weight[1:20]

    projected, starts, context = draw(21, 48), torch.tensor([0, 21]), torch.empty(21, 16)
    compiled.fairseq_el_varlen_attention(
        projected.data_ptr(), context.data_ptr(), starts.data_ptr(), 1, 1, 16, 0.25
    )
    q, k, v = projected.split(16, dim=1)
    yield context, (0.25 * q @ k.T).softmax(1) @ v

    packed, bias, outputs = draw(2, 16, 32).half(), draw(2, 32), torch.empty(21, 40)
    compiled.fairseq_el_packed_gemm(
        weight.data_ptr(), packed.data_ptr(), 1, bias.data_ptr(), outputs.data_ptr(), 21, 16, 40, 1, 1
    )
    yield outputs, (weight @ packed.float() + bias[:, None]).transpose(0, 1).flatten(1)[:, :40].relu()
