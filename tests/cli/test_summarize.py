"""Text in, summaries out: `Summarizer`, and `fairseq-el summarize`, which loses nothing whatever happens."""
# Over 400 lines: all promises of one command share its fixtures.

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from fairseq_el import lazy_import
from fairseq_el.cli import summarize
from fairseq_el.errors import UserError
from fairseq_el.jobs import presets
from fairseq_el.jobs.journal import Journal
from fairseq_el.jobs.results import as_summary
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.text import rouge
from helpers import (
    ARTICLES,
    DEMO,
    GREEDY,
    LONGEST_SOURCE,
    REFERENCES,
    TEXTS,
    exit_of,
    interrupted_after,
    job,
    load_once,
    make_language_model,
    read_lines,
    write_gpt2_encoding,
    write_lines,
)
from make_checkpoint import make_checkpoint


@pytest.fixture
def command(monkeypatch):
    """`fairseq-el summarize` in this process; returns what it exits with, None if all is well."""
    monkeypatch.setattr(Summarizer, "load", load_once)
    return lambda *words: exit_of(summarize, words, monkeypatch)


@pytest.fixture(scope="module")
def greedy():
    return Summarizer.load("demo", "demo", "greedy")


@pytest.fixture(scope="module")
def summaries(greedy):
    return greedy(TEXTS)


# ---- order and content


def test_summaries_are_in_the_order_of_the_texts_and_do_not_depend_on_batches(command, tmp_path, summaries):
    assert len(set(summaries)) > 20 and all(summaries)
    small_batches = ["--batch-size", 3, "--el-memory-budget", "1M"]
    for texts, options in ((TEXTS, []), (TEXTS[::-1], ["--max-tokens", 500]), (TEXTS, small_batches)):
        assert command(*job(tmp_path, texts, *options, "--overwrite")) is None
        assert read_lines(tmp_path / "out") == [summaries[TEXTS.index(text)] for text in texts]


def test_blank_texts_get_empty_summaries_in_place(command, tmp_path, summaries):
    texts = ["", TEXTS[0], "  \t ", TEXTS[1], "", ""]
    command(*job(tmp_path, texts))
    assert (tmp_path / "out").read_text(encoding="utf-8") == f"\n{summaries[0]}\n\n{summaries[1]}\n\n\n"


@pytest.mark.parametrize("content", ["", "\n"])
def test_nothing_in_nothing_out(command, tmp_path, content):
    (tmp_path / "in").write_text(content)
    assert command(*GREEDY, "--input", tmp_path / "in", "--output", tmp_path / "out") is None
    assert (tmp_path / "out").read_text() == content


@pytest.mark.parametrize("search", ["beam", "diverse"])
def test_summaries_are_those_of_stock_attention(command, tmp_path, search):
    for system, chosen in (("stock", ["--stock"]), ("always", ["--el-attention", "always"])):
        options = ["--search", search, *chosen, "--output", tmp_path / system]
        assert command(*job(tmp_path, TEXTS[:12], *options)) is None
    assert (tmp_path / "stock").read_bytes() == (tmp_path / "always").read_bytes()


def test_long_texts_are_cut_and_counted_in_one_warning(command, tmp_path, capsys, greedy):
    word = "library "
    texts = [word * (LONGEST_SOURCE + 1), "A short text.", word * 2000, word * LONGEST_SOURCE]
    command(*job(tmp_path, texts))
    warning = f"warning: 2 of 4 texts were longer than {LONGEST_SOURCE} tokens; only the beginning was read"
    assert re.findall("warning: .*", capsys.readouterr().err) == [warning]
    lines = read_lines(tmp_path / "out")
    assert lines[0] == lines[2] == lines[3] == greedy([word * LONGEST_SOURCE])[0]


def test_half_precision_changes_nothing_where_weights_are_exact_in_it(command, tmp_path, summaries):
    command(*job(tmp_path, TEXTS, "--fp16", "--cpu"))
    assert read_lines(tmp_path / "out") == summaries


# ---- JSON


