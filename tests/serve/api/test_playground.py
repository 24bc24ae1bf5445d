"""The playground page in headless Chromium, against the real app and an engine without a model.

Screenshots are written to `playground0/` in pytest's temporary folder (`--basetemp FOLDER` names it).
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from petatron.history.report.html_style import report_style
from petatron.infer.engine_outputs import TokenEvent
from petatron.serve.playground import PlaygroundPage
from petatron.serve.serve_options import ServeLimits
from petatron.serve.token_texts import TokenTexts
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

KEY = "a-key-of-this-test"
OpenPage = Callable[..., AbstractContextManager[Any]]


class GatedEngine(FakeEngine):
    """Makes `allowed` steps and then waits, so that a test can act in the middle; writes `script`, if there is one."""

    allowed: int | None = None
    script = b""

    def step(self) -> list[TokenEvent]:
        if self.allowed == 0:
            time.sleep(0.002)
            return []
        self.allowed = None if self.allowed is None else self.allowed - 1
        return super().step()

    def _draw(self, request) -> int:
        done = len(request.completion.ids)
        return self.script[done] if done < len(self.script) else super()._draw(request)


@pytest.fixture(scope="module")
def module_live() -> Iterator[LiveServer]:
    with live_server(GatedEngine(), limits=ServeLimits(max_tokens=150)) as live:
        yield live


@pytest.fixture
def live(module_live: LiveServer) -> LiveServer:
    module_live.engine.allowed, module_live.engine.script = None, b""
    return module_live


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """One for all tests: a fresh one takes longer than most of them."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on this machine: `make browser` installs it")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: `make browser` installs it")
    with playwright.sync_playwright() as started:
        args = ["--no-sandbox", "--disable-gpu"]
        browser = started.chromium.launch(executable_path=program, args=args)
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        context.set_default_timeout(15_000)
        yield context.new_page()
        browser.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("playground")


@pytest.fixture
def open_page(tab: Any) -> Iterator[OpenPage]:
    """Opens the page; at the end it may have asked no other origin, and reported no error or violation."""
    requests, complaints = [], []
    watched = {
        "request": lambda request: requests.append(request.url),
        "pageerror": lambda error: complaints.append(str(error)),
        "console": lambda message: complaints.append(message.text) if message.type == "error" else None,
    }

    @contextmanager
    def opened(url: str, *, width: int = 1200, color_scheme: str = "light") -> Iterator[Any]:
        requests.clear()
        tab.set_viewport_size({"width": width, "height": 800})
        tab.emulate_media(color_scheme=color_scheme)
        tab.goto(url)
        yield tab
        assert requests and [one for one in requests if not one.startswith((url, "data:"))] == []
        # Chromium reports every answer that is an error; whether the page shows it is what tests say.
        assert [one for one in complaints if not one.startswith("Failed to load resource")] == []

    for event, listener in watched.items():
        tab.on(event, listener)
    yield opened
    for event, listener in watched.items():
        tab.remove_listener(event, listener)
    tab.unroute_all()
    tab.goto("about:blank")


def _wait(page: Any, selector: str, text: str | re.Pattern[str]) -> None:
    page.locator(selector).filter(has_text=text).wait_for()


def _tokens(page: Any, count: int, panel: str = "#prompt-out") -> Any:
    """Returns the spans of tokens, once there are so many."""
    page.locator(f"{panel} .t").nth(count - 1).wait_for()
    found = page.locator(f"{panel} .t")
    assert found.count() == count
    return found


def _set(page: Any, **values: Any) -> None:
    for name, value in values.items():
        page.fill(f"#{name}", str(value))


def _top(engine: FakeEngine, context: list[int], count: int = 5) -> list[tuple[str, float]]:
    values, texts = engine.logprobs(context), TokenTexts(engine.tokenizer)
    return [(texts.text_of(int(token)), float(values[token])) for token in np.argsort(-values)[:count]]


