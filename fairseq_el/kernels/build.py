"""Loads the compiled kernels: picks a variant for this CPU, and checks its results against torch's.

Set-up has compiled the variants (see `compiler`). Where none fits (another architecture, an older CPU, no compiler at
set-up, changed sources) the kernels are compiled at first use, once per machine and in seconds: not in the background,
because results must not depend on when a compiler is done. The library is kept in the user's cache folder. Without a
compiler, or if a result doesn't agree with torch's, `library` returns None, and `ops` falls back to torch.
"""

import atexit
import ctypes
import functools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fairseq_el.errors import UserError
from fairseq_el.kernels import compiler
from fairseq_el.kernels.compiler import VARIANTS
from fairseq_el.kernels.formats import pack_bf16, pack_int8, unpack_low_precision

logger = logging.getLogger(__name__)

VARIABLE = "FAIRSEQ_EL_KERNELS"
"""Environment variable: a variant, or one of the next three."""
AUTO, NATIVE, OFF = "auto", "native", "off"
PORTABLE = "portable"
"""What compilers choose without flags. For tests: on a CPU without a variant, `native` has more to offer."""

SET_UP = f"the best of {', '.join(VARIANTS)} that this CPU supports, compiled at set-up"
NONE_FITS = "compiled for this CPU at first use, as set-up left none that fits"

POINTER, NUMBER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "decoder_attention": (
        [POINTER, NUMBER, POINTER]
        + [NUMBER] * 4
        + [FLOAT, POINTER, POINTER, NUMBER]
        + [POINTER] * 5
        + [NUMBER] * 3
    ),
    "el_attention": [POINTER] * 2 + [NUMBER] * 5 + [POINTER] * 2 + [NUMBER],
    "transpose_heads": [POINTER] * 2 + [NUMBER] * 4,
    "varlen_attention": [POINTER] * 3 + [NUMBER] * 3 + [FLOAT, NUMBER],
    "linear": [POINTER] * 4 + [NUMBER] * 3,
    "packed_gemm": [POINTER] * 2 + [NUMBER] + [POINTER] * 2 + [NUMBER] * 5,
    "low_precision_gemm": [POINTER] * 6 + [NUMBER] * 5,
    "logsumexp": [POINTER] * 2 + [NUMBER] * 2,
    "add_norm": [POINTER] * 4 + [FLOAT] + [POINTER] * 2 + [NUMBER] * 2,
    "decoder_layer": [POINTER] * 4 + [NUMBER],
}
"""Arguments of `fairseq_el_<name>`, as in the C++ sources."""


class KernelLibrary(ctypes.CDLL):
    """The compiled kernels, which variant they are, and why it was chosen."""

    def __init__(self, file: Path, variant: str, reason: str):
        super().__init__(str(file))
        self.file, self.variant, self.reason = file, variant, reason
        for name, arguments in SIGNATURES.items():
            function = getattr(self, f"fairseq_el_{name}")
            function.argtypes, function.restype = arguments, None


def library() -> KernelLibrary | None:
    """The compiled kernels, or None if they can't be used; determined once per process."""
    return load()[0]


@functools.cache
def load() -> tuple[KernelLibrary | None, str]:
    """The compiled kernels, or None and the reason."""
    wanted = os.environ.get(VARIABLE, AUTO)
    if wanted == OFF:
        return None, f"{VARIABLE}={OFF} switches the C++ kernels off"
    problem = ""
    for candidate in candidates(wanted):
        try:
            kernels = candidate()
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            problem = f"the C++ kernels could not be compiled ({error})"
        else:
            if agrees_with_torch(kernels):
                return kernels, ""
            problem = f"the C++ kernels ({kernels.variant}) compute wrong results on this machine"
    logger.warning(f"falling back to torch (slower): {problem}")
    return None, problem


def candidates(wanted: str) -> Iterator[Callable[[], KernelLibrary]]:
    """Kernels to try, best first. wanted: the value of the environment variable."""
    supported = supported_variants()
    if wanted == AUTO:
        files = {variant: compiler.prebuilt_library(variant) for variant in supported}
        variant = next((variant for variant in supported if files[variant].exists()), None)
        if variant is not None:
            yield functools.partial(KernelLibrary, files[variant], variant, SET_UP)
        yield functools.partial(compiled_here, NATIVE, NONE_FITS)
        return
    known = (*VARIANTS, PORTABLE, NATIVE)
    if wanted not in known:
        raise UserError(f"{VARIABLE}={wanted} names no kernels: give one of {', '.join((AUTO, OFF, *known))}")
    if wanted in VARIANTS and wanted not in supported:
        missing = sorted(set(VARIANTS[wanted]) - set(cpu_features().split()))
        raise UserError(f"{VARIABLE}={wanted} is not for this CPU, which lacks {', '.join(missing)}: unset {VARIABLE}")
    yield functools.partial(kernels_of, wanted, f"{VARIABLE}={wanted}")


