"""The page in a real browser: Debian's Chromium through Playwright, where both are installed."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.server.settings import ServerConfig
from tests.e2e.serving import Serving, serving
from tests.guards.sources import PACKAGE

FILES = tuple(
    file.name for file in (PACKAGE / "server" / "page_files").iterdir() if file.suffix != ".html"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
def test_the_page_is_served_from_the_package(server: Serving) -> None:
    page = httpx.get(server.url + "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text
    for name in FILES:
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
    folder = os.environ.get("FORETOKEN_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


DONE = "!document.querySelector('#run').disabled"
INKED = """id => { const c = document.getElementById(id);
    const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
    return d.some((v, i) => i % 4 === 3 && v > 0) }"""
CHARTS = ("speed", "positions", "latency", "lengths", "kv")


def press(page: Any) -> None:
    page.click("#run")
    page.wait_for_function(DONE)


@pytest.mark.slow
def test_tokens_have_the_colours_of_their_sources(server: Serving, browser: Any) -> None:
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.goto(server.url)
    page.get_by_text("draft_model (up to 5 tokens)").wait_for()
    page.select_option("#mode", "speculating")
    press(page)
    assert page.inner_text("#speculating_facts").startswith("82 tokens in ")
    assert not page.is_visible("#plain_pane") and page.inner_text("#verdict") == ""
    for source in ("prompt", "accepted", "recovered"):
        assert page.locator(f"#output .{source}").count() > 0, source
    assert "drafter: draft_model" in page.locator("#output .accepted").first.get_attribute("title")
    assert "probability" in page.locator("#output .accepted").first.get_attribute("title")
    for chart in CHARTS:
        page.wait_for_function(INKED, arg=chart)
    keep(page, "playground")
    page.click("details summary")
    page.fill("#structure", r"\{\"name\": \"[a-z]{3,8}\", \"age\": \d{1,2}\}")
    press(page)
    assert page.locator("#output .grammar").count() > 0
    keep(page, "grammar")
    page.fill("#structure", "(")
    press(page)
    page.wait_for_selector("#summary.error")
    keep(page, "error")
    page.fill("#structure", "")
    page.select_option("#mode", "plain")
    press(page)
    assert page.locator("#plain .accepted").count() == 0 < page.locator("#plain .target").count()
    expected = [p for p in problems if "400" in p]  # the refused expression
    assert problems == expected, problems
    page.close()


@pytest.mark.slow
def test_drafts_of_a_block_have_a_mark_of_their_own(browser: Any) -> None:
    """By the name that the user gave the drafter, and told apart without colour."""
    drafter = {"model": "demo-parallel", "num_speculative_tokens": 3, "name": "wide"}
    config = EngineConfig.from_kwargs(
        model="demo", max_num_seqs=2, adaptive_speculation=False, speculative_config=drafter
    )
    with serving(build_engine(config)) as wide:
        assert httpx.get(wide.url + "/version").json()["block_drafters"] == ["wide"]
        page = browser.new_page(bypass_csp=True)
        page.goto(wide.url)
        page.get_by_text("wide (up to 3 tokens)").wait_for()
        page.select_option("#mode", "speculating")
        press(page)
        shown = {name: page.locator(f"#output .{name}").count() for name in ("block", "accepted")}
        assert shown["block"] > 0 == shown["accepted"], shown
        title = page.locator("#output .block").first.get_attribute("title")
        assert "block draft accepted" in title and "drafter: wide" in title
        for source in ("accepted", "block"):
            line = page.locator(f"#legend .{source}").evaluate(
                "one => getComputedStyle(one).textDecorationLine"
            )
            assert line == ("underline" if source == "block" else "none")
        keep(page, "blocks")
        page.close()


@pytest.mark.slow
def test_what_control_does_is_on_the_page(server: Serving, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)
    page.goto(server.url)
    page.select_option("#mode", "speculating")
    press(page)
    page.wait_for_selector("#control_drafters .drafting")
    row = page.inner_text("#control_drafters tr")
    assert "draft_model" in row and "drafts up to 5 in every step" in row
    assert page.locator("#control_drafters .chances i").count() == 5
    assert "as configured" in page.inner_text("#control_step")
    assert "draft_model" in page.inner_text("#control_changes")
    said = "document.querySelector('#control_step').textContent"
    page.wait_for_function(f"{said}.startsWith('No request runs now; this is how')")
    keep(page, "control")
    page.close()


@pytest.mark.slow
def test_a_run_says_how_much_faster_and_compares_the_tokens(server: Serving, browser: Any) -> None:
    """Both ways have one seed and no cache in common; the headline is of the server's times."""
    page = browser.new_page(bypass_csp=True)
    asked: list[dict[str, Any]] = []
    page.on("request", lambda r: asked.append(r.post_data_json) if r.method == "POST" else None)
    page.goto(server.url)
    page.fill("#seed", "")
    page.fill("#max_tokens", "40")
    press(page)
    said = page.inner_text("#verdict")
    assert re.match(r"(As fast as plain|[\d.]+ times as fast as plain|Slower than plain.*), ", said)
    assert "tokens" in said and f"Seed {asked[0]['seed']}." in page.inner_text("#summary")
    if "same tokens" in said:
        assert page.inner_text("#output") == page.inner_text("#plain")
    assert len(asked) in (2, 4, 6) and len({body["seed"] for body in asked}) == 1
    assert len({body["cache_salt"] for body in asked}) == len(asked)
    ways = [body["speculation"]["enabled"] for body in asked]
    assert ways.count(True) == ways.count(False)
    keep(page, "compared")
    page.close()