def _stream(chunks: Sequence[tuple[str, str]]) -> str:
    """Returns the events of a completion with one chunk for each token."""
    events = []
    for number, (token, text) in enumerate(chunks):
        logprobs = {"tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [{token: -0.5}], "text_offset": [0]}
        reason = "stop" if number == len(chunks) - 1 else None
        events.append({"choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_a_prompt_is_typed_streamed_stopped_and_hovered(live: LiveServer, open_page: OpenPage, screenshots: Path):
    engine: GatedEngine = live.engine
    engine.allowed = 8
    with open_page(live.url) as page:
        _wait(page, "#model", "fake · 199 tokens of context")
        _set(page, temperature=0, max_tokens=120)
        page.locator("#prompt").press_sequentially("Once upon")
        _wait(page, "#prompt-count", "9 of 199 tokens")
        page.keyboard.press("Control+Enter")
        tokens = _tokens(page, 8)
        _wait(page, "#state", "generating")
        engine.allowed = 4
        tokens = _tokens(page, 12)
        assert not live.is_idle() and page.locator("#prompt-send").is_disabled()

        page.click("#prompt-stop")
        _wait(
            page, "#prompt-stats", re.compile(r"^12 tokens · \d+\.\d\d s to first token · [\d.,]+ tokens/s · stopped$")
        )
        live.wait_until(live.is_idle)
        assert tokens.count() == 12 and page.locator("#prompt-stop").is_hidden()
        assert page.locator("#error").is_hidden()

        text = "".join(tokens.all_inner_texts())
        assert page.locator("#prompt-out").inner_text() == "Once upon" + text
        tokens.nth(3).hover()
        expected = _top(engine, list(f"Once upon{text[:3]}".encode()))
        names = page.locator("#tip td:first-child").all_inner_texts()
        assert names == [f"“{name}”" for name, _ in expected]
        assert page.locator("#tip tr.own td").first.inner_text() == f"“{text[3]}”" == names[0]
        assert page.locator("#tip p").inner_text() == f"log-probability −{-expected[0][1]:.3f}"
        assert page.locator("#tip td:last-child").first.inner_text() == f"{100 * math.exp(expected[0][1]):.1f} %"
        surprise = tokens.nth(3).evaluate("span => span.style.getPropertyValue('--surprise')")
        assert float(surprise) == pytest.approx((expected[0][1] / math.log(1e-4)) ** 0.6, abs=1e-3)
        page.screenshot(path=screenshots / "prompt.png")

        page.mouse.move(0, 0)
        assert page.locator("#tip").is_hidden()
        tokens.first.focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#tip td:first-child").first.inner_text() == f"“{text[1]}”"


def test_characters_of_several_tokens_markup_and_stop_texts(live: LiveServer, open_page: OpenPage):
    said = "né <b>世</b><img src=x onerror=alert(1)> \n\nrest"
    engine: GatedEngine = live.engine
    engine.script = said.encode()
    with open_page(live.url) as page:
        _set(page, prompt="<i>p</i>", stops="rest\n\\nEND", max_tokens=100)
        page.click("#prompt-send")
        _wait(page, "#prompt-stats", "finished")
        before = said.removesuffix("rest")
        shown = page.locator("#prompt-out .t:not(.cut)").all_text_contents()
        assert shown == list(before), "one span for each character"
        assert page.locator("#prompt-out .t.cut").all_text_contents() == list("rest")
        assert page.locator("#prompt-out *:not(span)").count() == 0
        page.locator("#prompt-out .t", has_text="世").hover()
        assert page.locator("#tip table").count() == 3, "each of its bytes was a token"

        page.click("#prompt-copy")
        _wait(page, "#prompt-copy", "Copied")
        assert page.evaluate("navigator.clipboard.readText()") == before
        engine.script = b"more"
        _set(page, max_tokens=4)
        page.click("#prompt-continue")
        _wait(page, "#prompt-stats", "4 tokens")
        _wait(page, "#prompt-stats", "token limit reached")
        assert page.input_value("#prompt") == "<i>p</i>" + before

        # A special token, text that is held back, a leading space that the tokenizer drops, and a text that is not the token's.
        late = ((" One", "One"), ("<|sep|>", ""), (" tw", " t"), ("o", "w"), ("!", "o!"), ("A", "B"), ("c", "c"))
        page.route(
            "**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=_stream(late))
        )
        page.click("#prompt-send")
        _wait(page, "#prompt-stats", "7 tokens")
        _wait(page, "#prompt-stats", "finished")
        assert page.locator("#prompt-out .t").all_text_contents() == ["One", "<|sep|>", " tw", "o", "!", "B", "c"]
        assert page.locator("#prompt-out .t.cut").all_text_contents() == ["<|sep|>"]


def test_a_conversation(live: LiveServer, open_page: OpenPage, screenshots: Path):
    engine: GatedEngine = live.engine
    with open_page(live.url) as page:
        _set(page, max_tokens=6, top_k=3, seed=5)
        page.locator("#tab-prompt").focus()
        page.keyboard.press("ArrowRight")
        for said, heard in (("Hello", b"Hi you"), ("And now?", b"Then 2")):
            engine.script = heard
            page.fill("#message", said)
            page.keyboard.press("Control+Enter")
            _wait(page, "#log", heard.decode())
            _wait(page, "#chat-stats", "token limit reached")
        engine.script = b"Else 3"
        with page.expect_request("**/v1/chat/completions") as sent:
            page.click("#chat-again")
        _wait(page, "#log", "Else 3")
        _wait(page, "#chat-stats", "token limit reached")
        assert page.locator("#log .message").count() == 4 and page.input_value("#message") == ""
        page.locator("#log .t", has_text="3").hover()
        assert page.locator("#tip tr.own td").first.inner_text() == "“3”"
        page.screenshot(path=screenshots / "chat.png")

        body = sent.value.post_data_json
        roles = [(one["role"], one["content"]) for one in body["messages"]]
        assert roles == [("user", "Hello"), ("assistant", "Hi you"), ("user", "And now?")]
        expected = {"model": "fake", "stream": True, "max_tokens": 6, "temperature": 1, "top_k": 3, "seed": 5}
        assert {name: body[name] for name in expected} == expected

        page.fill("#message", "x" * 300)
        page.click("#chat-send")
        _wait(page, "#error", "Error 400: The prompt has")
        assert page.input_value("#message") == "x" * 300 and page.locator("#log .message").count() == 4
        engine.allowed = 2
        page.fill("#message", "Go on")
        page.keyboard.press("Control+Enter")
        _wait(page, "#chat-stats", "2 tokens")
        page.keyboard.press("Escape")
        _wait(page, "#chat-stats", "stopped")
        live.wait_until(live.is_idle)
        assert page.locator("#log .out").last.inner_text() == "El"
        page.click("#chat-new")
        assert page.locator("#log .message").count() == 0


def test_errors_are_shown_as_the_server_tells_them(live: LiveServer, open_page: OpenPage):
    with open_page(live.url) as page:
        _wait(page, "#state", "ready")
        page.click("#prompt-send")
        _wait(page, "#error", "Error 400: The prompt is empty")
        _set(page, prompt="Once", max_tokens=151)
        page.click("#prompt-send")
        _wait(page, "#error", "151 tokens are more than the 150 that this server generates. (max_tokens)")
        _set(page, temperature=-1)
        page.click("#prompt-send")
        _wait(page, "#error", "Temperature: ")
        _set(page, temperature=0, max_tokens=2)
        page.route("**/v1/completions", lambda route: route.abort(), times=1)
        page.click("#prompt-send")
        _wait(page, "#error", "does not answer")
        event = {"error": {"message": "The server failed.", "type": "server_error", "param": None, "code": None}}
        start = {"choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": None}]}
        for events, told in (([start, event], "The server failed."), ([start], "ended before the answer was complete")):
            body = "".join(f"data: {json.dumps(one)}\n\n" for one in events)
            page.route(
                "**/v1/completions",
                lambda route, _, body=body: route.fulfill(content_type="text/event-stream", body=body),
            )
            page.locator("#prompt").press("Control+Enter")
            _wait(page, "#error", told)
            assert page.locator("#prompt-out").inner_text() == "Onceab", "what arrived stays"


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(open_page: OpenPage):
    with live_server(FakeEngine(max_length=40), api_keys=(KEY,)) as live, open_page(live.url) as page:
        _wait(page, "#error", "Error 401")
        _wait(page, "#state", "needs a key")
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        _wait(page, "#state", "ready")
        assert page.locator("#error").is_hidden()
        _set(page, prompt="Once", temperature=0)
        page.click("#prompt-send")
        _wait(page, "#prompt-stats", re.compile("^36 tokens.* token limit reached"))  # that is what fits, and not 256
        page.reload()
        _wait(page, "#state", "ready")
        assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]


