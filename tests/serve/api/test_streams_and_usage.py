"""A streamed answer is the whole one, with all that vLLM documents of it: log-probabilities, token ids, stop reasons, counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from petatron.infer.engine_outputs import Completion as EngineCompletion
from petatron.infer.split_answer_parts import count_reasoning_tokens
from petatron.serve.http.token_usage import usage
from tests.serve.api.test_tool_calls import HERMES, TOOLS
from tests.serve.api.writing_engine import WritingEngine, set_answer
from tests.serve.live_server import LiveServer, live_server

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# <think> <tool_call> #}"
REASONED = "<think>Hm.</think>So: yes, Köln"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", **TOOLS[0]["function"]}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_NAMED_ANEW = {"id", "created", "created_at", "call_id"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(WritingEngine()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def events(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client() as http:
        lines = http.post(path, json={**body, "stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def whole(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(inner) for name, inner in value.items() if name not in _NAMED_ANEW}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("tokens", "inside", "count"),
    [
        ([b"<think>", b"Hm", b".", b"</think>", b"Yes"], False, 2),
        ([b" \n", b"<th", b"ink>H", b"m", b".</", b"think>", b"Yes"], False, 3),
        ([b"Hm", b"</think>", b"Yes"], True, 1),
        ([b"<think>", b"cut", b" off"], False, 2),
        ([b"<think>", b"</think>", b"x"], False, 0),
        ([b"No. ", b"<think>", b"x"], False, 0),
        ([], True, 0),
    ],
)
def test_reasoning_tokens_are_those_between_the_tags(tokens: list[bytes], inside: bool, count: int):
    assert count_reasoning_tokens(tokens, "think", inside=inside) == count


def test_usage_counts_reasoning_and_each_prompt_once(client: openai.OpenAI, server: LiveServer):
    set_answer(server, REASONED, TEMPLATE)
    asked: Any = {"model": "fake", "messages": MESSAGES, "n": 2}
    found = client.chat.completions.create(**asked).usage
    *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert found is not None and found == last.usage and found.completion_tokens_details is not None
    assert found.completion_tokens_details.reasoning_tokens == 2 * len("Hm.")
    response = client.responses.create(model="fake", input="hi")
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == len("Hm.")
    plain = client.responses.create(model="fake", input="hi", extra_body={"separate_reasoning": False})
    assert plain.usage is not None and plain.usage.output_tokens_details.reasoning_tokens == 0
    answers = [EngineCompletion([1] * 20, cached_tokens=count) for count in (0, 16, 16, 4, 16, 16)]
    assert usage(40, answers, n=3)["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("text", [REASONED, "<think>Hm.</think>So: " + HERMES, "plain"])
@pytest.mark.parametrize("extra", [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}])
@pytest.mark.parametrize("stop", [None, "Köln"])
def test_a_streamed_response_is_the_whole_one(server: LiveServer, text: str, extra: dict[str, Any], stop: str | None):
    set_answer(server, text, TEMPLATE)
    body = {"input": "hi", "tools": [TOOL], **extra, **({} if stop is None else {"stop": stop})}
    streamed, found = events(server, "/v1/responses", body), whole(server, "/v1/responses", body)
    assert without_ids(streamed[-1]["response"]) == without_ids(found)
    Response.model_validate(found)
    for number, event in enumerate(streamed):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    for item in found["output"] if extra else []:
        if item["type"] == "message":
            tokens = bytes(byte for one in item["content"][0]["logprobs"] for byte in one["bytes"]).decode()
            assert tokens.startswith(item["content"][0]["text"]) and not tokens.startswith("<")


def test_streamed_chats_have_the_parts_of_whole_ones(server: LiveServer):
    set_answer(server, REASONED, TEMPLATE)
    body = {"messages": MESSAGES, "n": 2, "stop": "Köln", "logprobs": True, "top_logprobs": 1}
    body |= {"return_token_ids": True, "return_prompt_text": True, "stream_options": None}
    found = whole(server, "/v1/chat/completions", body)
    counts = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, "/v1/chat/completions", {**body, "stream_options": counts})
    ChatCompletion.model_validate(found)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    assert found["prompt_text"] == "<user>hi" and found["prompt_token_ids"] == list(b"<user>hi")
    for choice in found["choices"]:
        own = [(chunk, one) for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        first, last = own[0], own[-1]
        assert first[0]["prompt_text"] == "<user>hi" and first[0]["prompt_token_ids"] == found["prompt_token_ids"]
        assert [token for _, one in own for token in one.get("token_ids", [])] == choice["token_ids"]
        assert last[1]["stop_reason"] == choice["stop_reason"] == "Köln" and last[1]["finish_reason"] == "stop"
        assert [one for _, part in own if part["logprobs"] for one in part["logprobs"]["content"]] == choice[
            "logprobs"
        ]["content"]
        new = [chunk["usage"]["completion_tokens"] for chunk, _ in own]
        assert new == list(range(len(choice["token_ids"]) + 1)) and first[0]["usage"]["prompt_tokens"] == 8
    assert chunks[-1]["usage"] == found["usage"]


def test_streamed_completions_have_the_parts_of_whole_ones(server: LiveServer):
    set_answer(server, "äbc, Köln", TEMPLATE)
    body = {"prompt": ["hi", "yes"], "stop": "Köln", "logprobs": 1, "return_token_ids": True}
    found = whole(server, "/v1/completions", body)
    counts = {"continuous_usage_stats": True}
    chunks = events(server, "/v1/completions", {**body, "stream_options": counts})
    Completion.model_validate(found)
    for choice in found["choices"]:
        own = [(chunk, one) for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        for name in choice["logprobs"]:
            assert [value for _, one in own for value in one["logprobs"][name]] == choice["logprobs"][name], name
        assert own[0][1]["prompt_token_ids"] == choice["prompt_token_ids"] and "prompt_token_ids" not in own[1][1]
        assert own[-1][1]["stop_reason"] == choice["stop_reason"] == "Köln"
        assert [chunk["usage"]["completion_tokens"] for chunk, _ in own] == list(range(1, len(own) + 1))
        assert own[0][0]["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
