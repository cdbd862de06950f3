"""The page in a real browser: a text goes in, a summary comes out, mistakes are shown, and the keyboard is enough."""

import os
import re

import pytest

from browser import browser  # noqa: F401  (a fixture)
from helpers import TEXTS, load_once
from serving.client import HOST, Server

TEXT = TEXTS[1]


@pytest.fixture(scope="module")
def server():
    with Server("--model", "demo", "--threads", "1") as running:
        yield running


@pytest.fixture
def page(server, browser):  # noqa: F811
    """The page, opened; the test fails for an error in its script, and for a request to another address."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(60_000)
    problems, addresses = [], []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: addresses.append(request.url))
    opened.goto(f"http://{HOST}:{server.port}/")
    opened.wait_for_selector("#search option", state="attached")
    yield opened
    opened.close()
    assert problems == []
    assert all(re.match(rf"http://{HOST}:{server.port}/|data:", address) for address in addresses)


def summarize(page) -> None:
    page.fill("#text", TEXT)
    page.click("#go")
    page.wait_for_selector("#attention:not([hidden])")


def test_a_summary_comes_out_with_score_alternatives_and_state(page):
    summarize(page)
    for search in ("beam", "diverse"):
        expected = load_once("demo", "demo", search).detailed(TEXT, 4)
        column = page.locator("#columns > div").nth(("beam", "diverse").index(search))
        found = [line.split("\n", 1) for line in column.locator("li").all_inner_texts()]
        right = [(f"{one.score:.3f}", one.summary) for one in (expected, *expected.alternatives)]
        assert [(score, summary.strip()) for score, summary in found] == right
    assert page.inner_text("#summary") == load_once("demo", "demo")(TEXT)
    state = page.locator("#bars > div").nth(1).locator(".bar span:last-child").all_inner_texts()
    el, stock = (float(size.removesuffix(" kB")) for size in state)
    assert stock > el > 0
    assert "same summary" in page.inner_text("#attention_note")


def test_words_that_were_copied_are_marked_in_source_and_summary(page):
    summarize(page)
    assert page.inner_text("#source") == TEXT
    marked = [part.lower() for part in page.locator("#source mark").all_inner_texts()]
    summary = load_once("demo", "demo")(TEXT).lower()
    assert marked and all(part in summary for part in marked)
    assert [part.lower() for part in page.locator("#summary mark").all_inner_texts()]


def test_greedy_search_is_streamed(page):
    page.select_option("#search", "greedy")
    page.evaluate(
        "seen = new Set(); new MutationObserver(changes => changes.forEach(change => change.addedNodes.forEach("
        "node => seen.add(node.textContent)))).observe(document.getElementById('summary'), {childList: true})"
    )
    summarize(page)
    expected = load_once("demo", "demo", "greedy")(TEXT)
    assert page.inner_text("#summary") == expected
    steps = page.evaluate("[...seen]")
    assert sum(expected.startswith(step) for step in steps) > 3


def test_a_mistake_is_shown_and_the_next_run_clears_it(page):
    page.fill("#text", TEXT)
    page.evaluate("document.getElementById('max_len').max = ''")  # which the form would refuse by itself
    page.fill("#max_len", "5000")
    page.click("#go")
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error") == "max_len 5000 is too large: at most 1024"
    assert page.is_enabled("#go")
    page.fill("#max_len", "")
    summarize(page)
    assert page.is_hidden("#error")


def test_a_server_that_has_gone_is_reported(page):
    page.route("**/v1/summaries", lambda route: route.abort())
    page.fill("#text", TEXT)
    page.click("#go")
    page.wait_for_selector("#error:not([hidden])")
    assert "does not answer" in page.inner_text("#error")


def test_the_keyboard_is_enough(page):
    for _ in range(2):  # the link to the interface's description comes first
        page.keyboard.press("Tab")
    page.keyboard.insert_text(TEXT)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#attention:not([hidden])")
    order = []
    for _ in range(4):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert order == ["search", "precision", "max_len", "go"]


def test_a_phone_shows_everything_without_scrolling_sideways(page):
    page.set_viewport_size({"width": 360, "height": 740})
    summarize(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/phone.png", full_page=True)


def test_a_token_that_the_server_wants_can_be_given(browser, tmp_path):  # noqa: F811
    (tmp_path / "token").write_text("secret")
    with Server("--model", "demo", "--threads", "1", "--token-file", str(tmp_path / "token")) as running:
        page = browser.new_page()
        page.goto(f"http://{HOST}:{running.port}/")
        page.wait_for_selector("#token_label:not([hidden])")
        page.fill("#token", "secret")
        page.fill("#text", TEXT)
        page.click("#go")
        page.wait_for_selector("#attention:not([hidden])")
        assert page.inner_text("#summary") == load_once("demo", "demo")(TEXT)
        page.close()