def test_dark_and_narrow(live: LiveServer, open_page: OpenPage, screenshots: Path):
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    live.engine.script = b"A word, a longer word. " * 2
    pages: dict[str, tuple[int, int, int]] = {"dark": (15, 20, 25), "light": (255, 255, 255)}
    for scheme, width in (("dark", 360), ("light", 1600)):
        with open_page(live.url, width=width, color_scheme=scheme) as page:
            assert page.locator("#max_tokens").is_visible() == (width > 900), "a narrow page folds the controls"
            if width <= 900:
                page.click("#controls > summary")
            _set(page, prompt="a" * 80, max_tokens=46)
            page.click("#prompt-send")
            _tokens(page, 46)
            page.locator("#prompt-out .t").nth(30).hover()
            assert page.evaluate(overflow) <= 0
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb{pages[scheme]}"
            page.screenshot(path=screenshots / f"{scheme}-{width}.png")
            box = page.locator("#tip").bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] >= 0
            page.click("#tab-chat")
            assert page.evaluate(overflow) <= 0


def test_the_server_lets_the_page_run_its_own_script_alone(live: LiveServer):
    answer = httpx.get(live.url)
    policy = answer.headers["content-security-policy"]
    assert answer.text == PlaygroundPage.read().html and policy == PlaygroundPage.read().policy
    assert re.search(r"script-src 'sha256-[\w+/]{43}='; style-src 'sha256-[\w+/]{43}='; connect-src 'self'", policy)
    assert "unsafe" not in policy and policy.startswith("default-src 'none'")
    other = PlaygroundPage(answer.text.replace("'use strict'", "'use  strict'"))
    assert other.policy != policy


