"""Every field that clients of OpenAI, vLLM, SGLang and llama.cpp send: it does what it says, is refused with a reason, or has no effect.

The table of the server (`request_field_rules.py`) is walked with OpenAI's own client; its completeness is that of the installed client's
types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from petatron.infer.grammar import ANY_WHITESPACE
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.http.openai_requests import ChatCompletionRequest, CompletionRequest
from petatron.serve.http.request_field_rules import IGNORED_HEADER, NO_EFFECT, REFUSED
from petatron.serve.http.responses_api_requests import RESPONSE_RULES, ResponsesRequest
from petatron.serve.served_model_properties import ModelCard
from tests.serve.api.field_rules import field_rules, supported_fields
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

TEMPLATE = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{{ reasoning_effort }}{{ documents | length if documents }}{{ mood }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# <tool_call> #}"
)
USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": LOOK}


class Seen(NamedTuple):
    """What a request became: the prompt's text, its parameters, and the answer."""

    prompt: str
    params: SamplingParams
    answer: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        return self.answer["choices"][0]

    @property
    def text(self) -> str:
        return self.choice["text"] if "text" in self.choice else self.choice["message"]["content"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = FakeEngine()
    card = ModelCard.of_engine(engine, name="fake", created_s=1, chat_template=TEMPLATE)
    with live_server(engine, card=card) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, server: LiveServer, route: str, extra: Mapping[str, Any]) -> Seen:
    plain = {"max_tokens": 6, "temperature": 0.0, "seed": 3}
    plain = {name: value for name, value in plain.items() if name not in extra}
    if "max_completion_tokens" in extra:
        del plain["max_tokens"]
    if route == "chat":
        call = client.chat.completions.with_raw_response.create
        given: dict[str, Any] = {"messages": extra.get("messages", [USER])}
    else:
        call, given = client.completions.with_raw_response.create, {"prompt": extra.get("prompt", "hi")}
    body = {name: value for name, value in extra.items() if name not in given}
    answer = json.loads(call(model="fake", **plain, **given, extra_body=body).text)
    assert isinstance(server.engine, FakeEngine)
    ids, params = server.engine.seen[-1]
    return Seen(bytes(ids).decode(), params, answer)


def param(name: str, value: Any) -> Callable[[Seen], bool]:
    return lambda seen: getattr(seen.params, name) == value


def constraint(kind: str, grammar: str | None = None, whitespace: str | None = None) -> Callable[[Seen], bool]:
    def check(seen: Seen) -> bool:
        found = seen.params.constraint
        same = found is not None and found.kind == kind and found.whitespace == whitespace
        return same and (grammar is None or found.grammar == grammar)

    return check


