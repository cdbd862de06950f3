"""Shards of a job, each run alone, merge to the file of a single run; anything else is refused."""

import errno
import json
import os
import resource
import shutil
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_el.cli import merge, summarize
from fairseq_el.jobs.inputs import Texts
from fairseq_el.jobs.shards import Shard
from fairseq_el.jobs.summarizer import Summarizer
from helpers import DEMO, GREEDY, TEXTS, exit_of, interrupted_after, load_once, write_lines


@pytest.fixture
def call(monkeypatch):
    """A script in this process; returns what it exits with, None if all is well."""
    monkeypatch.setattr(Summarizer, "load", load_once)
    return lambda script, *words: exit_of(script, words, monkeypatch)


@pytest.fixture
def batches(monkeypatch):
    """Every batch that goes through the model."""
    seen = []
    generate = Summarizer.generate

    def recording(self, sources, nbest):
        seen.append([source.tokens for source in sources])
        return generate(self, sources, nbest)

    monkeypatch.setattr(Summarizer, "generate", recording)
    return seen


def words_of(source: Path, output: Path, *options) -> list:
    short = ["--window", 7, "--batch-size", 3, "--max-len-b", 8]
    return [*GREEDY, *short, "--input", source, "--output", output, *options]


def run_shards(call, source: Path, total: int, *options) -> list[Path]:
    parts = [source.with_name(f"part.{number}{source.suffix}") for number in range(1, total + 1)]
    for number, part in enumerate(parts, start=1):
        assert call(summarize, *words_of(source, part, "--shard", f"{number}/{total}", *options)) is None
    return parts


def write_texts(folder: Path, suffix: str) -> Path:
    texts = [text[:80] for text in (*TEXTS[:9], "", *TEXTS[9:])]
    lines = texts if suffix == ".txt" else [json.dumps({"id": n, "text": t}) for n, t in enumerate(texts)]
    return write_lines(folder / f"in{suffix}", lines)


# ---- merging


@pytest.mark.parametrize(("suffix", "total"), [(".txt", 1), (".txt", 3), (".jsonl", 2), (".txt", 6)])
def test_merged_shards_are_the_file_of_a_single_run(call, tmp_path, batches, suffix, total):
    """25 texts are 4 windows of 7, so that 6 shards leave two with nothing to do."""
    source, alone, merged = write_texts(tmp_path, suffix), tmp_path / f"alone{suffix}", tmp_path / f"all{suffix}"
    assert call(summarize, *words_of(source, alone)) is None
    batches_alone = batches.copy()
    batches.clear()
    parts = run_shards(call, source, total)
    assert call(merge, *parts, "--output", merged) is None
    assert merged.read_bytes() == alone.read_bytes()
    assert len(batches) > 8 and sorted(batches) == sorted(batches_alone)


def test_a_shard_with_nothing_to_do_says_so(call, tmp_path, capsys):
    source = write_lines(tmp_path / "in", TEXTS[:3])
    run_shards(call, source, 2)
    assert "shard 2/2 has nothing to do" in capsys.readouterr().err
    assert (tmp_path / "part.2").read_bytes() == b""