@pytest.mark.parametrize("precision", ["int8", "bf16", "auto"])
def test_a_reduced_precision_is_named_before_anything_else(command, tmp_path, capfd, precision):
    """Also one of a preset, and not where stock fairseq ignores it."""
    preset = tmp_path / "own.yaml"
    preset.write_text(f"el_precision: {precision}\nsearches: {{greedy: {{beam: 1}}}}\n")
    for words in (["--precision", precision], ["--preset", preset], ["--precision", precision, "--stock"]):
        assert command(*job(tmp_path, TEXTS[:1], *words, "--cpu", "--overwrite")) is None
        said = capfd.readouterr().err
        if precision == "auto" or "--stock" in words:
            assert "not exact" not in said
        else:
            assert said.startswith(f"summarize: precision {precision}, not exact: ")


def test_objects_come_out_as_they_were_with_a_summary(command, tmp_path, summaries):
    records = [
        {"id": "a", "article": TEXTS[0], "n": 1.5, "tags": ["é", None]},
        {"text": f"\ud800 {TEXTS[1]}".replace(" ", "\n"), "half": "\udfff"},
        {"document": "", "id": 7},
    ]
    write_lines(tmp_path / "in.jsonl", map(json.dumps, records))
    assert command(*GREEDY, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl") is None
    found = [json.loads(line) for line in read_lines(tmp_path / "out.jsonl")]
    added = [{name: record.pop(name) for name in ("summary", "score")} for record in found]
    assert found == records
    assert added[0]["summary"] == summaries[0] and added[1]["summary"]
    assert all(-9 < record["score"] < 0 for record in added[:2]) and added[2] == {"summary": "", "score": None}


def test_fields_can_be_named(command, tmp_path, summaries):
    record = {"body": TEXTS[0], "text": "other", "summary": "reference", "score": 1}
    write_lines(tmp_path / "in.jsonl", [json.dumps(record)])
    words = [*GREEDY, "--input", tmp_path / "in.jsonl", "--text-field", "body"]
    assert "has a field 'summary' already" in command(*words, "--output", tmp_path / "out.jsonl")
    assert command(*words, "--summary-field", "short", "--output", tmp_path / "out.jsonl") is None
    found = json.loads((tmp_path / "out.jsonl").read_text())
    assert found["short"] == summaries[0] and found["short_score"] < 0 and found | record == found
    assert command(*words, "--output", tmp_path / "out.txt") is None
    assert read_lines(tmp_path / "out.txt") == [summaries[0]]


def test_text_can_become_objects(command, tmp_path, summaries):
    command(*GREEDY, "--input", write_lines(tmp_path / "in", TEXTS[:2]), "--output", tmp_path / "out.jsonl")
    found = [json.loads(line) for line in read_lines(tmp_path / "out.jsonl")]
    assert [(record["id"], record["summary"]) for record in found] == [(1, summaries[0]), (2, summaries[1])]


# ---- as a command


def test_what_is_piped_in_is_summarised_and_printed(command, summaries, monkeypatch, capsysbinary):
    piped, pipe = os.pipe()
    os.write(pipe, "\n".join(TEXTS[:3]).encode())
    os.close(pipe)
    with open(piped, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert command(*GREEDY) is None
    out, err = (stream.decode() for stream in capsysbinary.readouterr())
    assert out.splitlines() == summaries[:3]
    assert re.search(r"100% .* 3/3 \[\d\d:\d\d<00:00, +[\d.]+ sentences/s\]", err)


def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_been(command, tmp_path, monkeypatch):
    texts = ["", *TEXTS]
    words = [*GREEDY, "--input", write_lines(tmp_path / "in", texts), "--max-tokens", 150]
    assert command(*words, "--output", tmp_path / "undisturbed.txt") is None

    output, journal = tmp_path / "out.txt", tmp_path / "out.txt.journal"
    killed = subprocess.Popen(
        [sys.executable, "-m", "fairseq_el", "summarize", *map(str, words), "--output", output],
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
        assert killed.poll() is None and time.monotonic() < deadline, killed.stderr.read()
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    said = killed.communicate()[1].decode()
    assert not re.search("warning|error|traceback|INFO", said, re.IGNORECASE)
    assert not output.exists()
    finished = journal.read_bytes().count(b"\n") - 1

    assert "--resume" in command(*words, "--output", output)
    assert "another set of options" in command(*words, "--output", output, "--resume", "--beam", 2)
    batches = []
    generate = Summarizer.generate
    count = lambda self, sources, nbest: batches.append(sources) or generate(self, sources, nbest)  # noqa: E731
    monkeypatch.setattr(Summarizer, "generate", count)
    assert command(*words, "--output", output, "--resume") is None
    preset = presets.load("demo", "greedy").changed(max_tokens=150)
    small = Summarizer.load("demo", preset)
    assert 0 < len(batches) == len(small.batcher.batches([small.batcher.encode(text) for text in texts])) - finished
    assert output.read_bytes() == (tmp_path / "undisturbed.txt").read_bytes()
    names = ["in", "out.txt", "out.txt.job", "undisturbed.txt", "undisturbed.txt.job"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_lazy_module_is_imported_by_the_first_call():
    assert lazy_import.LazyModule("statistics").mean([1, 2]) == 1.5
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        lazy_import.LazyModule("nothing").at_all()


def test_an_interrupted_run_says_how_to_go_on_and_overwrite_starts_again(
    command, tmp_path, monkeypatch, summaries
):
    words = job(tmp_path, TEXTS, "--batch-size", 4)
    with monkeypatch.context() as patch:
        interrupted_after(2, patch)
        assert command(*words) == "\nInterrupted: continue with --resume."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.journal"]
    write_lines(tmp_path / "other", TEXTS[:5])
    assert "another input" in command(*words, "--resume", "--input", tmp_path / "other")
    assert command(*words, "--overwrite", "--input", tmp_path / "other") is None
    assert read_lines(tmp_path / "out") == summaries[:5]
    assert "exists" in command(*words)
    assert "another input" in command(*words, "--resume")
    assert read_lines(tmp_path / "out") == summaries[:5]
    assert command(*words, "--overwrite") is None
    assert read_lines(tmp_path / "out") == summaries


def test_a_finished_output_is_complete_only_for_its_own_job(command, tmp_path, capsys, summaries):
    words = job(tmp_path, TEXTS[:3], "--resume")
    assert command(*words) is None and read_lines(tmp_path / "out") == summaries[:3]  # there was nothing to resume
    assert command(*words) is None
    assert "out is complete: nothing to resume" in capsys.readouterr().err
    assert re.search("out is of a run with another set of options: .*--overwrite", command(*words, "--max-len-b", 3))
    write_lines(tmp_path / "in", TEXTS[:2])
    assert "out is of a run with another input" in command(*words)
    write_lines(tmp_path / "in", TEXTS[:3])
    write_lines(tmp_path / "out", ["edited", *summaries[1:3]])
    assert "out was changed after it was written" in command(*words)
    (tmp_path / "out.job").unlink()
    assert "out exists without a journal and without out.job, so --resume can't tell" in command(*words)
    assert read_lines(tmp_path / "out")[0] == "edited"
    (tmp_path / "out").unlink()
    assert command(*words) is None and read_lines(tmp_path / "out") == summaries[:3]


@pytest.mark.parametrize("batches", [1, 4, 5, 9])  # in and between windows of 4 batches and a rest
def test_large_files_are_read_and_resumed_in_windows(command, tmp_path, summaries, monkeypatch, batches):
    words = job(tmp_path, TEXTS, "--batch-size", 2, "--window", 7)
    with monkeypatch.context() as patch:
        interrupted_after(batches, patch)
        assert "--resume" in command(*words)
    assert command(*words, "--resume") is None
    assert read_lines(tmp_path / "out") == summaries


def test_a_run_that_failed_before_its_first_batch_leaves_nothing_behind(command, tmp_path, monkeypatch):
    words = job(tmp_path, TEXTS[:2])
    interrupted_after(0, monkeypatch)
    assert command(*words) == "\nInterrupted."
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("room", [5, 8], ids=["in the middle", "at the end"])
def test_a_full_disk_loses_nothing_that_was_finished(command, tmp_path, monkeypatch, summaries, room):
    words = job(tmp_path, TEXTS, "--batch-size", 4)
    sync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = command(*words)
    assert "No space left on device" in message and "--resume" in message and "\n" not in message
    assert command(*words, "--resume") is None
    assert read_lines(tmp_path / "out") == summaries


# ---- the journal


JOB = {"input": "1", "model": "2"}


def make_journal(path: Path, records=5) -> list:
    journal = Journal(path, JOB)
    written = [{"lines": [n], "summaries": [f"é{n}\n"]} for n in range(records)]
    for record in written:
        journal.append(record)
    journal.close()
    return written


def test_a_torn_record_is_dropped_wherever_it_is_torn(tmp_path):
    path = tmp_path / "journal"
    written = make_journal(path)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        journal = Journal(path, JOB, resume=True)
        assert list(journal.records()) == written[:-1]
        journal.append(written[-1])
        journal.close()
        assert path.read_bytes() == whole


def test_what_follows_a_damaged_record_is_not_trusted(tmp_path):
    path = tmp_path / "journal"
    written = make_journal(path)
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b'"lines": [2]') + 10] ^= 1
    path.write_bytes(damaged)
    journal = Journal(path, JOB, resume=True)
    assert list(journal.records()) == written[:2]
    journal.close()


def test_a_journal_torn_at_its_very_beginning_begins_again(tmp_path):
    path = tmp_path / "journal"
    make_journal(path, 1)
    path.write_bytes(path.read_bytes()[:10])
    Journal(path, JOB).append("record")
    assert list(Journal(path, JOB, resume=True).records()) == ["record"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"job": JOB}, "did not finish: continue it with --resume, or start again with --overwrite"),
        ({"job": JOB | {"model": "3"}, "resume": True}, "another model:"),
        ({"job": {"input": "0", "model": "3"}, "resume": True}, "another input and model:"),
    ],
)
def test_a_journal_is_never_continued_by_mistake(tmp_path, options, message):
    make_journal(tmp_path / "journal")
    before = (tmp_path / "journal").read_bytes()
    with pytest.raises(UserError, match=message):
        Journal(tmp_path / "journal", **options)
    assert (tmp_path / "journal").read_bytes() == before


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    (tmp_path / "journal").write_text("my diary\n")
    with pytest.raises(UserError, match="not the journal of a run"):
        Journal(tmp_path / "journal", JOB, resume=True)
    assert (tmp_path / "journal").read_text() == "my diary\n"