SCHEMA = {"type": "object"}
Case = tuple[dict[str, Any], Callable[[Seen], bool]]
SHARED: dict[str, Case] = {
    "model": ({"model": "fake"}, lambda seen: seen.answer["model"] == "fake"),
    "n": ({"n": 2}, lambda seen: len(seen.answer["choices"]) == 2),
    "temperature": ({"temperature": 0.5}, param("temperature", 0.5)),
    "top_p": ({"top_p": 0.5}, param("top_p", 0.5)),
    "presence_penalty": ({"presence_penalty": 1.0}, param("presence_penalty", 1.0)),
    "frequency_penalty": ({"frequency_penalty": 1.0}, param("frequency_penalty", 1.0)),
    "logit_bias": ({"logit_bias": {"33": 100}}, lambda seen: seen.text == "!!!!!!"),
    "seed": ({"seed": 7}, param("seed", 7)),
    "stop": ({"stop": ["x"]}, param("stop_strings", ("x",))),
    "stream_options": ({"stream_options": None}, lambda seen: True),  # in streams: test_streams_and_usage
    "stream": ({"stream": False}, lambda seen: "object" in seen.answer),
    "response_format": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        constraint("json_schema", json.dumps(SCHEMA)),
    ),
    "structured_outputs": (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
        constraint("json", whitespace=ANY_WHITESPACE),
    ),
    "guided_json": ({"guided_json": SCHEMA}, constraint("json_schema", json.dumps(SCHEMA))),
    "guided_regex": ({"guided_regex": "a+"}, constraint("regex", "a+")),
    "guided_choice": ({"guided_choice": ["a", "b"]}, constraint("grammar", 'start: "a" | "b"')),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, constraint("grammar", 'start: "a"')),
    "guided_json_object": ({"guided_json_object": True}, constraint("json")),
    "guided_whitespace_pattern": (
        {"guided_json": "{}", "guided_whitespace_pattern": " ?"},
        constraint("json_schema", "{}", " ?"),
    ),
    "regex": ({"regex": "a+"}, constraint("regex", "a+")),
    "ebnf": ({"ebnf": 'root ::= "a"'}, constraint("grammar", 'root ::= "a"')),
    "json_schema": ({"json_schema": json.dumps(SCHEMA)}, constraint("json_schema", json.dumps(SCHEMA))),
    "grammar": ({"grammar": 'root ::= "a"'}, constraint("grammar", 'root ::= "a"')),
    "top_k": ({"top_k": 7}, param("top_k", 7)),
    "min_p": ({"min_p": 0.1}, param("min_p", 0.1)),
    "repetition_penalty": ({"repetition_penalty": 1.5}, param("repetition_penalty", 1.5)),
    "min_tokens": ({"min_tokens": 3}, param("min_new_tokens", 3)),
    "ignore_eos": ({"ignore_eos": True}, param("stop_ids", ())),
    "stop_token_ids": ({"stop_token_ids": [5]}, param("stop_ids", (5, 256))),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True}, param("keep_stop", True)),
    "no_stop_trim": ({"no_stop_trim": True}, param("keep_stop", True)),
    "skip_special_tokens": ({"skip_special_tokens": False}, param("hidden_ids", ())),
    "allowed_token_ids": ({"allowed_token_ids": [97, 98]}, param("allowed_ids", (97, 98))),
    "bad_words": ({"bad_words": ["no"]}, param("bad_words_ids", (tuple(b"no"), tuple(b" no")))),
    "use_beam_search": (
        {"use_beam_search": True, "n": 2},
        lambda seen: len({one.get("text") or one["message"]["content"] for one in seen.answer["choices"]}) == 2,
    ),
    "best_of": ({"best_of": 1}, lambda seen: True),  # other values: refused below
    "length_penalty": ({"use_beam_search": True, "n": 2, "length_penalty": 0.0}, lambda seen: True),  # test_beams_*
    "early_stopping": ({"use_beam_search": True, "n": 2, "early_stopping": True}, lambda seen: True),  # test_beams_*
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 1}, lambda seen: len(seen.prompt) == 1),
    "truncation_side": (
        {"truncate_prompt_tokens": 1, "truncation_side": "right"},
        lambda seen: seen.prompt in ("h", "<"),  # the first of it; the last is i or >
    ),
    "cache_salt": ({"cache_salt": "mine"}, param("prefix_group", "\nmine")),
    "add_special_tokens": ({"add_special_tokens": False}, lambda seen: True),  # test_special_tokens_before_a_prompt
    "prompt_logprobs": (
        {"prompt_logprobs": 1},
        lambda seen: len(seen.answer.get("prompt_logprobs") or seen.choice["prompt_logprobs"]) == len(seen.prompt),
    ),
    "return_tokens_as_token_ids": (
        {"return_tokens_as_token_ids": True, "logprobs": 1},
        lambda seen: "token_id:" in json.dumps(seen.choice["logprobs"]),
    ),
    "return_token_ids": (
        {"return_token_ids": True},
        lambda seen: bytes(seen.choice["token_ids"]).decode() == seen.text,
    ),
    "request_id": ({"request_id": "mine-1"}, lambda seen: seen.answer["id"].endswith("-mine-1")),
}
COMPLETION: dict[str, Case] = {
    "prompt": ({"prompt": "abc"}, lambda seen: seen.prompt == "abc"),
    "max_tokens": ({"max_tokens": 2}, param("max_new_tokens", 2)),
    "logprobs": ({"logprobs": 2}, lambda seen: len(seen.choice["logprobs"]["tokens"]) == 6),
    "echo": ({"echo": True}, lambda seen: seen.text.startswith("hi")),
    "suffix": ({"suffix": ""}, lambda seen: seen.prompt == "hi"),  # with tokens for it: test_a_gap_is_filled
}
PREFILL = {"messages": [USER, {"role": "assistant", "content": "Well, "}], "continue_final_message": True}
CHAT: dict[str, Case] = {
    "messages": ({"messages": [USER, USER]}, lambda seen: seen.prompt.count("<user>hi</user>") == 2),
    "max_tokens": ({"max_tokens": 2}, param("max_new_tokens", 2)),
    "max_completion_tokens": ({"max_completion_tokens": 2}, param("max_new_tokens", 2)),
    "logprobs": ({"logprobs": True}, lambda seen: len(seen.choice["logprobs"]["content"]) == 6),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 2},
        lambda seen: len(seen.choice["logprobs"]["content"][0]["top_logprobs"]) == 2,
    ),
    "tools": ({"tools": [TOOL]}, lambda seen: seen.prompt.startswith("[1 tools]")),
    "tool_choice": ({"tools": [TOOL], "tool_choice": "required"}, constraint("grammar")),
    "parallel_tool_calls": (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        lambda seen: (
            "call)*" not in seen.params.constraint.grammar and ")*" not in seen.params.constraint.grammar.split("\n")[0]
        ),
    ),
    "functions": ({"functions": [LOOK]}, lambda seen: seen.prompt.startswith("[1 tools]")),
    "function_call": ({"functions": [LOOK], "function_call": {"name": "look"}}, constraint("grammar")),
    "add_generation_prompt": ({"add_generation_prompt": False}, lambda seen: seen.prompt.endswith("</user>")),
    "continue_final_message": (PREFILL, lambda seen: seen.prompt.endswith("<assistant>Well, ")),
    "echo": ({**PREFILL, "echo": True}, lambda seen: seen.text.startswith("Well, ")),
    "chat_template_kwargs": ({"chat_template_kwargs": {"mood": "glad"}}, lambda seen: seen.prompt.startswith("glad")),
    "documents": ({"documents": [{"text": "a"}]}, lambda seen: seen.prompt.startswith("1")),
    "reasoning_effort": ({"reasoning_effort": "low"}, lambda seen: seen.prompt.startswith("low")),
    "return_prompt_text": ({"return_prompt_text": True}, lambda seen: seen.answer["prompt_text"] == seen.prompt),
    "include_reasoning": ({"include_reasoning": False}, lambda seen: True),  # test_reasoning
    "separate_reasoning": ({"separate_reasoning": False}, lambda seen: True),  # test_reasoning
}
ROUTES = {
    "completions": (CompletionRequest, SHARED | COMPLETION),
    "chat": (ChatCompletionRequest, SHARED | CHAT),
}