def test_the_page_names_no_other_host_and_has_the_colors_of_a_report():
    html = PlaygroundPage.read().html
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", html.replace("http://www.w3.org/2000/svg", "")) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b| style=|\son\w+=", html)
    for colors in re.findall(r"--page:[^}]*--c1:#\w+", report_style()):
        for color in colors.split(";"):
            assert color in html


def test_a_schema_is_sent_and_what_is_none_is_told(live: LiveServer, open_page: OpenPage, screenshots: Path):
    live.engine.script = b'{"name":"Ada"}'
    with open_page(live.url) as page:
        _wait(page, "#state", "ready")
        assert page.locator("#schema").is_hidden()
        _set(page, prompt="Who?", max_tokens=14)
        page.select_option("#format", "json_schema")
        page.click("#prompt-send")
        _wait(page, "#error", "write the JSON schema")
        _set(page, schema='{"type": "object",}')
        page.click("#prompt-send")
        _wait(page, "#error", "The JSON schema is not JSON")
        schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        _set(page, schema=json.dumps(schema))
        with page.expect_request("**/v1/completions") as sent:
            page.click("#prompt-send")
        _wait(page, "#prompt-stats", "14 tokens")
        assert sent.value.post_data_json["response_format"]["json_schema"]["schema"] == schema
        assert live.engine.seen[-1][1].constraint.kind == "json_schema"
        page.screenshot(path=screenshots / "schema.png")
        for kind, text in (("regex", "[0-9]+"), ("grammar", 'root ::= "a"')):
            page.select_option("#format", kind)
            _set(page, schema=text)
            page.click("#prompt-send")
            _wait(page, "#prompt-stats", "token limit reached")
            assert live.engine.seen[-1][1].constraint.grammar == text
        page.click("#reset")
        assert page.input_value("#format") == "text" and page.locator("#schema").is_hidden()


def test_tools_are_called_and_their_results_sent(live: LiveServer, open_page: OpenPage, screenshots: Path):
    live.engine.script = b'So: <tool_call>{"name": "weather", "arguments": {"place": "Rome"}}</tool_call>'
    object.__setattr__(live.state.options, "tool_call_format", "hermes")
    with open_page(live.url) as page:
        page.click("#tab-chat")
        page.click("#tools-box > summary")
        _set(page, tools="[", message="Hot?", max_tokens=len(live.engine.script))
        page.click("#chat-send")
        _wait(page, "#error", "Tools is not JSON")
        _set(page, tools='{"name": "weather", "parameters": {"type": "object"}}')
        page.click("#chat-send")
        _wait(page, "#log .call", "weather")
        assert '"place": "Rome"' in page.locator("#log .call code").inner_text()
        assert "".join(page.locator("#log .out .t:not(.cut)").all_text_contents()) == "So: "
        page.locator("#log .call").scroll_into_view_if_needed()
        page.screenshot(path=screenshots / "tools.png")
        live.engine.script = b"It is hot."
        page.fill("#log .call textarea", "31 C")
        _set(page, max_tokens=10)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_text("Send results").click()
        _wait(page, "#log", "It is hot.")
        called, result = sent.value.post_data_json["messages"][1:]
        assert called["tool_calls"][0]["function"]["name"] == "weather" and called["content"] == "So: "
        assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "31 C"}


@pytest.mark.parametrize(("width", "height"), [(1200, 800), (420, 300)])
def test_the_tip_stays_on_the_screen_and_shows_the_bytes_of_a_character(
    live: LiveServer, open_page: OpenPage, screenshots: Path, width: int, height: int
):
    live.engine.script = b"x" + b"\xf0\x9f" + "y😀z".encode()
    with open_page(live.url, width=width) as page:
        page.set_viewport_size({"width": width, "height": height})
        _set(page, prompt="p") if width > 900 else page.fill("#prompt", "p")
        if width <= 900:
            page.click("#controls > summary")
        _set(page, max_tokens=9)
        page.click("#prompt-send")
        _wait(page, "#prompt-stats", "token limit reached")
        spans = page.locator("#prompt-out .t")
        assert spans.all_text_contents() == ["x", "\ufffd", "y", "😀", "z"]
        for text, said in (("\ufffd", "bytes F0 9F: no character"), ("😀", "bytes F0 9F 98 80, 4 tokens")):
            page.locator("#prompt-out .t", has_text=text).hover()
            assert page.locator("#tip .bytes").inner_text() == said
            assert page.locator("#tip tr.own td:first-child").first.inner_text() == "F0"
            box = page.locator("#tip").bounding_box()
            assert (
                box["x"] >= 0
                and box["x"] + box["width"] <= width
                and box["y"] >= 0
                and box["y"] + box["height"] <= height
            )
        page.screenshot(path=screenshots / f"bytes-{width}.png")