def test_two_runs_cannot_share_a_journal(tmp_path):
    first = Journal(tmp_path / "journal", JOB)
    with pytest.raises(UserError, match="in use by another run"):
        Journal(tmp_path / "journal", JOB, overwrite=True)
    first.append(1)
    first.close()
    assert list(Journal(tmp_path / "journal", JOB, resume=True).records()) == [1]


# ---- references


def test_references_are_scored_at_the_end(command, tmp_path, summaries, capsys):
    words = job(tmp_path, TEXTS)
    assert command(*words, "--reference", write_lines(tmp_path / "references", REFERENCES)) is None
    assert capsys.readouterr().out == f"24 pairs: {rouge.describe(rouge.rouge(REFERENCES, summaries))}\n"
    too_few = write_lines(tmp_path / "references", REFERENCES[:-1])
    assert "has 23 references" in command(*words, "--overwrite", "--reference", too_few)


# ---- mistakes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.txt", b"good\n\xff\xfe bad\n", r"line 2 of .*in\.txt is not UTF-8 \(byte 1\).*iconv"),
        ("in.jsonl", b'{"text": "good"}\n\xe9\n', r"line 2 of .*in\.jsonl is not UTF-8"),
        ("in.jsonl", b'{"text": "good"}\n{"text": \n', r"line 2 of .*in\.jsonl is not JSON"),
        ("in.jsonl", b"[" * 100_000, r"line 1 of .*in\.jsonl is not JSON"),
        ("in.json", b'[\n{"text": "good"}\n]\n', r"line 1 of (.*in\.json) is not JSON lines but a JSON array: .* \1 >"),
        ("in.jsonl", b'[{"text": "good"}]', r"line 1 .* a JSON array: write one object per line, .* jq -c '.\[\]' "),
        ("in.jsonl", b'"text"\n', r"line 1 of .*in\.jsonl is not a JSON object"),
        ("in.jsonl", b'{"body": "good"}\n', r"line 1 .* no text in a field text or .*: body.*--text-field"),
        ("in.jsonl", b'{"text": null}\n', r"line 1 .* no text in a field"),
    ],
)
def test_bad_lines_are_named_before_anything_is_done(command, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    said = command(*GREEDY, "--input", tmp_path / name, "--output", tmp_path / "out")
    assert re.match("summarize: error: " + message, said) and "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "there is no checkpoint nowhere"),
        (["--bpe-dir", "{tmp}"], "neither sentencepiece.model nor encoder.json and vocab.bpe.*--bpe"),
        (["--preset", "cnn"], "there is no preset 'cnn'"),
        (["--preset", "gpt2_cnndm"], "trained for translation, but .* gpt2_cnndm is for language_modeling"),
        (["--search", "topk"], "has no search 'topk'"),
        (["--beem", "2"], "--beem is not an option; did you mean beam"),
        (["--beam", "0"], "--beam 0 is out of range: at least 1"),
        (["--beam", "two"], "--beam two is not valid"),
        (["articles.txt"], "'articles.txt' is not an option"),
        (["--input", "nothing.txt"], "nothing.txt does not exist"),
        (["--output", "{tmp}/no/out.txt"], "there is no folder .*no"),
        (["--output", "{tmp}"], "is a folder"),
        (["--el-memory-budget", "lots"], "'lots' is not a size"),
        (["--reference", "nothing.txt"], "nothing.txt does not exist"),
        (["--preset", "cnndm", "--min-len", "200"], "min_len"),
    ],
)
def test_mistakes_are_one_line(command, tmp_path, words, message):
    said = command(*job(tmp_path, TEXTS[:1], *(word.replace("{tmp}", str(tmp_path)) for word in words)))
    assert re.match(f"summarize: error: .*{message}", said) and "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_tokenizer_of_another_model_is_refused(command, tmp_path, greedy):
    write_gpt2_encoding(tmp_path / "bpe")
    said = command(*job(tmp_path, TEXTS[:1]), "--bpe-dir", tmp_path / "bpe")
    assert re.match(r"summarize: error: \S+encoder.json and \S+vocab.bpe does not belong to the model: \d+% of", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bpe", "in"]
    with pytest.raises(UserError, match="does not belong to the model"):
        Summarizer.load("demo", bpe_dir=tmp_path / "bpe")([TEXTS[0]])


def test_a_text_in_another_script_is_only_a_warning(command, tmp_path, capsys, caplog, greedy):
    texts = ["你好世界这是一个测试", TEXTS[0]]
    assert len(greedy(texts)) == 2 and "mostly of pieces that the model does not know" in caplog.text
    for number, given in enumerate((texts[:1], texts)):
        assert command(*job(tmp_path, given), "--overwrite") is None
        assert f"1 of {number + 1} text" in (said := capsys.readouterr().err) and "another script" in said


def test_a_memory_budget_too_small_for_one_text_says_what_is_needed(command, tmp_path):
    said = command(*job(tmp_path, TEXTS[:1]), "--el-memory-budget", "1K")
    assert said.startswith("summarize: error: el_memory_budget 1K can't hold the state of one text, which takes ")
    least = int(re.search(r"set at least (\d+)K", said)[1])
    assert "can't hold" in command(*job(tmp_path, TEXTS[:1]), "--el-memory-budget", f"{least - 1}K")
    for enough in (f"{least}K", "0"):
        assert command(*job(tmp_path, TEXTS[:1]), "--el-memory-budget", enough, "--overwrite") is None


def test_threads_can_be_set(command, tmp_path):
    before = torch.get_num_threads()
    try:
        assert command(*job(tmp_path, TEXTS[:1]), "--threads", 3) is None
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_damaged_checkpoint_is_one_line(command, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("dict.txt", "sentencepiece.model"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    (folder / "model.pt").write_bytes((DEMO / "model.pt").read_bytes()[:1000])
    said = command("--model", folder, "--preset", "demo", "--input", write_lines(tmp_path / "in", TEXTS[:1]))
    assert re.match("summarize: error: .*model.pt is not a complete checkpoint", said)


def test_hostile_texts_get_some_summary(greedy):
    texts = ["\0", "a\0b", "\ud800", "\u202eשלום", "\u200b\ufeff", "a\u2028b\rc", "🙂" * 1000, "x" * 10**7]
    found = greedy(texts)
    assert len(found) == len(texts) and all(len(text.splitlines()) <= 1 for text in found)


# ---- in Python


SNIPPET = """
    from fairseq_el import Summarizer

    summarize = Summarizer.load("demo", preset="xsum")
    print(summarize(["long text ..."]))
"""


def test_the_snippet_works_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent(SNIPPET).replace("long text ...", TEXTS[0]), {})
    assert re.fullmatch(r"\['\w.*'\]\n", capsys.readouterr().out)


def test_one_text_gives_one_summary_and_a_list_gives_a_list(greedy, summaries):
    assert greedy(TEXTS[0]) == summaries[0] and greedy("") == ""
    assert greedy([TEXTS[0]]) == [summaries[0]] and greedy([]) == []
    assert greedy.detailed(TEXTS[0]) == greedy.detailed([TEXTS[0]])[0]


def test_threads_share_a_summarizer(greedy, summaries):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: greedy([text])[0], TEXTS[:8]))
    assert found == summaries[:8]


