"""The page in a real browser: Debian's Chromium through Playwright, where both are installed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_is_served_from_the_package(server: Serving) -> None:
    page = httpx.get(server.url + "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text
    for name in ("style.css", "app.js", "charts.js", "metrics.js"):
        file = httpx.get(f"{server.url}/page/{name}")
        assert file.status_code == 200 and "http" not in file.text, name
    for name in ("../app.py", "nothing.js", "%2e%2e%2fapp.py"):
        assert httpx.get(f"{server.url}/page/{name}").status_code == 404


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


def keep(page: Any, name: str) -> None:
    """A screenshot, where a person wants to look at it."""
    folder = os.environ.get("FORETOKEN_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.mark.slow
def test_tokens_have_the_colours_of_their_sources(server: Serving, browser: Any) -> None:
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.goto(server.url)
    page.get_by_text("draft_model (up to 5 tokens)").wait_for()
    page.fill("#max_tokens", "120")
    page.click("#run")
    page.wait_for_function("document.querySelector('#summary').textContent.startsWith('120 tok')")
    for source in ("prompt", "accepted", "recovered"):
        assert page.locator(f"#output .{source}").count() > 0, source
    assert "drafter: draft_model" in page.locator("#output .accepted").first.get_attribute("title")
    assert "probability" in page.locator("#output .accepted").first.get_attribute("title")
    inked = """id => { const c = document.getElementById(id);
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        return d.some((v, i) => i % 4 === 3 && v > 0) }"""
    for chart in ("speed", "positions", "latency", "lengths", "kv"):
        page.wait_for_function(inked, arg=chart)
    keep(page, "playground")
    page.click("details summary")
    page.fill("#regex", r"\{\"name\": \"[a-z]{3,8}\", \"age\": \d{1,2}\}")
    page.click("#run")
    page.wait_for_function("!document.querySelector('#run').disabled")
    assert page.locator("#output .grammar").count() > 0
    keep(page, "grammar")
    page.fill("#regex", "(")
    page.click("#run")
    page.wait_for_selector("#summary.error")
    keep(page, "error")
    page.fill("#regex", "")
    page.uncheck("#speculate")
    page.click("#run")
    page.wait_for_function("!document.querySelector('#run').disabled")
    assert page.locator("#output .accepted").count() == 0
    expected = [p for p in problems if "400" in p]  # the refused expression
    assert problems == expected, problems
    page.set_viewport_size({"width": 420, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    keep(page, "narrow")
    page.close()


LUMINANCE = """selector => {
    const found = getComputedStyle(document.querySelector(selector));
    const light = text => {
        const [r, g, b] = text.match(/[\\d.]+/g).map(v => (v / 255) ** 2.2);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    const back = getComputedStyle(document.querySelector('pre')).backgroundColor;
    return [light(found.color), light(back)] }"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_can_be_read(server: Serving, browser: Any, scheme: str) -> None:
    """WCAG's contrast of 4.5 between the text of every source and the ground behind it."""
    page = browser.new_page(
        viewport={"width": 1280, "height": 900}, color_scheme=scheme, bypass_csp=True
    )
    page.goto(server.url)
    page.fill("#max_tokens", "60")
    page.click("#run")
    page.wait_for_function("document.querySelector('#summary').textContent.startsWith('60 tok')")
    for source in ("target", "accepted", "recovered", "bonus", "grammar", "prediction"):
        text, back = page.evaluate(LUMINANCE, f"#legend .{source}")
        contrast = (max(text, back) + 0.05) / (min(text, back) + 0.05)
        assert contrast > 4.5, (source, contrast)
        assert (back < 0.1) == (scheme == "dark")
    page.wait_for_timeout(1500)
    page.locator("#output .accepted").first.hover()
    keep(page, scheme)
    page.close()


@pytest.mark.slow
def test_stopping_frees_the_pages(server: Serving, browser: Any) -> None:
    """Under the page's own content security policy, which the other test has to go around."""
    problems: list[str] = []
    page = browser.new_page()
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.goto(server.url)
    page.fill("#max_tokens", "1900")
    # Clicked by the page itself, since the model may be done before a click from here arrives.
    page.evaluate(
        """() => new MutationObserver((_, watching) => {
            if (document.querySelector("#output span:nth-child(6)")) {
                watching.disconnect();
                document.querySelector("#stop").click();
                window.stopped = true;
            }
        }).observe(document.querySelector("#output"), {childList: true, subtree: true})"""
    )
    page.click("#run")
    page.wait_for_function("() => window.stopped")
    server.wait_idle()
    page.close()
    assert not problems