@given(texts=st.integers(0, 500), size=st.integers(1, 50), total=st.integers(1, 20))
def test_every_text_is_of_one_shard(texts, size, total):
    shards = [Shard(number, total) for number in range(1, total + 1)]
    owners = [[shard for shard in shards if shard.takes(text // size)] for text in range(texts)]
    assert all(len(owner) == 1 for owner in owners)
    assert [shard.share(texts, size) for shard in shards] == [owners.count([shard]) for shard in shards]


def test_a_pattern_may_name_records_too(call, three_parts, tmp_path):
    for pattern in ("part.*", "part.*.txt"):
        assert call(merge, *three_parts.glob(pattern), "--output", tmp_path / "all", "--overwrite") is None
        assert len((tmp_path / "all").read_bytes().splitlines()) == 25


def test_there_may_be_more_shards_than_files_a_process_can_open(call, tmp_path):
    parts = run_shards(call, write_texts(tmp_path, ".txt"), 12)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd"))) if Path("/proc/self/fd").exists() else soft - 6
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 6, hard))
    try:
        assert call(merge, *parts, "--output", tmp_path / "all") is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_large_input_is_never_in_memory(call, tmp_path):
    """8 MB of texts in 1 MB: a window and what tracing takes."""
    line = b'{"text": "%s"}\n' % (b"x" * 400)
    (tmp_path / "in.jsonl").write_bytes(line * 20_000)
    tracemalloc.start()
    texts = Texts(str(tmp_path / "in.jsonl"), True, None)
    count = sum(len(window) for _, window in texts.windows(512, Shard(2, 5)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == Shard(2, 5).share(20_000, 512)
    assert peak < 1_000_000


# ---- going on


def test_a_shard_goes_on_alone_and_is_not_merged_before_it_is_done(call, tmp_path, monkeypatch):
    source = write_texts(tmp_path, ".txt")
    assert call(summarize, *words_of(source, tmp_path / "alone")) is None
    first, second = run_shards(call, source, 2)
    second_words = words_of(source, second, "--shard", "2/2")
    finished = second.read_bytes()
    with monkeypatch.context() as patch:
        interrupted_after(2, patch)
        assert call(summarize, *second_words, "--overwrite") == "\nInterrupted: continue with --resume."
    merging = [first, second, "--output", tmp_path / "all"]
    assert "part.2.txt is unfinished" in call(merge, *merging)
    assert "another shard" in call(summarize, *words_of(source, second, "--shard", "1/2", "--resume"))
    assert "another shard" in call(summarize, *words_of(source, second, "--resume"))
    assert call(summarize, *second_words, "--resume") is None
    assert second.read_bytes() == finished
    assert call(merge, *merging) is None
    assert (tmp_path / "all").read_bytes() == (tmp_path / "alone").read_bytes()


def test_a_finished_shard_is_complete_only_for_itself(call, tmp_path, capsys):
    source = write_texts(tmp_path, ".txt")
    first, second = run_shards(call, source, 2)
    assert call(summarize, *words_of(source, first, "--shard", "1/2", "--resume")) is None
    assert "nothing to resume" in capsys.readouterr().err
    assert "another shard" in call(summarize, *words_of(source, first, "--shard", "2/2", "--resume"))
    assert "another set of options" in call(
        summarize, *words_of(source, second, "--shard", "2/2", "--resume", "--max-len-b", 9, "--beam", 2)
    )


# ---- refusals


@pytest.fixture(scope="module")
def three_parts(tmp_path_factory) -> Path:
    """A folder with three finished shards."""
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Summarizer, "load", load_once)
        run_shards(lambda script, *words: exit_of(script, words, patch), write_texts(folder, ".txt"), 3)
    return folder


def swap_for(folder: Path, call, source: Path, *options) -> None:
    """Does shard 2 of 3 again, differently."""
    part = folder / "part.2.txt"
    assert call(summarize, *words_of(source, part, "--shard", "2/3", "--overwrite", *options)) is None


def of_another_input(folder, call, source):
    swap_for(folder, call, write_lines(folder / "other.txt", TEXTS[::-1]))


def of_another_model(folder, call, source):
    model = folder / "model"
    shutil.copytree(DEMO, model)
    (model / "dict.target.txt").write_text((model / "dict.txt").read_text(encoding="utf-8"), encoding="utf-8")
    swap_for(folder, call, source, "--model", model)


def with_other_options(folder, call, source):
    swap_for(folder, call, source, "--max-len-b", 5)


def in_another_form(folder, call, source):
    without_one(folder, call, source)
    part = folder / "part.2.jsonl"
    assert call(summarize, *words_of(source, part, "--shard", "2/3")) is None


def without_one(folder, call, source):
    (folder / "part.2.txt").unlink()
    (folder / "part.2.txt.job").unlink()


def with_a_copy(folder, call, source):
    for suffix in ("", ".job"):
        shutil.copy(folder / f"part.2.txt{suffix}", folder / f"part.copy.txt{suffix}")


def with_one_of_another_number(folder, call, source):
    swap_for(folder, call, source, "--shard", "2/4")


def with_one_cut_short(folder, call, source):
    lines = (folder / "part.2.txt").read_bytes().splitlines(keepends=True)
    (folder / "part.2.txt").write_bytes(b"".join(lines[:-1]))


def with_one_grown(folder, call, source):
    with (folder / "part.2.txt").open("a") as file:
        file.write("one more\n")


def with_one_edited(folder, call, source):
    content = bytearray((folder / "part.2.txt").read_bytes())
    content[10] ^= 1
    (folder / "part.2.txt").write_bytes(content)


def without_a_record(folder, call, source):
    (folder / "part.2.txt.job").unlink()


def with_a_damaged_record(folder, call, source):
    record = (folder / "part.2.txt.job").read_bytes()
    (folder / "part.2.txt.job").write_bytes(record.replace(b"window", b"windov"))


def without_its_output(folder, call, source):
    (folder / "part.2.txt").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_another_input, "part.2.txt was made from another input than"),
        (of_another_model, "part.2.txt was made from another model than"),
        (with_other_options, "part.2.txt was made from another set of options than"),
        (in_another_form, "part.2.jsonl was made from another form of output than"),
        (without_one, "the set is incomplete: of 3 shards 1 are missing (2)"),
        (with_a_copy, "overlap: both are shard 2/3"),
        (with_one_of_another_number, "is shard 2/4 but"),
        (with_one_cut_short, "part.2.txt is not what its shard wrote"),
        (with_one_grown, "part.2.txt is not what its shard wrote"),
        (with_one_edited, "part.2.txt is not what its shard wrote"),
        (without_a_record, "part.2.txt is not the finished output of a shard"),
        (with_a_damaged_record, "part.2.txt is not the finished output of a shard"),
        (without_its_output, "part.2.txt is not the finished output of a shard"),
    ],
)
def test_a_set_that_is_not_one_job_is_refused_in_one_line(call, three_parts, tmp_path, spoil, message):
    folder = Path(shutil.copytree(three_parts, tmp_path / "copy"))
    spoil(folder, call, folder / "in.txt")
    before = sorted(folder.iterdir())
    said = call(merge, *folder.glob("part.*"), "--output", folder / "all")
    assert message in said and said.startswith("merge: error: ") and "\n" not in said
    assert sorted(folder.iterdir()) == before


