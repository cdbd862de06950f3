"""Output files are whole or not there, and a full disk or a folder that can't be written to is said in one line."""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import make_checkpoint as maker  # scripts/make_checkpoint.py
from fairseq_el.cli import convert, merge, prepare, summarize
from fairseq_el.cli.evaluate import results
from fairseq_el.errors import UserError
from fairseq_el.jobs import atomic_file
from fairseq_el.jobs.atomic_file import AtomicFile, check_writable
from fairseq_el.jobs.summarizer import Summarizer
from helpers import GREEDY, ROOT, TEXTS, exit_of, job, read_lines, write_gpt2_encoding, write_lines

TINY = {"encoder_layers": 1, "decoder_layers": 1, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 8,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 32,
    "max_target_positions": 32}  # fmt: skip


@pytest.fixture(scope="module")
def greedy():
    return Summarizer.load("demo", "demo", "greedy", max_len_b=8)


@pytest.fixture
def command(greedy, monkeypatch):
    monkeypatch.setattr(Summarizer, "load", lambda *_, **__: greedy)
    return lambda *words: exit_of(summarize, words, monkeypatch)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- whole or not at all


def test_a_file_that_is_not_finished_leaves_the_old_one(tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(KeyboardInterrupt), AtomicFile(tmp_path / "out") as whole:
        whole.file.write(b"new")
        raise KeyboardInterrupt
    assert (tmp_path / "out").read_text() == "old" and names(tmp_path) == ["out"]
    with AtomicFile(tmp_path / "out") as whole:
        whole.file.write(b"new")
        whole.file.flush()
        assert (tmp_path / "out").read_text() == "old"
    assert (tmp_path / "out").read_text() == "new" and names(tmp_path) == ["out"]


@pytest.mark.parametrize("write", [AtomicFile, maker.atomic_file], ids=["package", "make_checkpoint"])
def test_a_file_that_does_not_fit_is_not_there(tmp_path, write):
    """/dev/full has no room for anything, as a disk that is full."""
    (tmp_path / "out.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as failure, write(tmp_path / "out") as whole:
        getattr(whole, "file", whole).write(b"new")
    assert failure.value.errno == errno.ENOSPC and names(tmp_path) == []


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_checkpoint_that_does_not_fit_is_an_error_of_the_system(tmp_path, is_zip):
    """torch has errors of its own for that."""
    (tmp_path / "model.pt.tmp").symlink_to("/dev/full")
    refused = pytest.raises(OSError, match="model.pt can't be written|No space left")
    with refused, maker.atomic_file(tmp_path / "model.pt") as file:
        torch.save({"a": torch.zeros(100_000)}, file, _use_new_zipfile_serialization=is_zip)
    assert names(tmp_path) == []


def make_tiny(folder: Path) -> Path:
    rows = write_gpt2_encoding(folder)
    return maker.make_checkpoint("bart_base", folder, vocab=rows, settings=TINY)


SCRIPTS = {
    "make_checkpoint": lambda source, out: maker.make_checkpoint("bart_base", out, vocab=300, settings=TINY),
    "convert": lambda source, out: convert.convert(source / "huggingface", out),
    "convert --reverse": lambda source, out: convert.convert_back(source, out),
}
LAST = {"make_checkpoint": "model.pt", "convert": "model.pt", "convert --reverse": "model.safetensors"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    convert.convert_back(folder, folder / "huggingface")
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_that_could_not_be_written_is_not_there(tiny, tmp_path, monkeypatch, script):
    """The last file of a folder, without which it is no model, fails as it is synced to the disk."""
    sync, synced = os.fsync, []

    def full(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        if synced[-1].endswith(f"{LAST[script]}.tmp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        SCRIPTS[script](tiny, tmp_path)
    assert synced and LAST[script] not in names(tmp_path)
    assert not any(name.endswith(".tmp") for name in names(tmp_path))


def write_pairs(folder: Path) -> None:
    write_lines(folder / "test.source", TEXTS[:3])
    write_lines(folder / "test.target", ["one", "two", "three"])


def test_data_that_could_not_be_encoded_leave_nothing_that_looks_whole(tmp_path, monkeypatch):
    folder, output = tmp_path / "data", tmp_path / "out"
    folder.mkdir()
    write_pairs(folder)
    rows = write_gpt2_encoding(tmp_path / "bpe")
    write_lines(tmp_path / "bpe" / "dict.txt", (f"{n} 1" for n in range(rows - 4)))
    words = ["xsum", "--input", folder, "--output", output, "--bpe-dir", tmp_path / "bpe"]
    assert exit_of(prepare, words, monkeypatch) is None
    before = {path: path.read_bytes() for path in (output / "bin").iterdir() if path.suffix != ".log"}
    assert len(before) > 5 and "bin.tmp" not in names(output)

    write_lines(folder / "test.source", TEXTS[3:6])
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "binarise", fail_as_full)
        assert "No space left" in exit_of(prepare, words, patch)
    assert {path: path.read_bytes() for path in before} == before  # the old set, whole
    monkeypatch.setattr(atomic_file.os, "fsync", fail_as_full)
    shutil.rmtree(output)
    assert "No space left" in exit_of(prepare, words, monkeypatch)
    assert names(output) == []


def fail_as_full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_row_of_results_is_added_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    results.append_result(path, {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(results.os, "fsync", fail_as_full)
        with pytest.raises(OSError, match="No space left"):
            results.append_result(path, {"n": 2})
    results.append_result(path, {"n": 3})
    assert [json.loads(line) for line in read_lines(path)] == [{"n": 1}, {"n": 3}]


# ---- said before the work


PLACES = {
    "below a file": ("{tmp}/in/out.txt", "there is no folder"),
    "in no folder": ("{tmp}/no/out.txt", "there is no folder"),
    "a folder": ("{tmp}", "is a folder"),
    "a device": ("/dev/null", "is a device"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_can_not_be_written_to_is_said_before_a_model_is_loaded(tmp_path, monkeypatch, place):
    monkeypatch.setattr(Summarizer, "load", lambda *_, **__: pytest.fail("too late"))
    output, message = PLACES[place]
    output = output.replace("{tmp}", str(tmp_path))
    said = exit_of(summarize, [*job(tmp_path, TEXTS[:1]), "--output", output], monkeypatch)
    assert said.startswith("summarize: error: ") and message in said and "\n" not in said
    assert names(tmp_path) == ["in"]
    with pytest.raises(UserError, match=message):
        AtomicFile(Path(output))
    with pytest.raises(UserError, match=message):
        results.check_results(Path(output))
    merged = exit_of(merge, [tmp_path / "in", "--output", output], monkeypatch)
    assert merged.startswith("merge: error: ") and message in merged


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_folder_that_is_read_only_is_said_before_a_model_is_loaded(tmp_path, monkeypatch, number):
    """As root, permissions don't keep us from writing: opening fails as on a disk that is mounted so."""
    monkeypatch.setattr(Summarizer, "load", lambda *_, **__: pytest.fail("too late"))
    words = job(tmp_path, TEXTS[:1])
    really = Path.open

    def refuse(path, mode="r", *args, **options):
        if set(mode) & set("wa"):
            raise OSError(number, os.strerror(number), str(path))
        return really(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    said = exit_of(summarize, words, monkeypatch)
    assert said == (
        f"summarize: error: the folder {tmp_path} can't be written to ({os.strerror(number)}): change its permissions, "
        "or write elsewhere"
    )
    assert names(tmp_path) == ["in"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_are_said_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(Summarizer, "load", lambda *_, **__: pytest.fail("too late"))
    words = job(tmp_path, TEXTS[:1])
    tmp_path.chmod(0o500)
    try:
        assert f"the folder {tmp_path} can't be written to" in exit_of(summarize, words, monkeypatch)
    finally:
        tmp_path.chmod(0o700)


def test_too_little_room_is_said_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(Summarizer, "load", lambda *_, **__: pytest.fail("too late"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(atomic_file.shutil, "disk_usage", lambda _: usage._replace(free=100))
    said = exit_of(summarize, job(tmp_path, TEXTS), monkeypatch)
    assert "has room for 100 bytes and the output takes at least about 480" in said and "\n" not in said
    assert names(tmp_path) == ["in"]
    check_writable(tmp_path / "out", 100)


# ---- no room in the middle

CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from fairseq_el.cli.main import main
main({words!r})
"""


def run_with_room_for(limit: int, *words) -> subprocess.CompletedProcess:
    """`fairseq-el summarize` in a process whose files can't grow beyond so many bytes."""
    code = CHILD.format(limit=limit, words=["summarize", *map(str, words)])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_a_run_without_room_keeps_what_is_finished_and_goes_on(command, tmp_path, greedy):
    """Really: the system refuses to let the journal grow."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    texts = [text[:100] for text in TEXTS]
    words = job(tmp_path, texts, "--batch-size", 4, "--max-len-b", 8)
    ended = run_with_room_for(1500, *words)
    *_, last = ended.stderr.strip().splitlines()
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert re.search(r"summarize: error: \S+out.journal can't be written \(File too large\): .*--resume", last)
    assert names(tmp_path) == ["in", "out.journal"]
    assert (tmp_path / "out.journal").read_bytes().count(b"\n") > 2
    calls = []
    generate = greedy.generate
    greedy.generate = lambda sources, nbest: calls.append(len(sources)) or generate(sources, nbest)
    try:
        assert command(*words, "--resume") is None
    finally:
        del greedy.generate
    assert 0 < sum(calls) < len(texts)
    assert read_lines(tmp_path / "out") == greedy(texts) and names(tmp_path) == ["in", "out", "out.job"]


def test_standard_output_without_room_is_one_line(tmp_path):
    source = write_lines(tmp_path / "in", [TEXTS[0][:100]])
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "fairseq_el", "summarize", *GREEDY, "--input", source, "--max-len-b", 8]
        ended = subprocess.run(
            list(map(str, words)), stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, cwd=ROOT
        )
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1] == "summarize: error: No space left on device"


def test_merging_without_room_leaves_the_parts_and_nothing_else(command, tmp_path, monkeypatch):
    texts = [text[:100] for text in TEXTS[:4]]
    parts = [tmp_path / f"part.{number}" for number in (1, 2)]
    for number, part in enumerate(parts, start=1):
        words = [*job(tmp_path, texts), "--window", 2, "--shard", f"{number}/2", "--output", part]
        assert command(*words) is None
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_file.os, "fsync", fail_as_full)
        said = exit_of(merge, [*parts, "--output", tmp_path / "all"], patch)
    assert "No space left on device" in said and "\n" not in said and names(tmp_path) == before
    assert exit_of(merge, [*parts, "--output", tmp_path / "all"], monkeypatch) is None
    assert len(read_lines(tmp_path / "all")) == 4
