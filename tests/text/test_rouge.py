"""ROUGE: the numbers of rouge-score, from fairseq's commands and from text files; and sentences to score."""

import itertools
import json
import os
import re
import sys
import time

import numpy as np
import pytest
import sacrebleu
from fairseq import scoring as fairseq_scoring
from fairseq.logging import metrics
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.scoring import BootstrapAggregator

from fairseq_el.cli.main import main
from fairseq_el.errors import UserError
from fairseq_el.plugin.tasks import ELTranslationConfig, ELTranslationTask
from fairseq_el.text import rouge
from fairseq_el.text.sentences import read_lines, split_sentences
from helpers import DEMO, System, run_command

KINDS = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL", "ROUGE-Lsum": "rougeLsum"}


def oracle(references, summaries, kind) -> list[float]:
    """rouge-score itself, with nothing of ours."""
    scorer = RougeScorer([kind], use_stemmer=True)
    return [100 * scorer.score(*pair)[kind].fmeasure for pair in zip(references, summaries, strict=True)]


def demo_texts(name: str, count: int) -> list[str]:
    return (DEMO / name).read_text(encoding="utf-8").split("\n")[:count]


# ---- scores


WORDS = st.sampled_from(
    "the The cats cat running run runs generously U.S. 3.5 naïve — 'tis ... 12,000 Ünï \u2028 ﬁ".split(" ")
)
TEXTS = st.lists(st.lists(WORDS, max_size=8).map(" ".join), min_size=1, max_size=4).map("\n".join)


@settings(max_examples=150)
@given(reference=TEXTS, summary=TEXTS, lsum=st.booleans())
@example(reference="", summary="", lsum=True)
@example(reference="a\n\nb", summary="\n", lsum=True)
def test_scores_are_those_of_rouge_score(reference, summary, lsum):
    # texts of one line are split into sentences first, which is tested below
    reference, summary = f"{reference}\n", f"{summary}\n"
    scores = rouge.rouge([reference], [summary], lsum=lsum)
    assert list(scores) == ["ROUGE-1", "ROUGE-2", "ROUGE-Lsum" if lsum else "ROUGE-L"]
    for name, values in scores.items():
        assert values.tolist() == oracle([reference], [summary], KINDS[name])


def test_scores_over_several_processes_are_in_order(monkeypatch):
    monkeypatch.setattr(rouge, "available_cores", lambda: 2)
    references = demo_texts("test.target", 600)
    summaries = [" ".join(text.split()[:8]) for text in demo_texts("test.source", 600)]
    assert len(references) > 2 * rouge.PAIRS_PER_CALL
    for name, values in rouge.rouge(references, summaries).items():
        assert values.tolist() == oracle(references, summaries, KINDS[name])


def process_id(_) -> int:
    time.sleep(0.05)
    return os.getpid()


def test_large_sets_are_scored_in_other_processes_and_small_ones_here(monkeypatch):
    monkeypatch.setattr(rouge, "available_cores", lambda: 2)
    used = rouge.map_over_cores(process_id, list(range(8)))
    assert len(set(used)) == 2 and os.getpid() not in used
    assert rouge.map_over_cores(process_id, [0]) == [os.getpid()]


@pytest.mark.parametrize(
    ("reference", "summary", "expected"),
    [
        # 5 of 6 words, 3 of 5 pairs of words, a common subsequence of 5
        ("the cat sat on the mat", "the cat lay on the mat", [500 / 6, 60, 500 / 6]),
        # 2 of 3 and 2 of 4 words: F = 2 * 2 / (3 + 4)
        ("one two three", "two three four five", [400 / 7, 40, 400 / 7]),
        ("dogs were running", "dog were run", [100, 100, 100]),  # by their stems
        ("a b c", "", [0, 0, 0]),
        ("It's here.", "its here", [2 / 5 * 100, 0, 2 / 5 * 100]),  # it, s, here
    ],
)
def test_scores_by_hand(reference, summary, expected):
    scores = rouge.rouge([reference], [summary])
    assert [values[0] for values in scores.values()] == pytest.approx(expected)