VERDICT = """async ([fast, slow, other]) => {
    const { verdict, facts } = await import("/page/verdict.js");
    const made = ([ids, took]) => ({ ids, drafted: 2,
        times: { queued_s: 1, first_token_s: 1.1, finished_s: 1 + took } });
    const of = (one, two) => verdict({ speculating: [made(one)], plain: [made(two)] });
    return [of(fast, slow), of(slow, fast), of(fast, other), of(slow, slow), facts(made(fast))] }"""


@pytest.mark.slow
def test_the_verdict_is_honest(server: Serving, browser: Any) -> None:
    page = browser.new_page(bypass_csp=True)
    page.goto(server.url)
    fast, slow, other = ([5, 6, 7], 1.0), ([5, 6, 7], 2.4), ([5, 9, 7], 2.4)
    faster, slower, differs, alike, facts = page.evaluate(VERDICT, [fast, slow, other])
    assert faster == {"text": "2.4 times as fast as plain, same tokens", "good": True}
    assert slower["text"] == "Slower than plain: 0.4 times its speed, same tokens"
    assert "tokens differ from number 2 on" in differs["text"]
    assert not slower["good"] and not differs["good"]
    assert alike["text"].startswith("As fast as plain, same tokens")
    assert facts == "3 tokens in 1.00 s, 3.00 tokens/s, 2 drafted, first after 100 ms"
    page.close()


@pytest.mark.slow
def test_the_headline_and_the_columns_are_of_the_same_runs(server: Serving, browser: Any) -> None:
    """Once "1.7 times as fast" by medians stood above the first runs' 410 and 507 tokens/s."""
    took = {True: [0.39, 0.2, 0.19], False: [0.3155, 0.34, 0.35]}
    page = browser.new_page(bypass_csp=True)

    def answer(route: Any) -> None:
        way = route.request.post_data_json["speculation"]["enabled"]
        times = {"queued_s": 0.1, "first_token_s": 0.11, "finished_s": 0.1 + took[way].pop(0)}
        token = {"text": " x", "source": "target", "drafter": None, "position": 0}
        tokens = [{**token, "id": i, "probability": None} for i in range(160)]
        choice = {"index": 0, "text": " x", "tokens": tokens, "times": times}
        route.fulfill(body=f"data: {json.dumps({'choices': [choice]})}\n\n",
                      content_type="text/event-stream")  # fmt: skip

    page.route("**/v1/completions", answer)
    page.goto(server.url)
    press(page)
    assert page.inner_text("#verdict").startswith("1.7 times as fast as plain")
    assert page.inner_text("#speculating_facts").startswith("160 tokens in 0.20 s, 800 tokens/s")
    assert page.inner_text("#plain_facts").startswith("160 tokens in 0.34 s, 471 tokens/s")
    assert "Of 3 runs each" in page.inner_text("#summary")
    page.close()


MANY = 2029


