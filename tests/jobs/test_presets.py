"""The presets hold the paper's settings, and nothing that fairseq would not take."""

import re

import pytest
from fairseq import options
from fairseq.search import BeamSearch, DiverseBeamSearch

import demo  # scripts/demo.py
from fairseq_el.errors import UserError
from fairseq_el.jobs import presets
from helpers import LONGEST_SOURCE

# Section 4.2.3 of the paper, and the n-gram blocking of BART's recipe.
PAPER = {
    "cnndm": {
        "beam": 4, "lenpen": 2.0, "max_len_b": 140, "min_len": 55, "no_repeat_ngram_size": 3,
        "max_source_positions": 1024,
    },
    "xsum": {
        "beam": 6, "lenpen": 1.0, "max_len_b": 60, "min_len": 10, "no_repeat_ngram_size": 3,
        "max_source_positions": 1024,
    },
    "squad": {"beam": 4, "lenpen": 1.0, "max_source_positions": 512},
    "gpt2_cnndm": {"beam": 4, "max_new_tokens": 200, "longest_source": 512, "source_suffix": "\nTL;DR:"},
}  # fmt: skip
SEARCH = {"beam", "lenpen", "max_len_b", "max_new_tokens", "min_len", "no_repeat_ngram_size"}


@pytest.mark.parametrize("name", PAPER)
def test_presets_are_the_papers_settings(name):
    values = presets.load(name).options
    assert {option: values[option] for option in PAPER[name]} == PAPER[name]
    assert SEARCH & set(values) == SEARCH & set(PAPER[name])  # and no others


@pytest.mark.parametrize("name", [*PAPER, "demo"])
def test_searches_differ_from_beam_in_the_search_alone(name):
    beam, diverse, greedy = (presets.load(name, search).options for search in ("beam", "diverse", "greedy"))
    assert diverse == beam | {"diverse_beam_groups": beam["beam"], "diverse_beam_strength": 0.2}
    assert greedy == beam | {"beam": 1}


def test_gpt2_samples_as_in_its_paper():
    beam, sampled = (presets.load("gpt2_cnndm", search) for search in ("beam", "topk"))
    search = {"beam": 1, "nbest": 1, "sampling": True, "sampling_topk": 2, "max_new_tokens": 100}
    assert sampled.options == beam.options | search | {"keep_sentences": 3}
    assert sampled.text().keep_sentences == 3 and beam.text().keep_sentences is None


@pytest.mark.parametrize("name", presets.names())
def test_no_preset_ignores_repeated_ngrams_as_stock_does_on_a_cpu(name):
    assert "el_stock_ngrams" not in presets.load(name).options


def test_summaries_of_several_sentences_are_scored_sentence_by_sentence():
    assert {name: presets.load(name).scoring().rouge_lsum for name in PAPER} == {
        "cnndm": True, "xsum": False, "squad": False, "gpt2_cnndm": True,
    }  # fmt: skip


def searches() -> list[tuple[str, str]]:
    shared = ["beam", "diverse", "greedy"]
    return [(name, search) for name in presets.names() for search in shared] + [("gpt2_cnndm", "topk")]


@pytest.mark.parametrize(("name", "search"), searches())
def test_fairseq_generate_takes_the_arguments(name, search):
    preset = presets.load(name, search)
    parser = options.get_generation_parser()
    parsed = vars(options.parse_args_and_arch(parser, ["data", "--path", "model.pt", *preset.arguments()]))
    known = {option: value for option, value in preset.options.items() if option in parsed}
    assert {option: parsed[option] for option in known} == known
    assert set(preset.options) - set(known) <= {"source_suffix", "longest_source", "keep_sentences"}


def test_a_generator_is_built_from_a_preset(el):
    system = el()
    beam, diverse = (
        system.task.build_generator(system.models, presets.load("xsum", search).generation())
        for search in ("beam", "diverse")
    )
    for generator in (beam, diverse):
        assert (generator.beam_size, generator.max_len_b, generator.min_len) == (6, 60, 10)
        assert generator.len_penalty == 1.0
    assert isinstance(beam.search, BeamSearch)
    assert isinstance(diverse.search, DiverseBeamSearch) and diverse.search.num_groups == 6
    assert diverse.search.diversity_strength == -0.2


def test_options_of_the_task_go_to_the_task():
    assert presets.load("cnndm").task() == {"max_source_positions": 1024, "truncate_source": True}
    assert not set(presets.load("cnndm").task()) & set(vars(presets.load("cnndm").generation()))


