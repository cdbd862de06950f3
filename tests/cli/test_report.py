"""What `fairseq-el evaluate` computes about one or two systems, and the page that it writes."""

import json

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from browser import DESKTOP, PHONE, browser, open_page  # noqa: F401  (browser is a fixture)
from fairseq_el.cli.evaluate import report
from fairseq_el.cli.evaluate.comparing import print_comparison
from fairseq_el.cli.evaluate.histogram import Histogram
from fairseq_el.cli.evaluate.statistics import Comparison, Pair, System, estimates_of
from fairseq_el.text import rouge
from helpers import DEMO, read_lines
from html_pages import check_page, parse_page

HOSTILE = [
    "</script><script>document.title = 'taken over'</script>",
    '<img src=x onerror="document.title = \'taken over\'"> & &amp; <b>bold</b>',
    "]]> --> <!-- </title></style> {{ data }} {% raw %} \u2028 \u0000 ' \" ` ${count}",
    "emoji 👩‍💻 and 𝒜, right to left שלום, e\u0301",
]
COUNT = 100
TEXTS, REFERENCES = (read_lines(DEMO / f"test.{side}")[: COUNT - len(HOSTILE)] for side in ("source", "target"))
MANY = 11_490  # as CNN/DailyMail has
BOUND = 5000  # ms, on a machine that does other things too


def system(name, summaries, references, **row) -> System:
    scores = rouge.rouge(references, summaries)
    row = {
        "preset": "demo", "search": "beam", "model": "demo", "data": "bin", "date": "2026-01-01",
        "sentences_per_second": 100.0, "peak_source_bytes": 1 << 20, "settings": {"beam": "4"},
        "versions": {"torch": "2"}, "machine": {"cores": 2},
    } | row  # fmt: skip
    return System(name, summaries, scores, estimates_of(scores, references, summaries, with_bleu=False), row)


@pytest.fixture(scope="module")
def references():
    return [*REFERENCES, *HOSTILE]


@pytest.fixture(scope="module")
def comparison(references):
    """Of references with one word less, of which every tenth has another word in the middle in one of the systems."""
    ours = [" ".join(text.split()[1:]) or text for text in references]
    theirs = [f"{text[: len(text) // 2]} elsewhere {text[len(text) // 2 :]}" if i % 10 == 0 else text
              for i, text in enumerate(ours)]  # fmt: skip
    return Comparison.of(system("int8", ours, references), system("exact", theirs, references))


@pytest.fixture(scope="module")
def page(comparison, references, tmp_path_factory):
    sources = [*TEXTS, *HOSTILE]
    path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(report.render(sources, references, [comparison.first, comparison.second], comparison), "utf-8")
    return path


# ---- statistics

WORDS = st.lists(st.sampled_from(["a", "b", "bee", "c,", "d!", "été", "統計", "👩‍💻", "x"]), max_size=8).map(" ".join)


@given(WORDS, WORDS)
def test_parts_of_two_texts_are_the_texts_and_every_other_part_is_common(first, second):
    pair = Pair.of(first, second)
    assert tuple("".join(parts) for parts in pair.parts) == (first, second)
    common = [[part.split() for part in parts[::2]] for parts in pair.parts]
    assert common[0] == common[1]
    assert pair.similarity == 1 or first.split() != second.split()
    assert pair.similarity > 0 or not set(first.split()) & set(second.split())


def test_words_in_common_are_a_share_of_both_texts():
    """Four words of five, twice."""
    assert Pair.of("a b c d e", "a b x d e").similarity == pytest.approx(8 / 10)
    assert Pair.of("a b c d e", "a b x d e").parts == (["a b ", "c ", "d e"], ["a b ", "x ", "d e"])
    assert Pair.of("統計の本", "統計の木").parts == (["統計の", "本"], ["統計の", "木"])


def test_a_comparison_counts_identical_summaries_and_ranks_the_others(comparison):
    assert comparison.identical == COUNT - COUNT / 10
    worst = comparison.most_different(20)
    assert sorted(worst) == list(range(0, COUNT, 10))
    assert [comparison.pairs[i].similarity for i in worst] == sorted(comparison.pairs[i].similarity for i in worst)
    assert comparison.most_different(3) == worst[:3]


def test_scores_and_their_differences_are_those_of_rouge_score(comparison, references):
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for kind, name in (("rouge1", "ROUGE-1"), ("rouge2", "ROUGE-2"), ("rougeL", "ROUGE-L")):
        columns = [
            np.array([100 * scorer.score(*pair)[kind].fmeasure for pair in zip(references, side.summaries)])
            for side in (comparison.first, comparison.second)
        ]
        for side, column in zip((comparison.first, comparison.second), columns):
            np.testing.assert_allclose(side.scores[name], column)
            value, low, high = side.estimates[name]
            assert value == pytest.approx(column.mean())
            error = column.std() / np.sqrt(COUNT)  # the interval of a normal distribution is 1.96 of it on both sides
            assert (value - low) / error == pytest.approx(1.96, rel=0.2) == (high - value) / error
        assert comparison.differences[name].value == pytest.approx((columns[0] - columns[1]).mean())


