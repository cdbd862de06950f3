"""Files of packed weights: safetensors with aligned tensors, versions and checksums (docs/packed-format.md).

Such a file belongs to a checkpoint in the same folder, which has the settings, and in place of weights a digest of the
file's header. The header has checksums of the tensors. So damage is noticed, and a mixture of two models.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairseq_el.checkpoints.format import atomic_file
from fairseq_el.errors import UserError

NAME = "packed.safetensors"
MARKER = "packed_for_fairseq_el"
"""In place of the weights in the checkpoint: the digest of the header."""
FORMAT, VERSION = "fairseq_el packed weights", 1
ALIGNMENT = 64  # bytes: a cache line, and the widest vector of a kernel
DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8",
    torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip
LONGEST_HEADER = 100 << 20


def write(path: Path, tensors: Mapping[str, Tensor], contents: dict[str, Any]) -> Tensor:
    """contents: what the tensors are. Returns the digest of the header, for the checkpoint.

    safetensors' own writer doesn't align tensors. Here those of a multiple of `ALIGNMENT` bytes come first.
    """
    names = sorted(tensors, key=lambda name: tensors[name].nbytes % ALIGNMENT != 0)
    checksums = {name: zlib.crc32(as_bytes(tensors[name])) for name in names}
    described = {"format": FORMAT, "version": VERSION, "contents": contents, "checksums": checksums}
    header: dict[str, Any] = {"__metadata__": {name: json.dumps(value) for name, value in described.items()}}
    begin = 0
    for name in names:
        tensor, end = tensors[name], begin + tensors[name].nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name in names:
            file.write(as_bytes(tensors[name]))
    return digest_of(raw)


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def digest_of(header: bytes) -> Tensor:
    return torch.frombuffer(bytearray(hashlib.blake2b(header, digest_size=32).digest()), dtype=torch.uint8)


class PackedFile:
    """An open file. Its header is checked here, its tensors by `load`."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                raw = file.read(min(length, LONGEST_HEADER))
            metadata = json.loads(raw)["__metadata__"]
            metadata = {name: json.loads(value) for name, value in metadata.items()}
            is_ours, self.version = metadata["format"] == FORMAT, metadata["version"]
        except OSError:
            raise
        except Exception as error:  # of struct, of json, of types
            raise self.damaged() from error
        if not is_ours:
            raise self.damaged()
        if self.version != VERSION:
            raise UserError(
                f"{path} has version {self.version} of the packed format, and this fairseq_el reads version {VERSION}: "
                "convert the model again, with this version"
            )
        self.digest, self.contents, self.checksums = digest_of(raw), metadata["contents"], metadata["checksums"]

    def damaged(self) -> UserError:
        return UserError(
            f"{self.path} is damaged or incomplete: copy it again, or make it again with fairseq-el convert"
        )

    def load(self) -> dict[str, Tensor]:
        """The tensors, mapped into memory, which processes share, and compared with their checksums, which reads the
        file once."""
        try:
            with safe_open(self.path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise self.damaged() from error
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            found = dict(zip(tensors, pool.map(lambda tensor: zlib.crc32(as_bytes(tensor)), tensors.values())))
        if found != self.checksums:
            raise self.damaged()
        return tensors


def is_packed(weights: Any) -> bool:
    """weights: of a checkpoint, or those that are converted from a Hugging Face folder."""
    return isinstance(weights, dict) and MARKER in weights


def find(checkpoints: Iterable[Path], weights: Mapping[str, Tensor]) -> PackedFile:
    """The file for a checkpoint with these weights, which is one of several that are loaded together."""
    files = [checkpoint.with_name(NAME) for checkpoint in checkpoints]
    found = [PackedFile(file) for file in files if file.is_file()]
    match = next((file for file in found if torch.equal(file.digest, weights[MARKER])), None)
    if match is None and found:
        raise UserError(f"{found[0].path} is damaged, or does not belong to the checkpoint beside it: copy both again")
    if match is None:
        where = f"{files[0]} is missing" if files else f"the checkpoint is a part of a packed model, without its {NAME}"
        raise UserError(f"{where}: copy the whole folder of the model")
    return match


def size(checkpoint: str | os.PathLike[str]) -> int:
    """Bytes of the checkpoint and of the packed weights beside it, if there are any."""
    packed = Path(checkpoint).with_name(NAME)
    return os.path.getsize(checkpoint) + (packed.stat().st_size if packed.is_file() else 0)


def precision_of(checkpoint: Path) -> str | None:
    """With which the model was packed, if it is."""
    packed = checkpoint.with_name(NAME)
    return PackedFile(packed).contents["precision"] if packed.is_file() else None
