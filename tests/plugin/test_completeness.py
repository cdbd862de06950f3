"""Every sentence of a set comes out, whatever the size of batches."""

import re

import pytest

from families import FAMILIES, fairseq_generate, make_checkpoint, task_words, write_data
from helpers import run_command

SENTENCES = 1000
SEARCH = ["--beam", 1, "--max-len-b", 4, "--cpu", "--no-progress-bar"]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list:
    folder = tmp_path_factory.mktemp("families") / "data"
    write_data(FAMILIES["m2m-100"], folder, SENTENCES)
    return [*task_words(FAMILIES["m2m-100"], folder), "--path", make_checkpoint(FAMILIES["m2m-100"], folder), *SEARCH]


@pytest.mark.parametrize(
    "batches",
    [["--batch-size", 1], ["--batch-size", 7], ["--batch-size", 32], ["--max-tokens", 40],
     ["--max-tokens", 100, "--required-batch-size-multiple", 4]],
    ids=lambda batches: " ".join(map(str, batches)),
)  # fmt: skip
def test_no_sentence_is_lost(words, batches, tmp_path, monkeypatch):
    found = fairseq_generate([*words, *batches], tmp_path, monkeypatch, stock=False)
    assert sorted(found) == list(range(SENTENCES))


def test_stock_fairseq_does_lose_some(words, tmp_path, monkeypatch):
    """Else the test above can't fail."""
    found = fairseq_generate([*words, "--batch-size", 1], tmp_path, monkeypatch, stock=True)
    assert len(found) == SENTENCES - 1


@pytest.mark.parametrize("longest", [6, 13])
def test_the_end_of_a_run_counts_sentences_and_names_those_left_out(longest, words):
    """As a command in a process of its own; of this set, longer sentences are asked to be skipped."""
    done = run_command(
        "fairseq-generate", *words, "--user-dir", "fairseq_el", "--batch-size", 30, "--max-source-positions", longest,
        "--skip-invalid-size-inputs-valid-test",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    generated = set(map(int, re.findall(r"^H-(\d+)", done.stdout, flags=re.MULTILINE)))
    last = done.stderr.splitlines()[-1]
    skipped = sorted(set(range(SENTENCES)) - generated)
    assert (100 < len(skipped) < SENTENCES) if longest == 6 else (0 < len(skipped) <= 100)
    more = f" and {len(skipped) - 100} more" if longest == 6 else ""
    assert last == (
        f"fairseq_el | generated {len(generated)} of 1,000 sentences; left out {len(skipped)} with invalid "
        f"sizes: {', '.join(map(str, skipped[:100]))}{more}"
    )