def test_bleu_is_that_of_sacrebleu():
    lines = [f"{text} and so on" for text in REFERENCES[:50]]
    found = estimates_of({}, REFERENCES[:50], lines, with_bleu=True)["BLEU"]
    assert found.value == pytest.approx(sacrebleu.corpus_bleu(lines, [REFERENCES[:50]]).score)
    assert found.low < found.value < found.high


def test_texts_that_differ_are_printed_most_different_first(comparison, references, capsys):
    print_comparison(comparison, references)
    printed = capsys.readouterr().out
    assert "int8 and exact: 90 of 100 summaries are identical (90.0%)." in printed
    first = comparison.most_different(1)[0]
    beginning = printed.index(f"text {first + 1}, {comparison.pairs[first].similarity:.0%} of the words in common")
    assert printed.index("that differ:") < beginning == printed.index("text ", printed.index("that differ:"))


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=60), st.lists(st.floats(0, 1000), min_size=1, max_size=60))
def test_every_value_is_in_one_bin_of_a_histogram(first, second):
    plot = Histogram.of("lengths", " words", {"first": first, "second": second})
    last = len(plot.edges) - 2
    for name, values in (("first", first), ("second", second)):
        for i, (low, high) in enumerate(zip(plot.edges, plot.edges[1:])):
            inside = [value for value in values if low <= value and (value < high or i == last)]
            assert plot.counts[name][i] == len(inside)
        assert sum(plot.counts[name]) == len(values)
    assert plot.is_open == (max(first + second) > plot.edges[-1])
    assert set(plot.ticks) <= set(plot.edges)


# ---- the page


def test_a_page_is_well_formed_and_has_every_text(page, comparison, references):
    data = parse_page(page)
    assert data["references"] == references
    for shown, side in zip(data["systems"], (comparison.first, comparison.second)):
        assert ["".join(parts) for parts in shown["summaries"]] == side.summaries
        for name, scores in side.scores.items():
            assert shown["scores"][name] == [round(score, 1) for score in scores.tolist()]


def test_a_page_shows_scores_settings_and_plots_without_its_script(page, comparison):
    found = check_page(page)
    assert "90 of 100 summaries are identical" in found.text
    for side in (comparison.first, comparison.second):
        for estimate in side.estimates.values():
            assert f"{estimate.value:.2f} {estimate.low:.2f} to {estimate.high:.2f}" in found.text
    assert found.tags.count("svg") == 6 and "version of torch" in found.text


def test_hostile_texts_and_settings_are_escaped(references, tmp_path):
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(COUNT)]
    sides = [system(HOSTILE[i], texts, references, model=HOSTILE[0], settings={HOSTILE[1]: HOSTILE[2]}) for i in (0, 1)]
    path = tmp_path / "page.html"
    path.write_text(report.render(texts, references, sides, Comparison.of(*sides)), "utf-8")
    found = check_page(path)
    assert found.tags.count("script") == 2 and "b" not in found.tags
    assert json.loads(found.inside["data"])["sources"] == texts
    assert HOSTILE[1] in found.text


def test_a_page_of_one_system_and_one_text(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(report.render(["a"], ["b"], [system("exact", ["c"], ["b"])]), "utf-8")
    data = parse_page(path)
    assert data["systems"][0]["summaries"] == [["c"]] and data["similarities"] is None


def test_long_sources_are_cut_and_the_page_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "CHARACTERS_OF_SOURCES", 20)
    path = tmp_path / "page.html"
    path.write_text(report.render(["short", "a" * 50], ["b"] * 2, [system("exact", ["c"] * 2, ["b"] * 2)]), "utf-8")
    assert parse_page(path)["sources"] == ["short", "a" * 10 + " …"]
    assert "Only the first 10 characters of each source" in check_page(path).text


# ---- in a browser


def numbers(view) -> list[int]:
    return [int(name.split()[1]) - 1 for name in view.locator("article h3").all_text_contents()]


def test_texts_are_sorted_by_what_is_chosen(browser, page, comparison):  # noqa: F811
    with open_page(browser, page.as_uri()) as view:
        assert numbers(view)[:10] == comparison.most_different(10)  # at first, what differs most
        view.get_by_label("Sort by").select_option("ROUGE-2 of exact")
        scores = comparison.second.scores["ROUGE-2"].round(1)
        assert [scores[i] for i in numbers(view)] == sorted(scores)[: len(numbers(view))]
        view.get_by_role("button", name="lowest first").click()
        assert [scores[i] for i in numbers(view)] == sorted(scores, reverse=True)[: len(numbers(view))]
        view.get_by_label("Sort by").select_option("order of the data")
        assert numbers(view)[:5] == [0, 1, 2, 3, 4]


