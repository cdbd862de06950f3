"""The kernels in `kernels/`, compiled once for the machine they run on.

Four seconds at first use; the result is kept in the user's cache folder. Where there is no compiler, or a result
doesn't agree with torch's, torch's own operations do the work: slower, and equal up to rounding.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).with_name("cpp").iterdir())
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-Wno-psabi"]
OFF = "FAIRSEQ_EL_NATIVE"
"""This environment variable at 0 leaves everything to torch."""

LANES = 16  # rows that are enough for a thread
NOTHING: tuple[None, None] = (None, None)


def attend(
    queries: Tensor,
    num_heads: int,
    scale: float,
    shared: tuple[Tensor, Tensor] | None = None,
    span: tuple[Tensor, Tensor] | None = None,
    slots: tuple[Tensor, Tensor] | None = None,
    hidden: Tensor | None = None,
    used: int = 0,
) -> Tensor:
    """Attention of few rows a sentence, under one softmax, to what a sentence's rows share and to slots.

    queries: [b, r, h * d_k]; shared: keys and values [b, h, d_k, n], of which a sentence has those from span[0] to
    span[1], [b] each; slots: keys and values [b, h, capacity, d_k]; hidden: [b, r, capacity], True where a row may
    not look, of which the first `used` slots count. Returns [b, r, h * d_k]. Ask `serves` first.
    """
    b, r, d = queries.shape
    queries, out = queries.contiguous(), torch.empty_like(queries, memory_format=torch.contiguous_format)
    keys, values = shared or NOTHING
    slot_keys, slot_values = slots or NOTHING
    begin, end = span or NOTHING
    pointers = [None if t is None else t.data_ptr() for t in (keys, values, begin, end, slot_keys, slot_values, hidden)]
    length = 0 if keys is None else keys.size(3)
    capacity = 0 if slot_keys is None else slot_keys.size(2)
    library().fairseq_el_attend(
        queries.data_ptr(), out.data_ptr(), b, r, num_heads, d // num_heads, scale,
        *pointers[:2], length, *pointers[2:], capacity, used,
    )  # fmt: skip
    return out


def attend_states_(queries: Tensor, states: Tensor, span: tuple[Tensor, Tensor]) -> Tensor:
    """EL-attention's products with H and the softmax between them; the result takes the place of the queries.

    queries: [b, rows, d], states: [b, n, d], of which a sentence has those from span[0] to span[1], [b] each. Ask
    `serves_states` first.
    """
    (b, rows, d), n = queries.shape, states.size(1)
    queries, states = queries.contiguous(), states.contiguous()
    library().fairseq_el_attend_states(
        queries.data_ptr(), states.data_ptr(), b, rows, n, d, *(bound.data_ptr() for bound in span),
        torch.get_num_threads(),
    )  # fmt: skip
    return queries


def serves_states(queries: Tensor) -> bool:
    """queries: [b, rows, d]. A thread takes some rows of a sentence: there must be work for all."""
    b, rows, d = queries.shape
    return b * -(-rows // LANES) >= torch.get_num_threads() and serves(queries, d)


def attend_sentences(projected: Tensor, lengths: list[int], num_heads: int, scale: float) -> Tensor:
    """Self-attention of sentences that stand one after the other, each to itself alone.

    projected: [tokens of all, 3 * d], queries, keys and values side by side; lengths: of the sentences. Returns
    [tokens of all, d]. Ask `serves` first, with a head's width.
    """
    projected, d = projected.contiguous(), projected.size(1) // 3
    out = projected.new_empty(projected.size(0), d)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    library().fairseq_el_attend_sentences(
        projected.data_ptr(), out.data_ptr(), starts.data_ptr(), len(lengths), num_heads, d // num_heads, scale
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., in], weight: [out, in], bias: [out]; returns [..., out]. Ask `serves` first."""
    x, (out, width) = x.contiguous(), weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    library().fairseq_el_linear(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        x.numel() // width, width, out,
    )  # fmt: skip
    return y


PANEL = 32  # outputs whose weights lie together, input by input
ACTIVATIONS = (("none", ""), ("relu", ""), ("gelu", "none"), ("gelu", "tanh"))  # in the order of activations.h


def multiply_panels(
    x: Tensor, panels: Tensor, bias: Tensor, out: int, activation: tuple[str, str] = ACTIVATIONS[0]
) -> Tensor:
    """x: [..., in], panels: [n, in, PANEL], in half or single precision, bias: [n, PANEL]; returns [..., out], which
    may be less than n * PANEL. Ask `serves` first."""
    x, width = x.contiguous(), panels.size(1)
    y = x.new_empty(*x.shape[:-1], out)
    library().fairseq_el_multiply_panels(
        x.data_ptr(), panels.data_ptr(), panels.dtype == torch.float16, bias.data_ptr(), y.data_ptr(),
        x.numel() // width, width, out, ACTIVATIONS.index(activation), torch.get_num_threads(),
    )  # fmt: skip
    return y


def logsumexp(x: Tensor) -> Tensor:
    """log(sum(exp(x))) over the last dimension, for any x: by our kernel where that serves, else by torch."""
    if not (x.is_contiguous() and serves(x, 0)):
        return torch.logsumexp(x, dim=-1)
    out = x.new_empty(x.shape[:-1])
    library().fairseq_el_logsumexp(x.data_ptr(), out.data_ptr(), out.numel(), x.size(-1))
    return out