def test_options_change_the_preset_and_the_task_of_the_model():
    summarizer = Summarizer.load("demo", "xsum", beam=2, el_attention="never", el_memory_budget="1M")
    assert summarizer.generator.beam_size == 2
    assert summarizer.generator.policy.form == "never" and summarizer.generator.policy.budget == 2**20
    with pytest.raises(UserError, match="did you mean beam"):
        Summarizer.load("demo", "xsum", beem=2)


def test_batches_are_of_similar_length_within_the_budget():
    summarizer = Summarizer.load("demo", "demo", batch_size=None, max_tokens=600)
    sources = [summarizer.batcher.encode(text) for text in [*TEXTS, ""]]
    batches = summarizer.batcher.batches(sources)
    assert sorted(index for batch in batches for index in batch) == list(range(24))
    lengths = [[len(sources[index].tokens) for index in batch] for batch in batches]
    assert sum(lengths, []) == sorted(sum(lengths, []), reverse=True)
    assert all(len(batch) * (max(batch) + 1) <= 600 or len(batch) == 1 for batch in lengths)
    assert all((len(a) + 1) * (max(a) + 1) > 600 for a in lengths[:-1])  # and none could take one more


# ---- GPT-2's encoding: BART and language models


@pytest.fixture(scope="module")
def language_model(tmp_path_factory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("gpt2") / "model")


