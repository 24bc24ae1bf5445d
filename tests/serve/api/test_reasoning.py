"""Reasoning apart from content, and what a chat's prompt and sampling are made of: prefill, tools, a model's own defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from petatron.infer.sampling_params import SamplingDefaults
from petatron.infer.split_answer_parts import ReasoningFormat, ReasoningParser
from tests.serve.api.test_tool_calls import HERMES, TOOLS
from tests.serve.api.writing_engine import WritingEngine, set_answer
from tests.serve.live_server import LiveServer, live_server

CASES: list[tuple[ReasoningFormat, bool, str, str, str]] = [
    ("think", False, "<think>\nHm, <b>.\n</think>\n\nYes.", "Hm, <b>.", "Yes."),
    ("think", False, "  <think>a </th b</think> c", "a </th b", "c"),
    ("think", False, "No. <think>x</think>", "", "No. <think>x</think>"),
    ("think", False, "<thin", "", "<thin"),
    ("think", False, "<think>cut off ", "cut off", ""),
    ("think", False, "<think></think>Yes", "", "Yes"),
    ("think", True, "\nHm.\n</think>\nYes </think>", "Hm.", "Yes </think>"),
    ("mistral", False, "[THINK]a[/THINK]b", "a", "b"),
]


@pytest.mark.parametrize(("form", "inside", "text", "reasoning", "content"), CASES)
def test_reasoning_is_found_however_the_text_is_cut(
    form: ReasoningFormat, inside: bool, text: str, reasoning: str, content: str
):
    for size in (1, 2, 3, 7, len(text)):
        parser = ReasoningParser(form, inside=inside)
        found = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)] + [parser.feed("", final=True)]
        assert "".join(one.reasoning for one in found) == reasoning
        assert "".join(one.content for one in found) == content


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(WritingEngine()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def read(client: openai.OpenAI, *, stream: bool, **options: Any) -> dict[str, Any]:
    """Returns the message that OpenAI's client makes of an answer."""
    asked = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "extra_body": options}
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message.model_dump(exclude_none=True)
    message: dict[str, Any] = {"role": "assistant"}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for name, value in chunk.choices[0].delta.model_dump(exclude_none=True).items():
            if name in ("content", "reasoning_content", "reasoning") and value:
                message[name] = message.get(name, "") + value
            elif name == "tool_calls":
                message[name] = message.get(name, []) + value
    return message


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_reasoning_apart(client: openai.OpenAI, server: LiveServer, stream: bool):
    def message(
        text: str, template: str = "{# <think> <tool_call> #}", form: str = "auto", **options: Any
    ) -> dict[str, Any]:
        source = "{% for m in messages %}{{ m.content }}{% endfor %}" + template
        set_answer(server, text, source, reasoning_format=form)
        return read(client, stream=stream, **options)

    text = "<think>\nHm.\n</think>\n\nYes."
    apart = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "reasoning": "Hm."}
    together = {"role": "assistant", "content": text}
    assert message(text) == apart
    assert message(text, include_reasoning=False) == {"role": "assistant", "content": "Yes."}
    assert message(text, separate_reasoning=False) == message(text, form="none") == message(text, "") == together
    assert message("Hm.\n</think>\n\nYes.", "{{ '<think>\n' }}") == apart
    called = message("<think>Hm.</think>" + HERMES, tools=TOOLS)
    assert called["reasoning"] == "Hm." and called["tool_calls"][0]["function"]["name"] == "look"
    constrained = message('{"a":1}', "{{ '<think>' }}", guided_json={})
    assert constrained == {"role": "assistant", "content": '{"a":1}'}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_a_prefill_is_that_of_transformers(server: LiveServer, template: str):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "one two"}]
    engine = set_answer(server, "done", template)
    asked = {"messages": messages, "continue_final_message": True}
    [[expected], _] = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    with server.client() as http:
        assert http.post("/v1/chat/completions", json=asked).status_code == 200
        assert bytes(engine.seen[-1][0]).decode() == expected
        counted = http.post("/tokenize", json=asked).json()
        assert bytes(counted["tokens"]).decode() == expected
        called = {"role": "assistant", "tool_calls": [{"id": "x"}]}
        refused = http.post("/v1/chat/completions", json={**asked, "messages": [*messages, called]})
    assert refused.status_code == 400 and "cannot go on" in refused.json()["error"]["message"]


def test_tokenize_counts_tools_and_models_are_listed_with_a_slash(server: LiveServer):
    engine = set_answer(server, "x", "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    with server.client() as http:
        counted = http.post("/tokenize", json=asked).json()
        assert bytes(counted["tokens"]).decode() == json.dumps(TOOLS) + "hi"
        http.post("/v1/chat/completions", json=asked)
        assert engine.seen[-1][0] == counted["tokens"]
        assert http.get("/v1/models/").json() == http.get("/v1/models").json()
        assert http.get("/v1/models/fake").json()["id"] == "fake"


def test_requests_sample_by_the_model_s_defaults_unless_they_say_otherwise(server: LiveServer):
    engine = set_answer(server, "x", "{% for m in messages %}{{ m.content }}{% endfor %}")
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1)
    server.state.model = replace(server.state.model, sampling_defaults=defaults)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    with server.client() as http:
        http.post("/v1/completions", json={"prompt": "a"})
        assert [getattr(engine.seen[-1][1], name) for name in names] == [0.6, 20, 0.95, 0.1, 1.1]
        given = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **given})
        assert [getattr(engine.seen[-1][1], name) for name in names] == [0.0, None, 1.0, 0.0, 1.0]


def test_health_version_and_head():
    with live_server(WritingEngine(), api_keys=("a-key-of-this-test",)) as server, server.client() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.head("/health").status_code == http.head("/").status_code == 200
        http.headers["Authorization"] = "Bearer a-key-of-this-test"
        assert set(http.get("/version").json()) == {"version"}
        for path in ("/v1/models", "/v1/models/fake", "/metrics", "/readyz", "/tokenizer_info", "/version"):
            found = http.head(path)
            assert found.status_code == 200 and not found.content