def serves(x: Tensor, width: int) -> bool:
    """Single precision on a CPU, in whole vectors, and kernels that work here.

    width: of what the kernel multiplies, a head or a linear layer's input.
    """
    return x.device.type == "cpu" and x.dtype == torch.float32 and width % 16 == 0 and library() is not None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None; found out once a process."""
    if os.environ.get(OFF) == "0":
        return None
    try:
        compiled = declare(ctypes.CDLL(str(compiled_library())))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.warning(f"torch's operations do the work of our kernels, slower: these were not compiled ({error})")
        return None
    if agree_with_torch(compiled):
        return compiled
    logger.warning("torch's operations do the work of our kernels, slower: these compute wrong results here")
    return None


def compiled_library() -> Path:
    """Path of the shared library, compiled unless an earlier process did."""
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
    private = tempfile.mkdtemp(prefix="fairseq_el_")  # compiled for this process alone
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return Path(private)


def cpu_features() -> str:
    """A home folder may be shared by machines of different abilities."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()


def compile_to(library: Path, compiler: str) -> None:
    """In two steps: linked without OpenMP, the library finds the one that torch brought, and its threads."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        units = [source for source in SOURCES if source.suffix == ".cpp"]
        objects = [str(Path(folder) / f"{unit.stem}.o") for unit in units]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, ([compiler, *FLAGS, "-c", str(u), "-o", o] for u, o in zip(units, objects))))
        finished = Path(folder) / "kernels.so"
        run([compiler, "-shared", *objects, "-o", str(finished)])
        os.replace(finished, library)  # whole or not there, also for other processes


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{command[0]}: {lines[0]}")


def declare(compiled: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    compiled.fairseq_el_attend.argtypes = [
        pointer, pointer, number, number, number, number, ctypes.c_float,
        pointer, pointer, number, pointer, pointer, pointer, pointer, pointer, number, number,
    ]  # fmt: skip
    compiled.fairseq_el_linear.argtypes = [pointer, pointer, pointer, pointer, number, number, number]
    compiled.fairseq_el_logsumexp.argtypes = [pointer, pointer, number, number]
    compiled.fairseq_el_attend_states.argtypes = [pointer] * 2 + [number] * 4 + [pointer] * 2 + [number]
    compiled.fairseq_el_attend_sentences.argtypes = [pointer] * 3 + [number] * 3 + [ctypes.c_float]
    compiled.fairseq_el_multiply_panels.argtypes = [pointer] * 2 + [number] + [pointer] * 2 + [number] * 5
    for name in ("attend", "attend_sentences", "attend_states", "linear", "logsumexp", "multiply_panels"):
        getattr(compiled, f"fairseq_el_{name}").restype = None
    return compiled


def agree_with_torch(compiled: ctypes.CDLL) -> bool:
    """One small case each: enough to see a compiler that gets them wrong."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, product = draw(16), draw(21, 16), torch.empty(21)
    compiled.fairseq_el_linear(x.data_ptr(), weight.data_ptr(), None, product.data_ptr(), 1, 16, 21)
    total = torch.empty(1)
    compiled.fairseq_el_logsumexp(product.data_ptr(), total.data_ptr(), 1, 21)
    keys, values, out = draw(16, 21), draw(16, 21), torch.empty(16)
    begin, end = torch.tensor([1]), torch.tensor([20])
    compiled.fairseq_el_attend(
        x.data_ptr(), out.data_ptr(), 1, 1, 1, 16, 0.25,
        keys.data_ptr(), values.data_ptr(), 21, begin.data_ptr(), end.data_ptr(), None, None, None, 0, 0,
    )  # fmt: skip
    expected = values[:, 1:20] @ (0.25 * x @ keys[:, 1:20]).softmax(0)
    context = x.clone()
    compiled.fairseq_el_attend_states(
        context.data_ptr(), weight.data_ptr(), 1, 1, 21, 16, begin.data_ptr(), end.data_ptr(), 1
    )
    expected_context = (weight[1:20] @ x).softmax(0) @ weight[1:20]
    projected, starts, within = draw(21, 48), torch.tensor([0, 21]), torch.empty(21, 16)
    compiled.fairseq_el_attend_sentences(
        projected.data_ptr(), within.data_ptr(), starts.data_ptr(), 1, 1, 16, 0.25
    )  # fmt: skip
    q, k, v = projected.split(16, dim=1)
    panels, bias, outputs = draw(2, 16, 32).half(), draw(2, 32), torch.empty(21, 40)
    compiled.fairseq_el_multiply_panels(
        weight.data_ptr(), panels.data_ptr(), 1, bias.data_ptr(), outputs.data_ptr(), 21, 16, 40, 1, 1
    )
    expected_outputs = (weight @ panels.float() + bias[:, None]).transpose(0, 1).flatten(1)[:, :40].relu()
    pairs = (
        (product, weight @ x), (total[0], product.logsumexp(0)), (out, expected), (context, expected_context),
        (within, (0.25 * q @ k.T).softmax(1) @ v), (outputs, expected_outputs),
    )  # fmt: skip
    return all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in pairs)
