"""Cases that once differed from stock fairseq, and where ours differs on purpose."""

from dataclasses import replace

import pytest

from fuzz.cases import Case, ModelCase, SearchCase
from fuzz.compare import compare, difference
from fuzz.systems import run_ours, run_stock

ENCODER = {"encoder_layers": 2, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16, "encoder_attention_heads": 2}
DECODER = {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 16, "decoder_attention_heads": 2}
TRANSFORMER = ModelCase("transformer", 20, ENCODER | DECODER | {"max_source_positions": 30, "max_target_positions": 30})
LANGUAGE_MODEL = ModelCase(
    "transformer_lm", 20, DECODER | {"decoder_input_dim": 16, "decoder_output_dim": 16, "max_target_positions": 30}
)
SOURCES = ((4, 9, 12), (7,), (11, 5, 20, 8, 6))
BOTH_KINDS = pytest.mark.parametrize("model", [TRANSFORMER, LANGUAGE_MODEL], ids=lambda model: model.family)


def make_case(model: ModelCase, kind: str, options: dict, **changes) -> Case:
    return Case((model,), SearchCase(kind, {"beam": 3, "max_len_b": 12} | options), SOURCES, **changes)


def with_settings(model: ModelCase, **settings) -> ModelCase:
    return replace(model, settings=model.settings | settings)


def assert_equal(case: Case) -> None:
    outcome = compare(case)
    assert outcome.kind == "equal", f"{outcome.kind}: {outcome.detail}"


@pytest.mark.parametrize("sampling", [{}, {"sampling_topk": 5}, {"sampling_topp": 0.9}], ids=["all", "top-k", "top-p"])
@BOTH_KINDS
def test_sampling_draws_stocks_random_numbers_with_layerdrop(model, sampling):
    """LayerDrop draws some, at inference too, whenever something iterates over the layers."""
    layerdrop = {"decoder_layerdrop": 0.2} | ({} if model.is_language_model else {"encoder_layerdrop": 0.2})
    case = make_case(with_settings(model, **layerdrop), "sampling", {"sampling": True} | sampling)
    assert_equal(replace(case, sources=((4, 9, 12), (7, 5, 5, 6), (11, 5, 20, 8, 6))))


@pytest.mark.parametrize("alignment", ["hard", "soft"])
@pytest.mark.parametrize("full_context", [False, True])
@pytest.mark.parametrize("heads", [2, 16])
def test_alignments_of_transformer_align(alignment, full_context, heads):
    """With 16 heads each is of width 1."""
    model = replace(TRANSFORMER, family="transformer_align")
    model = with_settings(
        model, decoder_attention_heads=heads, alignment_layer=1, alignment_heads=1, full_context_alignment=full_context
    )
    assert_equal(make_case(model, "beam", {"print_alignment": alignment}, left_pad=True))


@BOTH_KINDS
@pytest.mark.parametrize("budget", [None, 6_000])
def test_outputs_as_long_as_sources(model, budget):
    """They depend on the longest source of the batch, so a budget must not split it."""
    assert_equal(make_case(model, "match_source_len", {"match_source_len": True, "min_len": 3}, budget=budget))


@pytest.mark.parametrize("budget", [None, 6_000])
def test_constraints_on_a_language_model(budget):
    constraints = (((9,),), ((14, 6),), ())
    options = {"constraints": "unordered"}
    assert_equal(make_case(LANGUAGE_MODEL, "constraints", options, constraints=constraints, budget=budget))


@pytest.mark.parametrize("options", [{}, {"sampling": True}, {"diverse_beam_groups": 3}])
def test_a_least_length_forbids_no_end_that_a_prompt_forces(options):
    case = make_case(LANGUAGE_MODEL, "beam", options | {"min_len": 4})
    assert_equal(replace(case, sources=((4, 9, 2), (4, 9, 12))))


@pytest.mark.parametrize("kind, options", [("beam", {}), ("diverse", {"diverse_beam_groups": 3})])
@pytest.mark.parametrize("limit", [{"min_len": 9}, {"min_len": 0}], ids=str)
def test_limits_hold_behind_each_prompt_as_for_a_prompt_alone(kind, options, limit):
    """In stock fairseq the least length, and tokens to suppress, hold behind the longest prompt of a batch only."""
    case = make_case(LANGUAGE_MODEL, kind, options | limit)
    case = replace(case, search=replace(case.search, extra={"tokens_to_suppress": [f"w{n}" for n in range(12)]}))
    found = run_ours(case)
    for row, prompt in enumerate(case.sources):
        alone = run_stock(replace(case, sources=(prompt,)), as_stock=True)
        assert not difference(found[row], alone[0])


def test_attention_behind_a_closed_prefix_is_stocks_for_one_beam():
    """Stock copies the first beam's tokens and scores to the others there, but leaves them their attention."""
    case = make_case(TRANSFORMER, "beam", {"print_alignment": "soft"}, prefixes=((9, 2), (4,), ()))
    assert compare(case).kind == "known"
    assert_equal(replace(case, prefixes=((9, 4), (4,), ())))


def test_a_prompt_may_repeat_ngrams_that_its_continuation_may_not():
    prompt = (5, 6, 7, 5, 6, 7)
    case = make_case(LANGUAGE_MODEL, "beam", {"no_repeat_ngram_size": 2})
    case = replace(case, sources=(prompt,), search=replace(case.search, working_ngrams=True))
    assert_equal(case)
    for hypothesis in run_ours(case)[0]:
        text = [2, *hypothesis["tokens"].tolist()]
        pairs = list(zip(text, text[1:]))
        new = pairs[len(prompt) :]
        assert text[1 : 1 + len(prompt)] == list(prompt)
        assert len(set(new)) == len(new) and not set(new) & set(pairs[: len(prompt)])