@pytest.mark.slow
def test_thousands_of_tokens_cost_one_drawing_and_show_the_servers_time(
    server: Serving, browser: Any
) -> None:
    """Guards against laying out the page once per token: 24 s for what took the server 2.4 s."""
    times = {"queued_s": 0.1, "first_token_s": 0.2, "finished_s": 2.5}
    events = []
    for i in range(MANY):
        token = {"id": i, "text": " x", "source": "target", "drafter": None, "position": 0}
        choice = {"index": 0, "text": " x", "tokens": [{**token, "probability": None}]}
        event = {"choices": [{**choice, **({"times": times} if i + 1 == MANY else {})}]}
        events.append(f"data: {json.dumps(event)}\n\n")
    page = browser.new_page(bypass_csp=True)
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(body="".join(events), content_type="text/event-stream"),
    )
    page.goto(server.url)
    page.evaluate(
        """() => { window.drawn = 0;
            new MutationObserver(() => { window.drawn += 1 })
                .observe(document.querySelector("#output"), { childList: true }) }"""
    )
    page.select_option("#mode", "speculating")
    press(page)
    assert page.locator("#output .target").count() == MANY
    assert page.evaluate("window.drawn") < MANY / 10
    assert page.inner_text("#speculating_facts").startswith(
        f"{MANY} tokens in 2.40 s, 845 tokens/s"
    )
    drawn = page.evaluate(
        """async count => {
            const { Pane } = await import("/page/pane.js");
            const pane = new Pane(document.createElement("pre"), () => {});
            const token = { source: "target", text: "x", drafter: null, position: 0,
                            probability: null };
            for (let i = 0; i < count; i += 1) pane.add(token);
            const before = pane.element.childElementCount;
            await new Promise(done => requestAnimationFrame(() => done()));
            return [before, pane.element.childElementCount, pane.frames] }""",
        MANY,
    )
    assert drawn == [0, MANY, 1]
    page.close()


@pytest.mark.slow
def test_examples_fill_the_form_and_chat_goes_on(server: Serving, browser: Any) -> None:
    page = browser.new_page(bypass_csp=True)
    asked: list[Any] = []
    page.on("request", lambda r: asked.append(r) if r.method == "POST" else None)
    page.goto(server.url)
    page.select_option("#mode", "speculating")
    page.click("[data-example=json]")
    press(page)
    found = json.loads(page.inner_text("#output").split("user = ")[1])
    assert found["permission"] in ("read", "write", "admin")
    page.click("[data-example=prediction]")
    page.fill("#max_tokens", "30")
    press(page)
    assert page.locator("#output .prediction").count() > 0
    page.click("[data-example=chat]")
    page.fill("#max_tokens", "12")
    press(page)
    assert asked[-1].url.endswith("/v1/chat/completions") and page.input_value("#prompt") == ""
    page.fill("#prompt", "And now?")
    press(page)
    assert [m["role"] for m in asked[-1].post_data_json["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    assert page.locator("#output .said").count() == 3
    keep(page, "chat")
    page.click("#forget")
    assert page.inner_text("#output") == ""
    page.close()


@pytest.mark.slow
def test_a_key_is_asked_for_when_it_is_needed(browser: Any) -> None:
    engine = build_engine(EngineConfig.from_kwargs(model="demo-draft", max_num_seqs=2))
    with serving(engine, ServerConfig(api_keys=("open",))) as locked:
        page = browser.new_page(bypass_csp=True)
        page.goto(locked.url)
        assert not page.is_visible("#key")
        page.fill("#max_tokens", "8")
        press(page)
        assert page.is_visible("#key") and "API key" in page.inner_text("#summary")
        assert page.evaluate("document.activeElement.id") == "key"
        keep(page, "key")
        page.fill("#key", "open")
        page.press("#key", "Enter")
        page.wait_for_function("document.querySelector('#verdict').textContent")
        page.close()


@pytest.mark.slow
def test_on_a_phone_the_answer_comes_first_and_idle_charts_say_what_they_show(
    server: Serving, browser: Any
) -> None:
    page = browser.new_page(viewport={"width": 420, "height": 860}, bypass_csp=True)
    page.route("**/metrics", lambda route: route.fulfill(body="", content_type="text/plain"))
    page.goto(server.url)
    page.wait_for_function("document.querySelectorAll('.idle').length === 5")
    for chart in CHARTS:
        assert not page.is_visible(f"#{chart}") and page.is_visible(f"#{chart} + .empty")
    assert page.is_visible("[data-example=code]") and not page.is_visible("#output")
    keep(page, "phone-first")
    page.fill("#max_tokens", "20")
    press(page)
    answer, form = (page.locator(name).bounding_box()["y"] for name in ("#output", "#form"))
    assert 0 <= answer < form
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    keep(page, "phone")
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
    press(page)
    for source in ("target", "accepted", "block", "recovered", "bonus", "grammar", "prediction"):
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