@pytest.mark.parametrize("route", ROUTES)
def test_supported_fields_do_what_they_say(client: openai.OpenAI, server: LiveServer, route: str):
    body, cases = ROUTES[route]
    assert cases.keys() == supported_fields(body)
    for name, (extra, holds) in cases.items():
        if route == "chat" and extra.get("logprobs") == 1:
            extra = extra | {"logprobs": True}
        seen = ask(client, server, route, extra)
        assert holds(seen), (name, seen)


@pytest.mark.parametrize("route", ROUTES)
def test_refused_fields_are_told_with_their_reason(client: openai.OpenAI, server: LiveServer, route: str):
    for name, rule in REFUSED.items():
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, server, route, {name: {"odd": 1}})
        error = caught.value.body
        assert isinstance(error, dict) and error["param"] == name and error["code"] == "unsupported_field"
        assert error["message"] == f"{name} is not supported: {rule.reason}" and len(rule.reason) > 10
    neutral = {name: rule.neutral[0] for name, rule in REFUSED.items() if rule.neutral} | {"audio": None}
    expected = ask(client, server, route, {})
    assert ask(client, server, route, neutral).text == expected.text


def test_all_refused_fields_are_named_at_once(server: LiveServer):
    with server.client() as http:
        found = http.post("/v1/completions", json={"prompt": "a", "mirostat": 2, "lora_path": "x"}).json()["error"]
    assert "mirostat is not supported" in found["message"] and "lora_path is not supported" in found["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_fields_without_effect_change_nothing(client: openai.OpenAI, server: LiveServer, route: str):
    expected = ask(client, server, route, {})
    found = ask(client, server, route, dict.fromkeys(NO_EFFECT, "x"))
    assert (found.prompt, found.params, found.text) == (expected.prompt, expected.params, expected.text)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
def test_unknown_fields_are_named_in_a_header(server: LiveServer, path: str):
    body = {"prompt": "a", "messages": [USER], "input": "a"}
    known = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}.get(path, "input")
    body = {known: body[known], "tempratur": 0, "é\n": 1, "user": "me"}
    with server.client() as http:
        for stream in (False, True) if "embeddings" not in path else (False,):
            answer = http.post(path, json=body | ({"stream": stream} if stream else {}))
            assert answer.status_code == 200 and answer.headers[IGNORED_HEADER] == "tempratur, %C3%A9%0A"
        assert IGNORED_HEADER not in http.post(path, json={known: body[known]}).headers


