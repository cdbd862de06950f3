#!/usr/bin/env python3
"""Compiles the Triton kernels for GPUs that need not be here, and prints what they take of them.

scripts/triton_resources.py                 a table in Markdown, as in docs/gpu.md
scripts/triton_resources.py --json          one line of JSON for each kernel
scripts/triton_resources.py --kernel attention    only that
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from fairseq_el.kernels.triton import kernels, launch

DEVICES = {70: "V100", 80: "A100", 90: "H100"}
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
KERNELS = ("el_attention", "attention")
INTEGERS = ("rows", "n", "d", "splits", "x", "h", "capacity", "used")


def configuration(kernel: str, capability: int, dtype: str) -> tuple[launch.Tile, dict[str, Any]]:
    """The tile that is used there, and the constants: the widest H that has one, and all options of attention."""
    if kernel == "el_attention":
        widths = [d for d in (1024, 512) if launch.el_tile(capability, DTYPES[dtype], d)]
        tile = launch.el_tile(capability, DTYPES[dtype], widths[0])
        constants: dict[str, Any] = {"BLOCK_D": widths[0]}
    else:
        tile = launch.ATTENTION_TILE
        flags = ("HAS_SHARED", "HAS_SLOTS", "HAS_NEW", "HAS_PROMPT", "HAS_BIAS")
        constants = {"D_K": 64, "BLOCK_D": 64, **dict.fromkeys(flags, True)}
    return tile, constants | {"BLOCK_ROWS": launch.ROWS, "BLOCK_KEYS": tile.keys}


def compile_kernel(kernel: str, capability: int, dtype: str) -> dict[str, Any]:
    tile, constants = configuration(kernel, capability, dtype)
    function = getattr(kernels, kernel)
    signature = {name: type_of(name, dtype, constants) for name in function.arg_names}
    attributes = {
        (number,): [("tt.divisibility", 16)]  # pointers, strides and widths are multiples of 16, as they are in use
        for number, (name, kind) in enumerate(signature.items())
        if kind == f"*{dtype}" or name.endswith("stride") or name in ("d", "capacity")
    }
    source = triton.compiler.ASTSource(function, signature, constants, attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = resource_usage(compiled.asm["cubin"])
    return {
        "kernel": kernel, "capability": capability, "dtype": dtype, "width": constants["BLOCK_D"], "keys": tile.keys,
        "warps": tile.warps, "registers": registers, "spilled_bytes": stack, "shared_bytes": compiled.metadata.shared,
    }  # fmt: skip


def type_of(name: str, dtype: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith("stride"):
        return "i64" if "batch" in name else "i32"
    if name in INTEGERS:
        return "i32"
    return {"begins": "*i64", "ends": "*i64", "beam_mask": "*i1", "lse": "*fp32", "prompt_lse": "*fp32",
            "scale": "fp32"}.get(name, f"*{dtype}")  # fmt: skip


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and the bytes of stack that registers spill to, by CUDA's tool, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"{name}:(\d+)", told) for name in ("REG", "STACK"))
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {told}")
    return int(registers.group(1)), int(stack.group(1))


def compile_all(names: list[str]) -> Iterator[dict[str, Any]]:
    for kernel in names:
        for capability in DEVICES:
            for dtype in DTYPES:
                yield compile_kernel(kernel, capability, dtype)


def table(rows: Iterator[dict[str, Any]]) -> str:
    lines = [
        "| kernel | device | precision | width | keys a tile | warps | registers a thread | spilled bytes | shared |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        device = f"{DEVICES[row['capability']]} (sm_{row['capability']})"
        lines.append(
            f"| `{row['kernel']}` | {device} | {row['dtype']} | {row['width']} | {row['keys']} | {row['warps']} | "
            f"{row['registers']} | {row['spilled_bytes']} | {row['shared_bytes'] / 1024:.0f} KiB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS, help="only this")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each kernel")
    args = parser.parse_args()
    rows = compile_all([args.kernel] if args.kernel else list(KERNELS))
    if args.json:
        for row in rows:
            print(json.dumps(row), flush=True)
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
