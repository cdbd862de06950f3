"""A headless browser for tests of pages: Debian's Chromium, driven by Playwright.

    from browser import browser, open_page  # noqa: F401  (a fixture)

    def test_the_page_has_a_heading(browser):
        with open_page(browser, file.as_uri()) as page:
            assert page.locator("h1").inner_text() == "..."
"""

import contextlib
import shutil
from collections.abc import Iterator

import pytest

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """One browser for the tests of a module: while it is there, Playwright's event loop runs in this thread. Each page
    has cookies and storage of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=executable, args=FLAGS)
        yield running
        running.close()


@contextlib.contextmanager
def open_page(browser, address: str, viewport: dict = DESKTOP, dark: bool = False, **options) -> Iterator:
    """A loaded page. At the end, errors of its scripts and requests that failed fail the test."""
    context = browser.new_context(viewport=viewport, color_scheme="dark" if dark else "light", **options)
    try:
        page, problems = context.new_page(), []
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(f"{request.url}: {request.failure}"))
        page.goto(address)
        yield page
        assert problems == []
    finally:
        context.close()