def test_bart_reads_gpt2s_encoding_from_its_folder_or_another(command, tmp_path):
    settings = {
        "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 32, "decoder_embed_dim": 32,
        "encoder_ffn_embed_dim": 64, "decoder_ffn_embed_dim": 64, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "max_source_positions": 128, "max_target_positions": 128,
    }  # fmt: skip
    rows = write_gpt2_encoding(tmp_path / "bpe")
    make_checkpoint("bart_base", tmp_path / "bart", vocab=rows, settings=settings, legacy=True)
    (tmp_path / "bart" / "dict.txt").unlink()  # released folders have dict.source.txt and dict.target.txt
    model = ["--model", tmp_path / "bart", "--preset", "xsum", "--search", "beam"]
    words = job(tmp_path, ["", *ARTICLES[1:]], *model, "--beam", 2, "--max-len-b", 30)
    assert "encoder.json" in command(*words)
    words += ["--bpe-dir", tmp_path / "bpe", "--el-stock-ngrams"]
    assert command(*words) is None
    assert command(*words, "--output", tmp_path / "stock", "--stock") is None
    assert (tmp_path / "out").read_bytes() == (tmp_path / "stock").read_bytes()
    assert len((tmp_path / "out").read_text(encoding="utf-8")) > 40


def test_a_prompt_is_the_beginning_of_the_article_and_the_suffix(language_model):
    summarizer = Summarizer.load(language_model, "gpt2_cnndm", "greedy")
    symbols = summarizer.task.source_dictionary.symbols
    tokens = [summarizer.batcher.encode(article).tokens for article in ARTICLES]
    prompts = [summarizer.tokenizer.decode([symbols[token] for token in prompt]) for prompt in tokens]
    assert prompts[0] == "The cat sat there. It slept.\nTL;DR:"
    assert prompts[2].endswith("\nTL;DR:") and ARTICLES[2].startswith(prompts[2].removesuffix("\nTL;DR:"))
    assert len(tokens[2]) == 300 - 1 - 200  # what is left of the model's positions beside 200 new tokens
    assert summarizer.batcher.encode(ARTICLES[2]).is_cut and not summarizer.batcher.encode(ARTICLES[1]).is_cut
    shorter = Summarizer.load(language_model, "gpt2_cnndm", "greedy", longest_source=20)
    assert shorter.batcher.encode(ARTICLES[2]).tokens == tokens[2][:15] + tokens[2][-5:]
    with pytest.raises(UserError, match="no room for text"):
        Summarizer.load(language_model, "gpt2_cnndm", max_new_tokens=295)


