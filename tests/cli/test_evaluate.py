"""`fairseq-el evaluate`: one command a row, and the row says what was measured."""

import json
import re

import pytest
from fairseq.data import indexed_dataset

from demo import CommandFailed
from fairseq_el.cli import evaluate
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.text import rouge
from helpers import DEMO, LONGEST_SOURCE, REFERENCES, TEXTS, exit_of, make_language_model, write_lines

WORDS = ["--preset", "demo", "--model", DEMO]
SENTENCES = 24


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`fairseq-el evaluate` in this process and an empty folder; returns what it exits with, None if all is well."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda *words: exit_of(evaluate, words, monkeypatch)


@pytest.fixture
def results(tmp_path):
    """Where the command puts its results: in the current folder."""
    return tmp_path / "here" / "results"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder as `fairseq-el prepare` leaves it, of the demo's first pairs."""
    folder = tmp_path_factory.mktemp("data")
    summarizer = Summarizer.load("demo", "demo")
    dictionary = summarizer.task.source_dictionary
    (folder / "bin").mkdir()
    for side, lines in (("source", TEXTS), ("target", REFERENCES)):
        write_lines(folder / f"test.{side}", lines[:SENTENCES])
        (folder / "bin" / f"dict.{side}.txt").write_bytes((DEMO / "dict.txt").read_bytes())
        prefix = str(folder / "bin" / f"test.source-target.{side}")
        builder = indexed_dataset.make_builder(f"{prefix}.bin", "mmap", len(dictionary))
        for line in lines[:SENTENCES]:
            pieces = " ".join(summarizer.tokenizer.encode(line)[:LONGEST_SOURCE])
            builder.add_item(dictionary.encode_line(pieces, add_if_not_exist=False))
        builder.finalize(f"{prefix}.idx")
    return folder


def test_rows_of_stock_and_el_attention_agree_in_scores_and_say_what_they_are(
    command, data, results, capsys
):
    for attention in (["--stock"], ["--el-attention", "always"]):
        words = [*WORDS, "--data", data / "bin", *attention, "--required-batch-size-multiple", 1]
        assert command(*words, "--beam", 2) is None
    stock, always = map(json.loads, (results / "results.jsonl").read_text().splitlines())
    summarizer = Summarizer.load("demo", "demo", beam=2)
    summaries = summarizer(TEXTS[:SENTENCES])
    scores = rouge.rouge(REFERENCES[:SENTENCES], summaries)
    assert (
        stock["scores"]
        == always["scores"]
        == {name: round(column.mean(), 2) for name, column in scores.items()}
    )
    assert 0 < always["peak_source_bytes"] < stock["peak_source_bytes"]
    assert (always["preset"], always["search"], always["attention"], always["fp16"]) == (
        "demo",
        "beam",
        "always",
        False,
    )
    assert always["sentences"] == SENTENCES and always["sentences_per_second"] > 0
    assert (
        always["settings"]["beam"] == "2"
        and always["versions"]["torch"]
        and re.match(r"20\d\d-", always["date"])
    )

    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0].split()[:6] == ["preset", "search", "attention", "model", "sentences", "ROUGE-1"]
    assert [line.split()[2] for line in table[1:]] == ["stock", "always"]
    assert (
        f"{always['scores']['ROUGE-1']:.2f}" in table[2]
        and f"{always['peak_source_bytes']:,} bytes" in table[2]
    )

    # what fairseq-generate wrote is what the Summarizer writes
    for system in ("stock", "always"):
        written = (results / f"demo-beam-{system}" / "summaries.txt").read_text(encoding="utf-8")
        assert written.splitlines() == summaries


def test_a_language_models_texts_become_prompts(command, data, tmp_path, results):
    folder = make_language_model(tmp_path / "gpt2")
    small = tmp_path / "data"
    small.mkdir()
    write_lines(small / "test.source", TEXTS[:4])
    write_lines(small / "test.references", [f"{reference} <n> And more." for reference in REFERENCES[:4]])
    words = [
        "--preset",
        "gpt2_cnndm",
        "--search",
        "greedy",
        "--model",
        folder,
        "--max-new-tokens",
        10,
        "--data",
        small,
    ]
    assert "stock fairseq can't" in command(*words, "--stock")
    assert command(*words) is None
    row = json.loads((results / "results.jsonl").read_text())
    assert list(row["scores"]) == ["ROUGE-1", "ROUGE-2", "ROUGE-Lsum"] and row["sentences"] == 4
    written = (results / "gpt2_cnndm-greedy-auto" / "summaries.txt").read_text(encoding="utf-8")
    summarizer = Summarizer.load(folder, "gpt2_cnndm", "greedy", max_new_tokens=10)
    assert written == "".join(f"{summary}\n" for summary in summarizer(TEXTS[:4]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "{bin}", "--gen-subset", "valid"], "has no binarised valid set"),
        (["--data", "{bin}", "--reference", "{short}"], "has 2 references, but there are 24 sentences"),
        (["--data", "{bin}", "--model", "nowhere"], "there is no checkpoint nowhere"),
        (["--data", "{bin}", "--beem", "2"], "did you mean beam"),
        (["--data", "{bin}", "--results-path", "{other}"], "line 1 of .* is not a result"),
        (["--data", "{bin}", "--preset", "gpt2_cnndm"], "trained for translation"),
    ],
)
def test_mistakes_are_one_line_and_come_before_the_work(command, data, tmp_path, results, words, message):
    short = write_lines(tmp_path / "short", ["a", "b"])
    other = tmp_path / "other"
    other.mkdir()
    write_lines(other / "results.jsonl", ["a"])
    said = command(*WORDS, *(word.format(bin=data / "bin", short=short, other=other) for word in words))
    assert re.match(f"evaluate: error: .*{message}", said) and "\n" not in said
    assert not (results / "results.jsonl").exists()


def test_what_fairseq_generate_complains_about_is_passed_on_as_one_line(command, data, monkeypatch):
    def failing(*arguments, **options):
        raise CommandFailed(
            "some log\nfairseq_el: error: the file is broken\n\nThis command failed:\n  command"
        )

    monkeypatch.setattr(evaluate, "fairseq", failing)
    assert command(*WORDS, "--data", data / "bin") == "evaluate: error: the file is broken"