def supported_variants() -> list[str]:
    """Of this CPU, best first."""
    features = set(cpu_features().split())
    return [variant for variant, needed in VARIANTS.items() if features.issuperset(needed)]


def kernels_of(variant: str, reason: str) -> KernelLibrary:
    """Those that set-up compiled, if they are there."""
    if variant in VARIANTS and compiler.prebuilt_library(variant).exists():
        return KernelLibrary(compiler.prebuilt_library(variant), variant, reason)
    return compiled_here(variant, reason)


def compiled_here(variant: str, reason: str) -> KernelLibrary:
    """Compiles the kernels, unless an earlier process did."""
    command = compiler.find_compiler()
    flags = ("-march=native",) if variant == NATIVE else compiler.flags_of(VARIANTS.get(variant, ()))
    file = cache_folder() / compiler.library_name(variant, [command, torch.__version__, cpu_features(), *flags])
    if not file.exists():
        logger.warning(f"compiling the C++ kernels ({variant}), once on this machine: this takes some seconds")
        if problems := compiler.compile_libraries({file: flags}, command):
            raise OSError(problems[0])
    return KernelLibrary(file, variant, reason)


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

    norm_weight, norm_bias, sums, normed = draw(16), draw(16), torch.empty(21, 16), torch.empty(21, 16)
    compiled.fairseq_el_add_norm(
        weight.data_ptr(), weight.data_ptr(), norm_weight.data_ptr(), norm_bias.data_ptr(), 1e-5,
        sums.data_ptr(), normed.data_ptr(), 21, 16,
    )  # fmt: skip
    yield normed, torch.layer_norm(2 * weight, (16,), norm_weight, norm_bias, 1e-5)

    begin, end = torch.tensor([1]), torch.tensor([20])
    for half in (False, True):
        keys, values, out = draw(16, 21), draw(16, 21), torch.empty(16)
        states, context = weight.clone(), x.clone()
        if half:
            keys, values, states = keys.half(), values.half(), states.half()
        compiled.fairseq_el_decoder_attention(
            x.data_ptr(), 16, out.data_ptr(), 1, 1, 1, 16, 0.25,
            keys.data_ptr(), values.data_ptr(), 21, begin.data_ptr(), end.data_ptr(), None, None, None, 0, 0, half,
        )  # fmt: skip
        keys, values, states = (t.float()[..., 1:20] for t in (keys, values, states.T))
        yield out, values @ (0.25 * x @ keys).softmax(0)
        inputs = weight.half() if half else weight
        compiled.fairseq_el_el_attention(
            context.data_ptr(), inputs.data_ptr(), half, 1, 1, 21, 16, begin.data_ptr(), end.data_ptr(), 1
        )
        yield context, states @ (x @ states).softmax(0)
        transposed = torch.empty(16, 21, dtype=inputs.dtype)
        compiled.fairseq_el_transpose_heads(weight.data_ptr(), transposed.data_ptr(), half, 1, 21, 16)
        yield transposed.T, inputs

    projected, starts = draw(21, 48), torch.tensor([0, 21])
    q, k, v = projected.split(16, dim=1)
    context, rounded = torch.empty(21, 16), torch.empty(21, 16)
    for low_precision, out in enumerate((context, rounded)):
        compiled.fairseq_el_varlen_attention(
            projected.data_ptr(), out.data_ptr(), starts.data_ptr(), 1, 1, 16, 0.25, low_precision
        )
    yield context, (0.25 * q @ k.T).softmax(1) @ v
    yield (rounded - context).abs().gt(0.05).float(), torch.zeros(21, 16)

    packed, bias, outputs = draw(2, 16, 32).half(), draw(2, 32), torch.empty(21, 40)
    compiled.fairseq_el_packed_gemm(
        weight.data_ptr(), packed.data_ptr(), 1, bias.data_ptr(), outputs.data_ptr(), 21, 16, 40, 1, 1
    )
    yield outputs, (weight @ packed.float() + bias[:, None]).transpose(0, 1).flatten(1)[:, :40].relu()

    for low in (pack_int8(weight, product), pack_bf16(weight, product)):
        rows, outputs = weight.sign() * 127, torch.empty(21, 21)  # exact in both precisions
        scales, totals = (None if t is None else t.data_ptr() for t in (low.scales, low.totals))
        compiled.fairseq_el_low_precision_gemm(
            rows.data_ptr(), low.packed.data_ptr(), scales, totals, low.bias.data_ptr(), outputs.data_ptr(),
            21, 16, 21, 0, 1,
        )  # fmt: skip
        factors = 1 if low.scales is None else low.scales[:21]
        yield outputs, rows @ unpack_low_precision(low).T * factors + product