def test_lsum_unites_what_the_sentences_share():
    """The example in section 3.2 of the paper on ROUGE: 4 of 5 words are shared, of 10."""
    scores = rouge.rouge(["w1 w2 w3 w4 w5\n"], ["w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5"], lsum=True)
    assert scores["ROUGE-Lsum"][0] == pytest.approx(2 * 80 * 40 / 120)


def test_lsum_takes_sentences_in_any_order_and_l_does_not():
    reference = "The cat sat on a mat. Two dogs were barking."
    swapped = "Two dogs were barking. The cat sat on a mat."
    assert rouge.rouge([reference], [swapped], lsum=True)["ROUGE-Lsum"][0] == pytest.approx(100)
    assert rouge.rouge([reference], [swapped])["ROUGE-L"][0] == pytest.approx(100 * 6 / 10)


@pytest.mark.parametrize(("references", "summaries"), [(["a"], []), ([], []), (["a"], ["a", "b"])])
def test_counts_that_differ_or_nothing_to_score_are_an_error(references, summaries):
    with pytest.raises(UserError, match=f"{len(references)} references and {len(summaries)} summaries"):
        rouge.rouge(references, summaries)


def test_intervals_are_those_of_rouge_score(monkeypatch):
    monkeypatch.setattr(rouge, "RESAMPLES", 10_000)  # so that chance moves neither by more than a percent
    values = np.random.default_rng(3).beta(4, 6, size=400)
    aggregator = BootstrapAggregator(n_samples=10_000)
    scorer = RougeScorer(["rouge1"])
    for value in values:
        score_of_a_pair = scorer.score("a", "a")["rouge1"]._replace(fmeasure=value)
        aggregator.add_scores({"rouge1": score_of_a_pair})
    np.random.seed(0)
    theirs = aggregator.aggregate()["rouge1"]
    low, high = rouge.bootstrap_interval(values)
    assert low < values.mean() < high
    width = theirs.high.fmeasure - theirs.low.fmeasure
    assert (low, high) == pytest.approx((theirs.low.fmeasure, theirs.high.fmeasure), abs=width / 25)


def test_intervals_leave_the_random_numbers_of_a_run_alone():
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    first = rouge.bootstrap_interval(np.arange(50.0))
    assert np.random.random() == expected
    assert rouge.bootstrap_interval(np.arange(50.0)) == first


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(UserError, match="pip install rouge-score"):
        rouge.rouge(["a"], ["a"])
    with pytest.raises(UserError, match="pip install rouge-score"):
        rouge.RougeScorer(rouge.RougeConfig()).add_string("a", "a")


# ---- in fairseq


def test_fairseq_builds_the_scorer_by_its_name():
    config = OmegaConf.structured(rouge.RougeConfig(_name="rouge", rouge_bootstrap=True))
    scorer = fairseq_scoring.build_scorer(config, tgt_dict=None)
    scorer.add_string("the cat sat on the mat", "the cat lay on the mat")
    assert scorer.score() == pytest.approx(500 / 6)
    assert scorer.result_string() == (
        "ROUGE-1 83.33 (83.33 to 83.33), ROUGE-2 60.00 (60.00 to 60.00), ROUGE-L 83.33 (83.33 to 83.33)"
    )


@pytest.mark.parametrize("pieces", ["▁the ▁cat s", "the ca@@ ts", "464 5385 3332 319 262 2603"])
def test_pieces_are_refused_before_they_are_scored_as_words(pieces):
    scorer = rouge.RougeScorer(rouge.RougeConfig())
    with pytest.raises(UserError, match="--bpe gpt2.*--remove-bpe"):
        scorer.add_string(pieces, pieces)


@pytest.mark.parametrize("text", ["", "1984", "2 + 2 = 4", "me@home.org @@home", "it was 464 5385 3332 319"])
def test_text_is_not_taken_for_pieces(text):
    rouge.RougeScorer(rouge.RougeConfig()).add_string(text, text)