def test_a_file_is_replaced_only_when_asked_and_only_by_a_whole_one(call, three_parts, tmp_path, monkeypatch):
    shutil.copytree(three_parts, tmp_path, dirs_exist_ok=True)
    parts = sorted(tmp_path.glob("part.*.txt"))
    merged = write_lines(tmp_path / "all", ["what was there"])
    before = sorted(tmp_path.iterdir())
    words = [*parts, "--output", merged]
    assert "exists" in call(merge, *words)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        assert "No space left on device" in call(merge, *words, "--overwrite")
    assert merged.read_text() == "what was there\n" and sorted(tmp_path.iterdir()) == before
    assert call(merge, *words, "--overwrite") is None
    assert merged.read_text() != "what was there\n" and sorted(tmp_path.iterdir()) == before
    assert "is a shard" in call(merge, *parts, "--output", parts[0])
    assert "there is no folder" in call(merge, *parts, "--output", tmp_path / "no" / "all")


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1/0", "1", "-1/2", "a/b", "1/2/3", "¹/2"])
def test_a_shard_that_does_not_exist_is_one_line(call, tmp_path, shard):
    source = write_lines(tmp_path / "in", TEXTS[:1])
    said = call(summarize, *words_of(source, tmp_path / "out", f"--shard={shard}"))
    assert said == f"summarize: error: invalid --shard {shard}: of 16 shards the first is 1/16 and the last 16/16"


def test_a_shard_has_a_file_of_its_own(call, tmp_path, capsys):
    source = write_lines(tmp_path / "in", TEXTS[:1])
    assert call(summarize, *GREEDY, "--input", source, "--shard", "1/2") == 2
    assert call(summarize, *words_of(source, tmp_path / "out", "--shard", "1/2", "--reference", source)) == 2
    assert "--shard needs an --output and no --reference" in capsys.readouterr().err