def test_words_that_only_one_system_has_are_marked(browser, page, comparison):  # noqa: F811
    with open_page(browser, page.as_uri()) as view:
        view.get_by_label("only those that differ").check()
        assert view.get_by_role("status").inner_text() == "10 of 100 texts"
        assert sorted(numbers(view)) == list(range(0, COUNT, 10))
        assert all("elsewhere" in card.locator("mark.s1").all_text_contents()[-1]
                   for card in view.locator("article").all())  # fmt: skip
        mark = view.locator("article mark.s1").first
        assert mark.evaluate("m => getComputedStyle(m).textDecorationLine") == "underline"  # not by colour alone
        assert view.locator("article").first.locator("mark.s0").count() <= 1


def test_texts_are_searched_without_regard_to_case(browser, page, comparison, references):  # noqa: F811
    word = "LIBRARY"
    texts = zip(TEXTS, references, comparison.first.summaries, comparison.second.summaries)
    expected = {i for i, found in enumerate(texts) if word.lower() in "\n".join(found).lower()}
    with open_page(browser, page.as_uri()) as view:
        view.get_by_role("searchbox").fill(word)
        view.get_by_text(f"{len(expected)} of 100 texts").wait_for()
        assert 0 < len(numbers(view)) and set(numbers(view)) <= expected
        view.get_by_role("searchbox").fill("#12")
        view.get_by_text("1 of 100 texts").wait_for()
        assert numbers(view) == [11]
        view.get_by_role("searchbox").fill("no text has this")
        view.get_by_text("0 of 100 texts").wait_for()


def test_hostile_texts_are_shown_as_they_are(browser, page):  # noqa: F811
    with open_page(browser, page.as_uri()) as view:
        for i, text in enumerate(HOSTILE):
            view.get_by_role("searchbox").fill(f"#{COUNT - len(HOSTILE) + i + 1}")
            view.get_by_role("heading", name=f"Text {COUNT - len(HOSTILE) + i + 1}", exact=True).wait_for()
            view.get_by_text("1 of 100 texts").wait_for()
            shown = view.locator("article dd").nth(1).evaluate("cell => cell.textContent")
            assert shown == text
        assert "taken over" not in view.title() and view.locator("article img, article b").count() == 0


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_the_page_without_scrolling_sideways(browser, page, dark):  # noqa: F811
    with open_page(browser, page.as_uri(), PHONE, dark) as view:
        assert view.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert view.locator("article").first.bounding_box()["width"] <= PHONE["width"]
        look = view.evaluate("(look => [look.color, look.backgroundColor])(getComputedStyle(document.body))")
        ink, ground = (sum(map(int, colour.strip("rgb()").split(","))) for colour in look)
        assert abs(ink - ground) > 450 and (ink > ground) == dark


def test_the_page_works_by_keyboard(browser, page, comparison):  # noqa: F811
    with open_page(browser, page.as_uri()) as view:
        view.keyboard.press("Tab")
        assert view.evaluate("document.activeElement.textContent") == "Skip to the texts"
        view.keyboard.press("Enter")
        view.keyboard.press("Tab")
        view.keyboard.type("#11")
        view.get_by_text("1 of 100 texts").wait_for()
        view.keyboard.press("Tab")
        view.keyboard.press("Home")  # of the list of what to sort by
        assert view.get_by_label("Sort by").input_value() == "0"
        view.keyboard.press("Tab")
        view.keyboard.press("Enter")
        assert view.get_by_role("button", name="highest first").count() == 1
        for _ in range(2):
            view.keyboard.press("Tab")
        view.keyboard.press("Enter")  # opens the source
        assert numbers(view) == [10]
        assert view.locator("article details[open]").inner_text().endswith(TEXTS[10][-40:])


def test_a_page_of_many_texts_is_quick_and_makes_few_cards_at_a_time(browser, tmp_path):  # noqa: F811
    texts = [f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(MANY)]
    scores = {"ROUGE-1": np.arange(MANY) % 1000 / 10}
    row = system("exact", ["a"], ["a"]).row
    estimates = {"ROUGE-1": estimates_of({"ROUGE-1": scores["ROUGE-1"][:9]}, [], [], False)["ROUGE-1"]}
    sides = [System(name, texts, scores, estimates, row) for name in ("int8", "exact")]
    path = tmp_path / "page.html"
    path.write_text(report.render(texts, texts, sides, Comparison.of(*sides)), "utf-8")
    with open_page(browser, path.as_uri(), DESKTOP) as view:
        assert view.evaluate("performance.getEntriesByType('navigation')[0].domComplete") < BOUND
        made = view.locator("article").count()
        assert 0 < made < 200
        before = view.evaluate("performance.now()")
        view.get_by_role("searchbox").fill(f"{MANY - 1} ")
        view.get_by_text(f"1 of {MANY:,} texts").wait_for()
        view.get_by_role("searchbox").fill("")
        view.get_by_text(f"{MANY:,} of {MANY:,} texts").wait_for()
        view.get_by_label("Sort by").select_option("ROUGE-1 of int8")
        assert view.evaluate("performance.now()") - before < BOUND
        view.mouse.wheel(0, 100_000)
        view.locator("article").nth(made).wait_for()
        assert view.locator("article").count() < 1000
