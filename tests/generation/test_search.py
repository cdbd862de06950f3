"""Picking tokens from logits finds what stock search finds in log-probabilities."""

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import BeamSearch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_el.generation.search import LogitBeamSearch, NGramBlock
from fairseq_el.generation.state import DecodingState
from helpers import assert_same_hypotheses

DICTIONARY = Dictionary()


@given(
    batch=st.integers(1, 4),
    beam=st.integers(1, 6),
    vocabulary=st.integers(3, 40),
    step=st.integers(0, 3),
    banned=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=200)
def test_candidates_equal_those_of_stock_beam_search(batch, beam, vocabulary, step, banned, seed):
    """Also where the beam is wider than the vocabulary, and with tokens ruled out."""
    torch.manual_seed(seed)
    logits = torch.randn(batch * beam, vocabulary, dtype=torch.float64)
    scores = -torch.rand(batch, beam, step + 1, dtype=torch.float64).cumsum(-1)
    state = DecodingState()
    ours = LogitBeamSearch(DICTIONARY, state)
    state.log_normaliser = torch.logsumexp(logits, dim=-1)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    for rows in (logits, log_probabilities):
        rows[:, 1] = float("-inf")  # padding
        rows[:, 2 : 2 + banned] = float("-inf")
    expected = BeamSearch(DICTIONARY).step(step, log_probabilities.view(batch, beam, -1), scores)
    found = ours.step(step, logits.view(batch, beam, -1), scores)
    torch.testing.assert_close(found[0], expected[0])
    real = expected[0] > float("-inf")  # which of several impossible candidates comes first is open
    assert torch.equal(found[1][real], expected[1][real])
    assert torch.equal(found[2][real], expected[2][real])


def test_the_first_step_behind_prompts_adds_to_their_scores():
    """As stock does where the scores of earlier steps are those of the prompt."""
    logits, prompt_scores = torch.randn(2, 3, 20), torch.tensor([-4.0, -1.5])
    state = DecodingState()
    state.log_normaliser, state.start_scores = logits.logsumexp(-1).view(-1), prompt_scores
    found = LogitBeamSearch(DICTIONARY, state).step(0, logits, torch.zeros(2, 3, 0))
    with_prompts = logits.log_softmax(-1) + prompt_scores.view(2, 1, 1)
    expected = BeamSearch(DICTIONARY).step(0, with_prompts, torch.zeros(2, 3, 0))
    for mine, other in zip(found, expected):
        torch.testing.assert_close(mine, other)


@given(
    size=st.integers(2, 4),
    length=st.integers(1, 14),
    rows=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=200)
def test_ngrams_are_blocked_as_stock_blocks_them_when_it_sees_no_padding(size, length, rows, seed):
    torch.manual_seed(seed)
    tokens = torch.randint(4, 7, (rows, length))
    logits = torch.randn(rows, 7)
    expected = NGramRepeatBlock(size, use_extension=False)(tokens, logits.clone(), rows, 1, length - 1)
    padded = torch.cat([tokens, torch.ones(rows, 5).long()], dim=1)
    assert torch.equal(NGramBlock(size)(padded, logits.clone(), rows, 1, length - 1), expected)


def test_no_ngram_is_repeated_when_asked(el):
    """Long outputs repeat themselves; with the option, none does."""

    def repeats(hypotheses) -> int:
        count = 0
        for best, *_ in hypotheses:
            tokens = best["tokens"].tolist()
            grams = [tuple(tokens[i : i + 2]) for i in range(len(tokens) - 1)]
            count += len(grams) - len(set(grams))
        return count

    search = {"beam": 2, "min_len": 20, "max_len_b": 24, "no_repeat_ngram_size": 2, "longest": 70, "batch_size": 8}
    assert repeats(el().generate(**search)) == 0
    assert repeats(el(el_stock_ngrams=True).generate(**search)) > 0


def test_with_stock_ngrams_they_are_left_alone_as_in_stock(stock, el):
    search = {"beam": 2, "min_len": 20, "max_len_b": 24, "no_repeat_ngram_size": 2, "longest": 70, "batch_size": 8}
    assert_same_hypotheses(el(el_stock_ngrams=True).generate(**search), stock().generate(**search))


@pytest.mark.parametrize("beam", [1, 3])
def test_a_row_of_nan_offers_no_candidate(beam):
    state = DecodingState()
    search = LogitBeamSearch(DICTIONARY, state)
    logits = torch.randn(beam, 9)
    logits[0] = float("nan")
    state.log_normaliser = torch.logsumexp(logits, dim=-1)
    scores, _, beams = search.step(1, logits.view(1, beam, 9), torch.zeros(1, beam, 2))
    assert (beams[scores > float("-inf")] != 0).all()
