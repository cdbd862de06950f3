"""With --deterministic a text has one summary, to the last bit of its scores, whatever happens around it."""

import pytest
import torch

from fairseq_el.cli import summarize
from fairseq_el.jobs import presets
from fairseq_el.jobs.summarizer import Summarizer
from helpers import DEMO, exit_of, job, read_lines

TEXTS = (DEMO / "test.source").read_text(encoding="utf-8").splitlines()[40:52]


@pytest.fixture(autouse=True)
def threads():
    """As many as there were: --deterministic takes one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def scores_of(summarizer: Summarizer, texts: list[str], monkeypatch) -> dict[str, list[float]]:
    """Of each text, the scores of every token of every hypothesis."""
    infer, found = summarizer.task.inference_step, []

    def inference_step(*words, **options):
        hypotheses = infer(*words, **options)
        found.extend([float(x) for h in beams for x in h["positional_scores"]] for beams in hypotheses)
        return hypotheses

    monkeypatch.setattr(summarizer.task, "inference_step", inference_step)
    summarizer(texts)
    monkeypatch.undo()
    longest_first = sorted(texts, key=lambda text: -len(summarizer.batcher.encode(text).tokens))
    return dict(zip(longest_first, found, strict=True))


@pytest.mark.parametrize("search", ["beam", "greedy"])
def test_scores_depend_on_nothing_but_the_text(search, monkeypatch):
    torch.set_num_threads(2)
    together = Summarizer.load("demo", "demo", search, deterministic=True)
    expected = scores_of(together, TEXTS, monkeypatch)
    again = Summarizer.load("demo", "demo", search, deterministic=True)
    for text in TEXTS[:4]:
        assert scores_of(again, [text], monkeypatch) == {text: expected[text]}
    assert scores_of(again, TEXTS[::-1], monkeypatch) == expected


def test_the_script_writes_the_same_bytes_for_any_window_and_shows_it_takes_texts_one_by_one(tmp_path, monkeypatch):
    outputs = set()
    for window in (1, 5, 1024):
        folder = tmp_path / str(window)
        folder.mkdir()
        words = job(folder, TEXTS, "--deterministic", "--window", window)
        assert exit_of(summarize, words, monkeypatch) is None
        outputs.add(tuple(read_lines(folder / "out")))
    assert len(outputs) == 1 and torch.get_num_threads() == 1


@pytest.mark.parametrize("option", ["--batch-size", "--max-tokens"])
def test_batches_are_refused(tmp_path, monkeypatch, capsys, option):
    assert exit_of(summarize, job(tmp_path, TEXTS, "--deterministic", option, 64), monkeypatch) == 2
    assert "one text at a time" in capsys.readouterr().err


def test_a_chosen_form_of_attention_is_kept():
    preset = presets.load("demo", "beam")
    assert preset.deterministic().options["el_attention"] == "never"
    assert preset.changed(el_attention="always").deterministic().options["el_attention"] == "always"