def test_the_demo_searches_as_its_preset_says():
    assert demo.PRESET.text().longest_source == LONGEST_SOURCE
    words = demo.PRESET.arguments()
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--beam": "4", "--lenpen": "1.0", "--max-len-b": "30", "--batch-size": "32",
    }  # fmt: skip


def test_options_can_be_changed_and_left_out():
    preset = presets.load("cnndm").changed(beam=2, truncate_source=None, rouge_lsum=None)
    assert preset.options["beam"] == 2
    assert not {"--truncate-source", "--rouge-lsum"} & set(preset.arguments())
    assert {"--truncate-source", "--rouge-lsum"} <= set(presets.load("cnndm").arguments())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beem": 3}, "--beem is not an option; did you mean beam?"),
        ({"beam": 0}, "--beam 0 is out of range: at least 1"),
        ({"min_len": "-1"}, "--min-len -1 is out of range: at least 0"),
        ({"lenpen": "inf"}, "--lenpen inf is out of range: a finite number"),
        ({"task": "tranlsation"}, "--task 'tranlsation' does not exist; did you mean translation?"),
    ],
)
def test_a_mistake_in_a_changed_option_does_not_blame_the_preset(options, message):
    with pytest.raises(UserError) as error:
        presets.load("cnndm").changed(**options)
    assert str(error.value) == message


@pytest.fixture
def load(tmp_path):
    def load_content(content: str, search: str = "beam") -> presets.Preset:
        (tmp_path / "own.yaml").write_text(content)
        return presets.load(tmp_path / "own.yaml", search)

    return load_content


def test_a_preset_can_be_a_file_of_ones_own(load):
    preset = load("el_attention: always\nlenpen: 1\nleft_pad_source: false\nsearches: {beam: {beam: '4'}}")
    assert preset.options == {"el_attention": "always", "lenpen": 1.0, "left_pad_source": False, "beam": 4}
    # the default of left_pad_source is true, and its flag says no
    assert preset.arguments() == "--el-attention always --lenpen 1.0 --left-pad-source --beam 4".split()


SEARCHES = "\nsearches: {beam: {beam: 4}, greedy: {beam: 1}}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("beem: 4" + SEARCHES, r"own \(beam\): beem is not an option; did you mean beam\?"),
        ("min_len: ten" + SEARCHES, r"own \(beam\): min_len ten is not valid: .*'ten'"),
        ("min_len: 10.5" + SEARCHES, "min_len 10.5 is not valid: .*10.5"),
        ("min_len: null" + SEARCHES, "min_len None is not valid"),
        ("min_len: [10]" + SEARCHES, r"min_len \[10\] is not valid"),
        ("truncate_source: maybe" + SEARCHES, "truncate_source maybe is not valid: .*'maybe'"),
        ("el_attention: often" + SEARCHES, "el_attention often is not valid: .*auto, always, never"),
        ("searches: {beam: {beam: 4}, greedy: {beem: 1}}", r"own \(greedy\): beem is not an option"),
        ("task: tranlsation" + SEARCHES, "task 'tranlsation' does not exist; did you mean translation"),
        ("scoring: rogue" + SEARCHES, "scoring 'rogue' does not exist; did you mean rouge"),
        ("beam: 0" + SEARCHES.replace("beam: 4", ""), r"own \(beam\): beam 0 is out of range: at least 1"),
        ("data: here" + SEARCHES, "data is not an option"),
        ("beam: 4", "own.yaml has no searches: add some"),
        ("searches: [beam]", "own.yaml has no searches: add some"),
        ("lenpen: 2.0\nsearches: {wide: {beam: 9}}", "has no search 'beam': it has wide"),
        ("- beam", "own.yaml is not a file of settings"),
        ("beam: [", "own.yaml is not a file of settings in YAML: .*line 1"),
        ("", "own.yaml has no searches"),
    ],
)
def test_mistakes_in_a_preset_are_one_line(load, content, message):
    with pytest.raises(UserError) as error:
        load(content)
    assert re.search(message, str(error.value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["cnn", "elsewhere.yaml"])
def test_an_unknown_preset_is_answered_with_those_there_are(name):
    with pytest.raises(
        UserError, match=f"no preset '{name}': take one of cnndm, demo, gpt2_cnndm, plain, squad, translation, xsum"
    ):
        presets.load(name)