def test_generate_prints_rouge_of_the_decoded_text(demo_data):
    done = run_command(
        "fairseq-generate", demo_data, "--path", DEMO / "model.pt", "--user-dir", "fairseq_el", "--beam", 2,
        "--max-len-b", 30, "--batch-size", 32, "--scoring", "rouge", "--rouge-lsum", "--bpe", "sentencepiece",
        "--sentencepiece-model", DEMO / "sentencepiece.model",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    texts = {
        mark: dict(re.findall(rf"^{mark}-(\d+)\t(?:-\S+\t)?(.*)$", done.stdout, re.MULTILINE))
        for mark in "TD"
    }
    references, summaries = ([texts[mark][str(n)] for n in range(96)] for mark in "TD")
    assert references == demo_texts("test.target", 96)
    lines = [["\n".join(split_sentences(text)) for text in side] for side in (references, summaries)]
    expected = [np.mean(oracle(*lines, kind)) for kind in ("rouge1", "rouge2", "rougeLsum")]
    printed = re.search(r"^Generate test with beam=2: ROUGE-1 (\S+), ROUGE-2 (\S+), ROUGE-Lsum (\S+)$",
                        done.stdout, re.MULTILINE)  # fmt: skip
    assert [float(number) for number in printed.groups()] == pytest.approx(expected, abs=0.0051)
    assert expected[0] > 20


@pytest.fixture
def validate(demo_data):
    """What `fairseq-validate` and `fairseq-train` call: a step for each batch, then the sums."""

    def run(batches: int, search: dict, **options):
        system = System(
            ELTranslationTask, ELTranslationConfig, demo_data, [DEMO / "model.pt"], eval_bleu=True,
            eval_bleu_args=json.dumps(search), **options,
        )  # fmt: skip
        config = OmegaConf.create({"_name": "cross_entropy", "sentence_avg": False})
        criterion = system.task.build_criterion(config)
        model = system.models[0].eval()
        logged = [
            system.task.valid_step(batch, model, criterion)[2]
            for batch in itertools.islice(system.batches(16), batches)
        ]
        with metrics.aggregate() as reduced:
            system.task.reduce_metrics(logged, criterion)
        return system, reduced.get_smoothed_values()

    return run


def test_validation_reports_rouge_beside_bleu(validate):
    search = {"beam": 1, "max_len_b": 30, "rouge": True}
    system, values = validate(6, search, eval_bleu_remove_bpe="sentencepiece")
    dictionary = system.task.target_dictionary
    hypotheses = [found[0]["tokens"] for found in system.generate(batch_size=16, beam=1)]
    summaries = [dictionary.string(tokens, "sentencepiece") for tokens in hypotheses]
    references = demo_texts("test.target", 96)
    for kind in ("rouge1", "rouge2", "rougeL"):
        assert values[kind] == pytest.approx(np.mean(oracle(references, summaries, kind)), abs=0.0051)
    assert values["bleu"] > 0 and values["loss"] > 0


def test_validation_decodes_by_an_encoding_and_splits_sentences(validate):
    search = {"beam": 1, "max_len_b": 30, "rouge": True, "rouge_lsum": True}
    _, removed = validate(1, search, eval_bleu_remove_bpe="sentencepiece")
    encoding = {"bpe": "sentencepiece", "sentencepiece_model": str(DEMO / "sentencepiece.model")}
    _, decoded = validate(1, search | encoding)
    for kind in ("rouge1", "rouge2", "rougeLsum"):
        assert decoded[kind] == removed[kind] > 0


def test_validation_without_rouge_is_as_it_was(validate):
    _, values = validate(1, {"beam": 1, "max_len_b": 3}, eval_bleu_remove_bpe="sentencepiece")
    assert "bleu" in values and not any("rouge" in name for name in values)


# ---- fairseq-el score


@pytest.fixture
def score_files(tmp_path, monkeypatch, capsys):
    def run(hypotheses: str | bytes, references: str | bytes, *options: str) -> str:
        for name, content in (("hyp", hypotheses), ("ref", references)):
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        main(["score", str(tmp_path / "hyp"), str(tmp_path / "ref"), *options])
        return capsys.readouterr().out

    return run


def test_files_are_scored_line_by_line(score_files):
    printed = score_files("the cat lay on the mat\n\n", "the cat sat on the mat\nno summary\n")
    assert printed == "2 pairs: ROUGE-1 41.67, ROUGE-2 30.00, ROUGE-L 41.67\n"


def test_marks_between_sentences_are_lines_for_lsum(score_files):
    marked, swapped = "one two three <n> four five six", "four five six<n>one two three"
    assert "ROUGE-Lsum 100.00" in score_files(swapped, marked, "--rouge-lsum")
    assert "ROUGE-1 100.00, ROUGE-2 80.00, ROUGE-L 50.00" in score_files(swapped, marked)  # and are no words


def test_questions_are_scored_with_bleu(score_files):
    hypotheses = ["Who founded Microsoft in 1975?", "When was it founded?"]
    references = ["Along with Paul Allen, who founded Microsoft in 1975?", "When was Microsoft founded?"]
    printed = score_files("\n".join(hypotheses), "\n".join(references), "--bleu", "--rouge-bootstrap").splitlines()
    assert printed[1] == str(sacrebleu.corpus_bleu(hypotheses, [references]))
    assert re.match(r"2 pairs: ROUGE-1 \S+ \(\S+ to \S+\), ", printed[0])


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        ("a\nb\nc\n", "a\n", "1 references and 3 summaries"),
        ("a\nb\n", b"a\nb\xff\n", r"line 2 of .*ref is not UTF-8 \(byte 2\)"),
    ],
)
def test_wrong_files_are_one_line(score_files, hypotheses, references, message):
    with pytest.raises(SystemExit) as stopped:
        score_files(hypotheses, references)
    assert re.search(f"^score: error: .*{message}", stopped.value.code)
    assert "\n" not in stopped.value.code


