"""Calls of tools: found in every format however the text is cut, and as the OpenAI client reads them, streamed or not."""

from __future__ import annotations

import json

import openai
import pytest

from petatron.infer.tool_calls import ToolCall, ToolCallFormat, ToolCallParser, template_format
from petatron.serve.served_model_properties import ModelCard
from tests.longform import diagonal
from tests.serve.api.writing_engine import WritingEngine
from tests.serve.live_server import live_server

LOOK, FIND = ToolCall("look", '{"at": "Köln <b>"}'), ToolCall("find", "{}")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "find")]
NAMES = {"look", "find"}
HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": "Köln <b>"}}\n</tool_call>'
LLAMA3 = '{"name": "look", "parameters": {"at": "Köln <b>"}}'
MISTRAL = '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "Köln <b>"}}, {"name": "find"}]'
CASES: list[tuple[ToolCallFormat, str, str, list[ToolCall]]] = [
    ("hermes", "Let me see. " + HERMES, "Let me see. ", [LOOK]),
    ("hermes", f'{HERMES}\n<tool_call>{{"name": "find"}}</tool_call>\n', "", [LOOK, FIND]),
    ("hermes", HERMES.removesuffix("</tool_call>"), "", [LOOK]),
    ("hermes", "<tool_call>{no json}</tool_call> end", "<tool_call>{no json}</tool_call> end", []),
    ("hermes", "<tool_call>[]", "<tool_call>[]", []),
    ("hermes", "a < b, <tool", "a < b, <tool", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("llama3", LLAMA3, "", [LOOK]),
    ("llama3", f' <|python_tag|>{LLAMA3}; {{"name": "find", "parameters": {{}}}}', "", [LOOK, FIND]),
    ("llama3", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ("llama3", '{"a": 1}', '{"a": 1}', []),
    ("llama3", f"See: {LLAMA3}", f"See: {LLAMA3}", []),
    ("llama3", "<|python", "<|python", []),
    ("mistral", "Well. " + MISTRAL, "Well. ", [LOOK, FIND]),
    ("mistral", "[TOOL_CALLS] [{", "[TOOL_CALLS] [{", []),
    ("mistral", "[TOOL", "[TOOL", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(form: ToolCallFormat, text: str, content: str, calls: list[ToolCall]):
    for size in (1, 2, 3, 7, len(text)):
        parser = ToolCallParser(form, NAMES)
        found = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
        assert "".join(one.content for one in found) == content
        assert [call for one in found for call in one.calls] == calls and parser.num_calls == len(calls)


def test_text_before_a_call_is_not_held_back():
    parser = ToolCallParser("hermes", NAMES)
    assert parser.feed("Hello <").content == "Hello " and parser.feed("b>").content == "<b>"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_the_template_s(template: str, form: str | None):
    assert template_format(template) == form


def _message(text: str, *, stream: bool, template: str = "<tool_call>", **options):
    """What the OpenAI client makes of an answer, its finish reason, and the text of the prompt."""
    engine = WritingEngine(text)
    settings = {name: options.pop(name) for name in ("tool_call_format",) if name in options}
    source = template + "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    card = ModelCard.of_engine(engine, name="fake", created_s=1, chat_template=source)
    asked = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "tools": TOOLS,
        **options,
    }
    with live_server(engine, card=card, **settings) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        if not stream:
            choice = client.chat.completions.create(**asked).choices[0]
            calls = [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or []]
            return choice.message.content, calls, choice.finish_reason, bytes(engine.seen[-1][0]).decode()
        content, calls, reason = "", {}, None
        for chunk in client.chat.completions.create(**asked, stream=True):
            delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason or reason
            content += delta.content or ""
            for one in delta.tool_calls or []:
                assert one.function is not None and one.index not in calls
                calls[one.index] = one.id, one.function.name, one.function.arguments
        return content or None, [calls[index] for index in sorted(calls)], reason, bytes(engine.seen[-1][0]).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_reads_calls(stream: bool):
    content, calls, reason, _ = _message(f'{HERMES}\n<tool_call>{{"name": "find"}}</tool_call>', stream=stream)
    assert [(name, json.loads(given)) for _, name, given in calls] == [("look", {"at": "Köln <b>"}), ("find", {})]
    assert content is None and reason == "tool_calls"
    assert len({number for number, *_ in calls}) == 2 and all(number.startswith("call_") for number, *_ in calls)
    content, calls, reason, _ = _message("Well. " + MISTRAL, stream=stream, template="x", tool_call_format="mistral")
    assert content == "Well. " and len(calls) == 2 and reason == "tool_calls"


@diagonal(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "given", [{"tools": []}, {"tool_choice": "none"}, {"tool_call_format": "none"}, {"template": "plain"}]
)
def test_answers_are_text_where_no_call_is_expected(stream: bool, given: dict):
    assert _message(HERMES, stream=stream, **given)[:3] == (HERMES, [], "stop")


def test_an_answer_that_is_cut_off_keeps_its_reason():
    content, calls, reason, _ = _message("See " + HERMES, stream=True, max_tokens=20)
    assert content is not None and content.startswith("See <tool_call>") and not calls and reason == "length"


def test_arguments_of_former_calls_reach_the_template_as_objects():
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    odd = {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": "{"}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call, odd]}]
    prompt = _message("done", stream=False, messages=messages)[3]
    assert '"arguments": {"at": 1}' in prompt and '"arguments": "{"' in prompt