@pytest.mark.parametrize(
    ("body", "params", "others"),
    [
        (CompletionRequest, CompletionParams, {}),
        (ChatCompletionRequest, ChatParams, {}),
        (ResponsesRequest, ResponseParams, RESPONSE_RULES),
    ],
)
def test_the_table_has_every_field_of_the_openai_client(body: Any, params: Any, others: Mapping[str, Any]):
    assert (
        set(params.__annotations__) - field_rules(body).keys() - others.keys()
        == {"stream_options"} - body.model_fields.keys()
    )


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"regex": "a", "guided_json": {}}, "guided_json and regex are two constraints"),
        ({"guided_whitespace_pattern": " "}, "the request has none"),
        ({"regex": "a", "structured_outputs": {"disable_any_whitespace": False}}, "regex is none"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"best_of": 3}, "equal to n"),
        ({"stream_options": {"include_usage": True}}, "needs stream true"),
        ({"length_penalty": 2.0}, "send use_beam_search"),
        ({"early_stopping": True}, "send use_beam_search"),
        ({"min_tokens": 7}, "min_tokens 7 is more than the 6 tokens"),
        ({"use_beam_search": True, "top_k": 3, "stream": True}, "top_k, stream: has no effect"),
        ({"allowed_token_ids": [999]}, "outside the vocabulary"),
        ({"guided_choice": []}, "guided_choice"),
        ({"truncate_prompt_tokens": 0}, "prompt is empty"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_fields_that_do_not_agree_are_refused(
    client: openai.OpenAI, server: LiveServer, route: str, extra: dict[str, Any], said: str
):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, server, route, extra)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"functions": [LOOK], "tools": [TOOL]}, "older form"),
        ({"function_call": "auto"}, "needs functions"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: Field required"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [TOOL, TOOL]}, "Two tools have the name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "find"}}}, "not among the tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "may be"),
        ({"tool_choice": "required"}, "has no tools"),
        ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "Send one of them"),
    ],
)
def test_chats_that_do_not_agree_are_refused(server: LiveServer, extra: dict[str, Any], said: str):
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json={"messages": [USER], **extra})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_streams_have_token_ids_and_prefills(client: openai.OpenAI, server: LiveServer):
    stream = client.chat.completions.create(
        model="fake",
        messages=PREFILL["messages"],
        max_tokens=4,
        temperature=0,
        stream=True,
        extra_body={"continue_final_message": True, "echo": True, "return_token_ids": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert text == "Well, " + bytes(ids).decode() and len(ids) == 4


def test_beams_are_those_of_the_search(client: openai.OpenAI, server: LiveServer):
    """The best answer of three beams is at least as likely as the greedy one, and answers come best first."""
    engine = server.engine
    assert isinstance(engine, FakeEngine)

    def logprob(text: str) -> float:
        ids = list(b"hi" + text.encode())
        return sum(float(engine.logprobs(ids[:place])[ids[place]]) for place in range(2, len(ids)))

    seen = ask(client, server, "completions", {"use_beam_search": True, "n": 3, "max_tokens": 4})
    scores = [logprob(choice["text"]) for choice in seen.answer["choices"]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert scores[0] >= logprob(engine.greedy("hi", 4)) - 1e-9


def test_beams_follow_length_penalty_and_early_stopping(client: openai.OpenAI, server: LiveServer):
    engine = server.engine
    assert isinstance(engine, FakeEngine)
    asked = {"use_beam_search": True, "n": 2, "max_tokens": 8, "stop_token_ids": list(range(97, 110))}

    def best_and_steps(**more: Any) -> tuple[int, int]:
        before = len(engine.seen)
        seen = ask(client, server, "completions", {**asked, "prompt": "beam", "return_token_ids": True, **more})
        return len(seen.choice["token_ids"]), len(engine.seen) - before

    assert best_and_steps(length_penalty=-5.0)[0] < best_and_steps(length_penalty=5.0)[0]
    assert best_and_steps(length_penalty=5.0, early_stopping=True)[1] < best_and_steps(length_penalty=5.0)[1]


def test_special_tokens_before_a_prompt(server: LiveServer):
    engine, card = server.engine, server.state.model
    assert isinstance(engine, FakeEngine)
    server.state.model = replace(card, prefix_ids=(1,))
    found = []
    with server.client() as http:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [USER]})):
            for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
                http.post(f"/v1/{path}", json={**body, "max_tokens": 1, **given})
                found.append(engine.seen[-1][0][0] == 1)
    server.state.model = card
    assert found == [True, True, False, False, True, False]


def test_the_documentation_has_the_table():
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    missing = [name for name in field_rules(ChatCompletionRequest) if f"`{name}" not in page]
    assert set(missing) <= {
        "model",
        "messages",
        "temperature",
        "presence_penalty",
        "frequency_penalty",
        "max_tokens",
    }, missing
    for name, rule in {**REFUSED, **NO_EFFECT}.items():
        assert any(f"`{name}`" in line and rule.reason in line for line in page.splitlines()), name
