"""`fairseq-el evaluate`: one command a row, and the row says what was measured."""

import contextlib
import json
import re

import numpy as np
import pytest
from fairseq.data import indexed_dataset
from rouge_score.rouge_scorer import RougeScorer

from demo import CommandFailed
from fairseq_el.cli import evaluate
from fairseq_el.cli.main import main
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.text import rouge
from helpers import DEMO, LONGEST_SOURCE, REFERENCES, TEXTS, exit_of, make_language_model, read_lines, write_lines
from html_pages import parse_page

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
    words = [*WORDS, "--data", data / "bin", "--el-attention", "always", "--required-batch-size-multiple", 1]
    assert command(*words, "--beam", 2, "--compare", "stock") is None
    always, stock = map(json.loads, (results / "results.jsonl").read_text().splitlines())
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

    printed = capsys.readouterr().out
    assert f"exact and stock fairseq: {SENTENCES} of {SENTENCES} summaries are identical (100.0%)" in printed
    assert "differ most" not in printed
    table = printed.splitlines()[:3]
    assert table[0].split()[:6] == ["preset", "search", "attention", "model", "sentences", "ROUGE-1"]
    assert [line.split()[2] for line in table[1:]] == ["always", "stock"]
    assert (
        f"{always['scores']['ROUGE-1']:.2f}" in table[1]
        and f"{always['peak_source_bytes']:,} bytes" in table[1]
    )

    # what fairseq-generate wrote is what the Summarizer writes
    for system in ("stock", "always"):
        written = (results / f"demo-beam-{system}" / "summaries.txt").read_text(encoding="utf-8")
        assert written.splitlines() == summaries


# ---- a run in reduced precision, compared with an exact one


@pytest.fixture(scope="module")
def compared(data, tmp_path_factory):
    """What the command leaves, and what it prints as `stdout` and `stderr`."""
    folder = tmp_path_factory.mktemp("compared")
    words = ["evaluate", *WORDS, "--data", data / "bin", "--precision", "int8", "--compare", "exact",
             "--html", folder / "page.html", "--results-path", folder]  # fmt: skip
    with (
        (folder / "stdout").open("w") as printed,
        (folder / "stderr").open("w") as said,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
    ):
        main([str(word) for word in words])
    return folder


def read_summaries(folder, system):
    return read_lines(folder / f"demo-beam-{system}" / "summaries.txt")


def test_a_reduced_precision_is_named_first(compared):
    """In what the command says, and in the log of fairseq-generate, where fairseq prints its configuration before."""
    assert read_lines(compared / "stderr")[0].startswith("evaluate: precision int8, not exact: ")
    log = read_lines(compared / "demo-beam-auto-int8" / "generate.log")
    begin = next(i for i, line in enumerate(log) if line.startswith("INFO:fairseq_cli.generate:{"))
    assert re.match("INFO:fairseq_el.*:precision int8, not exact: ", log[begin + 1])
    assert "not exact" not in "".join(read_lines(compared / "demo-beam-auto" / "generate.log"))


def test_comparing_counts_identical_summaries_and_gives_scores_with_intervals(compared):
    int8, exact = (read_summaries(compared, system) for system in ("auto-int8", "auto"))
    same = len([None for ours, theirs in zip(int8, exact, strict=True) if ours == theirs])
    printed = (compared / "stdout").read_text(encoding="utf-8")
    assert f"int8 and exact: {same} of {SENTENCES} summaries are identical" in printed
    rows = [json.loads(line) for line in read_lines(compared / "results.jsonl")]
    assert [row["precision"] for row in rows] == ["int8", "auto"]
    assert rows[0]["comparison"]["with"] == "exact" and rows[0]["comparison"]["identical"] == same
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    columns = [
        np.array([100 * scorer.score(*pair)["rouge1"].fmeasure for pair in zip(REFERENCES[:SENTENCES], summaries)])
        for summaries in (int8, exact)
    ]
    for row, column in zip(rows, columns):
        low, high = row["intervals"]["ROUGE-1"]
        assert row["scores"]["ROUGE-1"] == round(column.mean(), 2) and low < column.mean() < high
        assert f"{column.mean():.2f} ({low:.2f} to {high:.2f})" in printed
    mean, low, high = rows[0]["comparison"]["differences"]["ROUGE-1"]
    assert mean == pytest.approx((columns[0] - columns[1]).mean()) and low <= mean <= high


def test_the_page_has_every_text_with_its_summaries(compared, data):
    page = parse_page(compared / "page.html")
    assert page["references"] == REFERENCES[:SENTENCES]
    assert [system["name"] for system in page["systems"]] == ["int8", "exact"]
    for system, folder in zip(page["systems"], ("auto-int8", "auto")):
        assert ["".join(parts) for parts in system["summaries"]] == read_summaries(compared, folder)
    known = [source for source in page["sources"] if "<unk>" not in source]  # what the dictionary has
    assert len(known) > SENTENCES / 2 and all(any(text.startswith(source) for text in TEXTS) for source in known)


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
    for stock in (["--stock"], ["--compare", "stock"]):
        assert re.search(f"stock fairseq can't .* leave out {' '.join(stock)}$", command(*words, *stock))
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
        (["--data", "{bin}", "--compare", "exact"], "compare exact with itself: name a precision"),
        (["--data", "{bin}", "--stock", "--compare", "stock"], "compare stock fairseq with itself"),
        (["--data", "{bin}", "--html", "nowhere/page.html"], "there is no folder nowhere"),
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

    monkeypatch.setattr(evaluate.generating, "fairseq", failing)
    assert command(*WORDS, "--data", data / "bin") == "evaluate: error: the file is broken"