def test_lines_end_at_line_ends_and_nowhere_else(tmp_path):
    (tmp_path / "text").write_bytes("one\u2028still one\r\n\ntwo\x0b\nlast".encode())
    assert list(read_lines(tmp_path / "text")) == ["one\u2028still one", "", "two\x0b", "last"]


# ---- sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["One sentence without a stop"],
        ["He left.", "She stayed!", "Did they?", "No."],
        ["Mr. Smith met Dr. Jones on St. Mary's.", "Lt. Col. Brown of the U.S. Army was there."],
        ["He lives in the U.S.", "The house is old."],
        ["George W. Bush and J. K. Rowling spoke.", "It was 8 p.m. Friday."],
        ["They met at 8 p.m.", "Then they left."],
        ["It cost $3.5 million.", "Prices rose 2.4% in 2014."],
        ["Acme Inc. and Smith & Co. Ltd. merged.", "But Acme Inc.", "They had debts."],
        ["She is No. 1 in the world.", "Her answer was no.", "He asked again."],
        ['"It is over," he said.', '"We won!"', "The crowd cheered."],
        ["He said: “It is over.”", "“Go home.”", "(They did.)", "Then it rained."],
        ["It ended ... in tears.", "Wait...", "What?", "Yes…", "Now."],
        ["`` We won . ''", "He said so .", "All cheered ."],  # with spaces between tokens
        ["Élodie won.", "Ángel lost.", "99 others took part."],
        ["ex-Gov. Rick Perry ran.", "Sen. Ted Cruz did too."],
        ["1. Go home.", "2. Stay there."],
    ],
)
def test_sentences_are_found(sentences):
    assert split_sentences(" ".join(sentences)) == sentences


def test_line_breaks_end_sentences():
    text = "a heading\nA sentence. Another\r\n\n  one "
    assert split_sentences(text) == ["a heading", "A sentence.", "Another", "one"]
    assert split_sentences("") == split_sentences(" \n ") == []


@given(st.text(alphabet="aB.!?\"'”)(… \n1US", max_size=60))
def test_sentences_lose_nothing_but_space(text):
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" and "\n" not in sentence for sentence in sentences)
