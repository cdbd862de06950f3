"""Compiles the C++ kernels in `cpp/`. Set-up runs this too, before anything is installed: standard library only.

Set-up compiles variants of the kernels, one for each set of instructions, into `prebuilt/`. `build` picks one, and
compiles at first use where none fits.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

SOURCES = sorted(Path(__file__).with_name("cpp").iterdir())
PREBUILT = Path(__file__).with_name("prebuilt")
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi"]

FEATURES = {
    "avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c", "avx512f": "-mavx512f", "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq", "avx512vl": "-mavx512vl", "avx512_vnni": "-mavx512vnni", "avx512_bf16": "-mavx512bf16",
}  # fmt: skip
"""Flags of the compiler, by the feature's name in /proc/cpuinfo."""
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
VARIANTS = {
    "avx512_bf16": (*AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512_vnni": (*AVX512, "avx512_vnni"),
    "avx512": AVX512,
    "avx2": AVX2,
}
"""Features that each variant needs, best first. Int8 results are the same bits in all."""
MACROS = {"-mavx512vnni": "__AVX512VNNI__", "-mavx512bf16": "__AVX512BF16__"}
"""Flags for instructions that no compiler chooses by itself, and how sources ask for them."""


def find_compiler() -> str:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise OSError("no C++ compiler was found")
    return compiler


def flags_of(features: Iterable[str]) -> tuple[str, ...]:
    return tuple(FEATURES[feature] for feature in features)


def library_name(variant: str, built_for: Sequence[str]) -> str:
    """built_for: all that the library depends on beside the sources."""
    content = [*(source.read_text(encoding="utf-8") for source in SOURCES), *FLAGS, *built_for]
    return f"kernels-{variant}-{hashlib.sha256(chr(10).join(content).encode()).hexdigest()[:16]}.so"


def prebuilt_library(variant: str, folder: Path = PREBUILT) -> Path:
    """The file may be missing: without a compiler at set-up, or after a change of the sources."""
    return folder / library_name(variant, flags_of(VARIANTS[variant]))


def prebuild(folder: Path) -> list[str]:
    """Compiles all variants into a folder and removes libraries of other sources. Returns what failed."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [f"no variants for {platform.machine()}"]
    libraries = {prebuilt_library(variant, folder): flags_of(features) for variant, features in VARIANTS.items()}
    for file in set(folder.glob("kernels-*.so")) - set(libraries):
        file.unlink()
    missing = {library: flags for library, flags in libraries.items() if not library.exists()}
    try:
        return compile_libraries(missing, find_compiler())
    except OSError as error:
        return [str(error)]


def compile_libraries(libraries: Mapping[Path, Sequence[str]], compiler: str) -> list[str]:
    """Compiles with OpenMP but links without it, so that the library uses torch's OpenMP and its threads.

    libraries: files in one folder, with the flags for each. Returns what failed.
    """
    if not libraries:
        return []
    folder = next(iter(libraries)).parent
    folder.mkdir(parents=True, exist_ok=True)
    units = [source for source in SOURCES if source.suffix == ".cpp"]
    problems = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects: dict[tuple[Path, tuple[str, ...]], Future[str]] = {}  # variants share what is the same in them
        keys = {library: [(unit, flags_for(unit, flags)) for unit in units] for library, flags in libraries.items()}
        for key in (key for used in keys.values() for key in used):
            if key not in objects:
                objects[key] = pool.submit(compile_unit, *key, compiler, f"{scratch}/{len(objects)}.o")
        for library, used in keys.items():
            finished = Path(scratch, library.name)
            try:
                run([compiler, "-shared", *(objects[key].result() for key in used), "-o", str(finished)])
                os.replace(finished, library)  # atomic: other processes see a complete file or none
            except (OSError, subprocess.SubprocessError) as error:
                problems.append(str(error))
    return problems


def compile_unit(unit: Path, flags: Sequence[str], compiler: str, output: str) -> str:
    run([compiler, *FLAGS, *flags, "-c", str(unit), "-o", output])
    return output


def flags_for(unit: Path, flags: Sequence[str]) -> tuple[str, ...]:
    """Those that a source file asks for in its first line, and the given ones that it has a use for."""
    text = with_headers(unit)
    first = text.partition("\n")[0]
    own = first.removeprefix("// flags:").split() if first.startswith("// flags:") else []
    return (*own, *(flag for flag in flags if flag not in MACROS or MACROS[flag] in text))


def with_headers(source: Path) -> str:
    text = source.read_text(encoding="utf-8")
    headers = re.findall(r'^#include "(.+)"', text, flags=re.MULTILINE)
    return "\n".join([text, *(with_headers(source.with_name(header)) for header in headers)])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{command[0]}: {lines[0]}")
