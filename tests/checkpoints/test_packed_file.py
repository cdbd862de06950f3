"""Files of packed weights: read by safetensors, aligned, and damage to them is one line."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file

from fairseq_el.checkpoints import packed_file
from fairseq_el.checkpoints.packed_file import ALIGNMENT, MARKER, PackedFile
from fairseq_el.errors import UserError

TENSORS = {
    "odd": torch.tensor([1.5, 2.5, 3.5]),
    "int8": torch.arange(-128, 128, dtype=torch.int8).view(2, 2, 64, 1),
    "half": torch.randn(4, 32).half(),
    "bf16": torch.randn(1, 32).bfloat16(),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 5),
    "transposed": torch.randn(16, 4).T,
}


@pytest.fixture
def written(tmp_path):
    """The path of a file, and the weights of its checkpoint."""
    path = tmp_path / packed_file.NAME
    return path, {MARKER: packed_file.write(path, TENSORS, {"precision": "int8"})}


def test_safetensors_reads_what_is_written(written):
    path, _ = written
    for found in (load_file(path), PackedFile(path).load()):
        assert set(found) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


def test_tensors_of_whole_lines_are_aligned_and_mapped(written):
    path, _ = written
    found = PackedFile(path).load()
    aligned = [name for name, tensor in TENSORS.items() if tensor.nbytes and tensor.nbytes % ALIGNMENT == 0]
    assert len(aligned) >= 4
    assert all(found[name].data_ptr() % ALIGNMENT == 0 for name in aligned)
    with open("/proc/self/maps") as maps:
        (line,) = [line for line in maps if str(path) in line]
    begin, end = (int(number, 16) for number in line.split()[0].split("-"))
    assert all(begin <= found[name].data_ptr() < end for name in aligned)
    found["int8"].zero_()  # private to this process
    assert torch.equal(load_file(path)["int8"], TENSORS["int8"])


def test_the_file_of_a_checkpoint_is_found_by_its_digest(written, tmp_path):
    path, weights = written
    other = tmp_path / "other"
    other.mkdir()
    packed_file.write(other / packed_file.NAME, TENSORS | {"odd": torch.zeros(3)}, {"precision": "int8"})
    checkpoints = [other / "model.pt", tmp_path / "model.pt"]
    assert packed_file.find(checkpoints, weights).path == path
    with pytest.raises(UserError, match="other/packed.safetensors is damaged, or does not belong to the checkpoint"):
        packed_file.find(checkpoints[:1], weights)
    with pytest.raises(UserError, match="nowhere/packed.safetensors is missing: copy the whole folder"):
        packed_file.find([tmp_path / "nowhere" / "model.pt"], weights)


@pytest.mark.parametrize("position", range(0, 4000, 61))
def test_a_flipped_bit_anywhere_is_noticed(written, position):
    path, weights = written
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path} (is damaged|has version)"):
        packed_file.find([path.with_name("model.pt")], weights).load()


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -1])
def test_a_truncated_file_is_noticed(written, kept):
    path, weights = written
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else kept])
    with pytest.raises(UserError, match=f"^{path} is damaged or incomplete: copy it again, or make it again"):
        packed_file.find([path.with_name("model.pt")], weights).load()


def test_another_version_of_the_format_is_named(written, monkeypatch):
    path, weights = written
    monkeypatch.setattr(packed_file, "VERSION", 2)
    with pytest.raises(UserError, match=f"^{path} has version 1 of the packed format, .* reads version 2: convert"):
        packed_file.find([path.with_name("model.pt")], weights)


@pytest.mark.parametrize("metadata", [{}, {"format": '"pt"', "version": "1"}, {"format": "1"}])
def test_other_files_of_safetensors_are_refused(tmp_path, metadata):
    header = json.dumps({"__metadata__": metadata}).encode()
    path = tmp_path / packed_file.NAME
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UserError, match="is damaged or incomplete"):
        PackedFile(path)
