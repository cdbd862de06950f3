"""Scores, tokens and alternatives of summaries: those of stock fairseq, in Python and in JSON lines."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_el.cli import merge, summarize
from fairseq_el.errors import UserError
from fairseq_el.jobs.default_preset import default_preset
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.results import DetailedSummary
from fairseq_el.jobs.summarizer import Summarizer
from helpers import DEMO, TEXTS, exit_of, interrupted_after, load_once, make_language_model, read_lines, write_lines
from make_checkpoint import make_checkpoint

SHORT = ["--max-len-b", 8, "--batch-size", 3, "--window", 8]
NBEST = ["--model", "demo", "--el-attention", "always", "--nbest", 2, *SHORT]


@pytest.fixture(scope="module")
def summarizer() -> Summarizer:
    return Summarizer.load("demo")


@pytest.fixture
def call(monkeypatch):
    """A subcommand in this process; returns what it exits with, None if all is well."""
    monkeypatch.setattr(Summarizer, "load", load_once)
    return lambda script, *words: exit_of(script, words, monkeypatch)


# ---- in Python


def test_scores_tokens_and_alternatives_are_those_of_stock_fairseq(summarizer, stock):
    system = stock()
    expected = system.generate(beam=4, nbest=4)[: len(TEXTS)]
    symbols = system.task.target_dictionary.symbols
    for found, hypotheses in zip(summarizer.detailed(TEXTS, nbest=4), expected, strict=True):
        assert len(found.alternatives) == 3
        for mine, other in zip([found, *found.alternatives], hypotheses, strict=True):
            assert mine.tokens == [symbols[token] for token in other["tokens"]] and mine.tokens[-1] == "</s>"
            torch.testing.assert_close(torch.tensor(mine.score), other["score"], atol=1e-4, rtol=0)
            torch.testing.assert_close(torch.tensor(mine.token_scores), other["positional_scores"], atol=1e-4, rtol=0)
            assert mine.score == pytest.approx(sum(mine.token_scores) / len(mine.tokens), abs=1e-4)


def test_a_summary_is_the_best_hypothesis_and_blank_texts_have_none(summarizer):
    texts = [TEXTS[0], " ", TEXTS[1]]
    found = summarizer.detailed(texts, nbest=2)
    assert [best.summary for best in found] == summarizer(texts)
    assert found[1] == DetailedSummary("", None, [], [], [])
    assert all(best.score >= best.alternatives[0].score for best in found[::2])
    assert summarizer.detailed(TEXTS[0]).alternatives == []
    assert len(Summarizer.load("demo", nbest=3).detailed(TEXTS[0]).alternatives) == 2


@pytest.mark.parametrize("nbest", [0, 5])
def test_more_hypotheses_than_beams_are_one_line(summarizer, nbest, call, tmp_path):
    with pytest.raises(UserError, match=f"nbest {nbest} is out of range: from 1 to the beam, which is 4"):
        summarizer.detailed(TEXTS[:1], nbest=nbest)
    if nbest:
        source = write_lines(tmp_path / "in", TEXTS[:1])
        words = ["--model", "demo", "--nbest", nbest, "--input", source, "--output", tmp_path / "out"]
        assert "nbest 5 is out of range: from 1 to the beam, which is 4; set a larger beam" in call(summarize, *words)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_score_of_a_language_model_is_that_of_its_own_tokens_without_the_prompt(tmp_path):
    model = make_language_model(tmp_path / "model")
    options = {"max_new_tokens": 6, "keep_sentences": 1, "lenpen": 2.0}
    found = Summarizer.load(model, search="greedy", **options).detailed("the cat sat")
    assert 1 < len(found.tokens) == len(found.token_scores) <= 7
    assert found.score == pytest.approx(sum(found.token_scores) / len(found.tokens) ** 2, abs=1e-4)


# ---- the preset of a model for which none is named


def test_the_default_preset_follows_from_the_model(tmp_path, call, capsys):
    language = make_language_model(tmp_path / "language")
    settings = {"encoder_layers": 1, "decoder_layers": 1, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 8,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
    old = tmp_path / "old"
    make_checkpoint("bart_base", old, vocab=100, settings=settings, legacy=True)
    for name in ("mine", "bart.large.XSum", "distilbart-cnn-6-6"):
        shutil.copytree(DEMO, tmp_path / name)
    expected = {DEMO: "demo", language: "gpt2_cnndm", tmp_path / "mine": "plain",
        tmp_path / "bart.large.XSum": "xsum", tmp_path / "distilbart-cnn-6-6": "cnndm"}  # fmt: skip
    assert {folder: default_preset(ModelFiles.find(folder)) for folder in expected} == expected
    assert default_preset(ModelFiles.find(old, DEMO)) == "plain"
    assert Summarizer.load(tmp_path / "mine").preset.name == "plain" and Summarizer.load("demo").preset.name == "demo"
    source = write_lines(tmp_path / "in", TEXTS[:1])
    assert call(summarize, "--model", tmp_path / "mine", "--max-len-b", 5, "--input", source) is None
    assert "using the preset plain; another can be named with --preset" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_one_line_without_a_preset_too(tmp_path):
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    (folder / "model.pt").write_bytes((DEMO / "model.pt").read_bytes()[:5000])
    with pytest.raises(UserError, match="model.pt is not a complete checkpoint"):
        Summarizer.load(folder)


# ---- JSON lines


def test_json_lines_have_scores_and_alternatives(call, tmp_path):
    texts = ["", *TEXTS[:9]]
    source = write_lines(tmp_path / "in", texts)
    assert call(summarize, *NBEST, "--input", source, "--output", tmp_path / "out.jsonl") is None
    assert call(summarize, *NBEST, "--input", source, "--output", tmp_path / "out.txt") is None
    found = [json.loads(line) for line in read_lines(tmp_path / "out.jsonl")]
    assert read_lines(tmp_path / "out.txt") == [record["summary"] for record in found]  # one line per text
    expected = Summarizer.load("demo", el_attention="always", max_len_b=8, batch_size=3).detailed(texts, nbest=2)
    assert found[0] == {"id": 1, "summary": "", "score": None, "alternatives": []}
    for record, detailed in zip(found[1:], expected[1:], strict=True):
        (other,) = detailed.alternatives
        assert record["summary"] == detailed.summary and record["score"] == pytest.approx(detailed.score, abs=1e-4)
        (alternative,) = record["alternatives"]
        assert alternative["summary"] == other.summary and alternative["score"] == pytest.approx(other.score, abs=1e-4)


def test_resumed_and_merged_outputs_have_the_scores_of_an_undisturbed_run(call, tmp_path, monkeypatch):
    words = [*NBEST, "--input", write_lines(tmp_path / "in", TEXTS)]
    assert call(summarize, *words, "--output", tmp_path / "whole.jsonl") is None
    whole = (tmp_path / "whole.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        assert "--resume" in call(summarize, *words, "--output", tmp_path / "out.jsonl")
    assert call(summarize, *words, "--output", tmp_path / "out.jsonl", "--resume") is None
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    parts = [tmp_path / f"part.{number}.jsonl" for number in (1, 2)]
    for number, part in enumerate(parts, start=1):
        assert call(summarize, *words, "--output", part, "--shard", f"{number}/2") is None
    assert call(merge, *parts, "--output", tmp_path / "merged.jsonl") is None
    assert (tmp_path / "merged.jsonl").read_bytes() == whole
    assert all(len(json.loads(line)["alternatives"]) == 1 for line in whole.splitlines())