def test_the_summary_is_what_stock_fairseq_writes_behind_the_prompt(language_model):
    summarizer = Summarizer.load(language_model, "gpt2_cnndm", "greedy", max_new_tokens=20)
    task = LanguageModelingTask.setup_task(LanguageModelingConfig(data=str(language_model)))
    models, _ = checkpoint_utils.load_model_ensemble([str(language_model / "model.pt")], task=task)
    models[0].float()
    expected = []
    for article in ARTICLES:
        prompt = [2, *summarizer.batcher.encode(article).tokens]
        settings = argparse.Namespace(beam=1, max_len_a=0, max_len_b=len(prompt) - 1 + 20)
        inputs = {"src_tokens": torch.tensor([prompt]), "src_lengths": torch.tensor([len(prompt)])}
        generator = task.build_generator(models, settings)
        found = task.inference_step(generator, models, {"net_input": inputs})[0][0]["tokens"]
        pieces = task.target_dictionary.string(found[len(prompt) - 1 :]).split()
        expected.append(as_summary(summarizer.tokenizer.decode(pieces), summarizer.preset))
    assert summarizer(ARTICLES) == expected
    assert all(expected) and len(set(expected)) == 3


def test_of_a_sampled_text_the_first_three_sentences_are_the_summary(language_model, monkeypatch):
    summarizer = Summarizer.load(language_model, "gpt2_cnndm", "topk")
    written = " It rained in the U.S. on Monday.\n\nMr. Who slept! Then the cat sat. A fourth sentence."
    source = summarizer.batcher.encode(ARTICLES[0])
    tokens = [*source.tokens, *summarizer.batcher._indices(summarizer.tokenizer.encode(written)), 2]
    scores = torch.zeros(len(tokens))
    hypothesis = {"tokens": torch.tensor(tokens), "positional_scores": scores, "score": scores.sum()}
    monkeypatch.setattr(summarizer.task, "inference_step", lambda *_: [[hypothesis]])
    assert summarizer([ARTICLES[0]]) == ["It rained in the U.S. on Monday. Mr. Who slept! Then the cat sat."]
    all_of_it = presets.load("gpt2_cnndm", "greedy")
    assert as_summary(written, all_of_it).endswith("Then the cat sat. A fourth sentence.")


def test_samples_depend_on_the_text_and_the_seed_alone(language_model):
    options = {"max_new_tokens": 12, "keep_sentences": None, "longest_source": 30}
    sampler = Summarizer.load(language_model, "gpt2_cnndm", "topk", **options)
    together = sampler(ARTICLES)
    assert together == [sampler([article])[0] for article in ARTICLES] == sampler(ARTICLES[::-1])[::-1]
    assert together != Summarizer.load(language_model, "gpt2_cnndm", "topk", seed=2, **options)(ARTICLES)
    assert together != Summarizer.load(language_model, "gpt2_cnndm", "greedy", **options)(ARTICLES)


def test_a_language_model_through_the_command(command, language_model, tmp_path):
    words = job(tmp_path, ["", "A text."], "--model", language_model, "--preset", "gpt2_cnndm")
    assert "stock fairseq can't" in command(*words, "--stock")
    assert command(*words, "--max-new-tokens", 10, "--search", "topk") is None
    assert len(read_lines(tmp_path / "out")) == 2
