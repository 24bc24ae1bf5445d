"""`/v1/responses` with OpenAI's own client: text, tools, reasoning, constraints, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.serve.api.test_tool_calls import HERMES
from tests.serve.api.writing_engine import WritingEngine, set_answer
from tests.serve.live_server import LiveServer, live_server

Served = Callable[[str], tuple[openai.OpenAI, WritingEngine]]

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}{# <think> <tool_call> #}"
)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False, "description": "sees"}


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[openai.OpenAI, LiveServer]]:
    with (
        live_server(WritingEngine()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, server


@pytest.fixture
def served(live: tuple[openai.OpenAI, LiveServer]) -> Served:
    """Returns a client of a server that answers a text, and its engine."""
    client, server = live
    return lambda text: (client, set_answer(server, text, TEMPLATE))


def test_text_and_usage(served: Served):
    client, engine = served("Hello!")
    found = client.responses.create(
        model="fake", input="hi", instructions="be", temperature=0.5, top_p=0.9, extra_body={"top_k": 3}
    )
    ids, params = engine.seen[-1]
    assert bytes(ids).decode() == "<system>be<user>hi" and (params.temperature, params.top_p, params.top_k) == (
        0.5,
        0.9,
        3,
    )
    cut = client.responses.create(model="fake", input="hi", max_output_tokens=3)
    assert found.output_text == "Hello!" and found.status == "completed" and found.model == "fake"
    assert found.usage is not None and (found.usage.input_tokens, found.usage.output_tokens) == (len(ids), 7)
    assert cut.status == "incomplete" and cut.incomplete_details is not None and cut.output_text == "Hel"


def test_items_become_messages(served: Served):
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be"}]},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
    ]
    client, engine = served("x")
    client.responses.create(model="fake", input=items, tools=[TOOL])
    prompt = bytes(engine.seen[-1][0]).decode()
    tools, _, rest = prompt.partition("<system>")
    assert json.loads(tools)[0]["function"]["name"] == "look"
    calls = rest.partition("<assistant>hmNone")[2].partition("<tool>")[0]
    assert [one["function"]["arguments"] for one in json.loads(calls)] == [{"at": 1}, {}]
    assert rest.startswith("be<user>hi<assistant>") and rest.endswith("<tool>nothing<assistant>ok")


def test_calls_and_reasoning_are_items(served: Served):
    client, _ = served("<think>Hm.</think>So: " + HERMES)
    found = client.responses.create(model="fake", input="hi", tools=[TOOL], parallel_tool_calls=False)
    kinds = [item.type for item in found.output]
    assert kinds == ["reasoning", "message", "function_call"] and found.output_text == "So: "
    call = found.output[2]
    assert call.type == "function_call" and call.name == "look" and json.loads(call.arguments) == {"at": "Köln <b>"}
    assert found.output[0].type == "reasoning" and found.output[0].content is not None
    assert found.output[0].content[0].text == "Hm."


def test_a_stream_builds_the_same_response(served: Served):
    client, _ = served("<think>Hm.</think>So: " + HERMES)
    with client.responses.stream(model="fake", input="hi", tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    assert found.output_text == "So: " and json.loads(found.output[2].arguments) == {"at": "Köln <b>"}
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    for kind in ("reasoning_text.delta", "output_text.delta", "output_text.done", "function_call_arguments.done"):
        assert f"response.{kind}" in kinds


def test_a_format_and_a_forced_call_are_constraints(served: Served):
    class Answer(BaseModel):
        n: int

    client, engine = served('{"n":3}')
    found = client.responses.parse(model="fake", input="hi", text_format=Answer)
    constraint = engine.seen[-1][1].constraint
    assert found.output_parsed == Answer(n=3) and constraint is not None and constraint.kind == "json_schema"
    client.responses.create(model="fake", input="hi", tools=[TOOL], tool_choice={"type": "function", "name": "look"})
    forced = engine.seen[-1][1].constraint
    assert forced is not None and forced.kind == "grammar" and "look" in forced.grammar


def test_log_probabilities(served: Served):
    client, _ = served("Hi")
    found = client.responses.create(model="fake", input="hi", include=["message.output_text.logprobs"], top_logprobs=2)
    content = found.output[0].content[0]
    assert [len(one.top_logprobs) for one in content.logprobs] == [2] * 3 and content.logprobs[0].token == "H"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"previous_response_id": "resp_1"}, "keeps nothing of a request"),
        ({"background": True}, "background is not supported"),
        ({"truncation": "auto"}, "Use truncate_prompt_tokens"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "type item_reference is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "type input_image is not supported"),
        ({"input": [{"role": "", "content": "a"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search"}]}, "tools are functions of the client"),
        ({"n": 2}, "A response is one answer"),
        ({"use_beam_search": True}, "/v1/chat/completions alone"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "response_format"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"logprobs": True}, "Use include"),
        ({"prompt_logprobs": 0}, "/v1/chat/completions alone"),
        ({"previous_response": {"id": "x"}}, "keeps nothing of a request"),
        ({"text": {"format": {"type": "text"}}, "response_format": {"type": "text"}}, "Send one of them"),
    ],
)
def test_what_is_not_supported_is_refused(served: Served, extra: dict[str, Any], said: str):
    client, _ = served("x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="hi", extra_body=extra)
    assert said in caught.value.message
