"""Answers of a real engine under constraints: each name of each server's, and calls of tools that are forced or strict, in every format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.tool_calls import ToolCallFormat
from petatron.serve.served_model_properties import ModelCard
from tests.longform import diagonal
from tests.serve.live_server import LiveServer, live_server
from tests.unit.infer.test_sample import model_in

SCHEMA = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/place"}, "far": {"type": "boolean"}},
    "required": ["at", "far"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Köln", "Rom"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "additionalProperties": False}}},
]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class ThreadEngine(Engine):
    """In the server's own thread, without a process."""

    def wake(self) -> None: ...
    def check_alive(self) -> None: ...


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ThreadEngine:
    """Bytes, and markers: [TOOL_CALLS] is a special token, <tool_call> one that is text, </tool_call> none."""
    fast = FastTokenizer.from_buffer(ByteTokenizer().files()["tokenizer.json"])
    fast.add_special_tokens(["[TOOL_CALLS]", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    fast.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    file = tmp_path_factory.mktemp("markers") / "tokenizer.json"
    fast.save(str(file))
    tokenizer = HuggingFaceTokenizer(file)
    model = model_in("--seq-length 256 --vocab-size 300")
    return ThreadEngine(model, tokenizer, EngineOptions(page_size=8, max_sequences=8, num_pages=256))


@pytest.fixture(scope="module")
def server(engine: ThreadEngine) -> Iterator[LiveServer]:
    card = ModelCard.of_engine(engine, name="real", created_s=1, chat_template=TEMPLATE)
    with live_server(engine, card=card, tool_call_format="hermes") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def set_format(server: LiveServer, form: ToolCallFormat) -> None:
    object.__setattr__(server.state.options, "tool_call_format", form)


def is_compact_json(text: str) -> bool:
    value = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) == text


@diagonal(3)
@pytest.mark.parametrize(
    ("extra", "holds"),
    [
        ({"guided_json": SCHEMA}, is_compact_json),
        ({"structured_outputs": {"json": SCHEMA}}, is_compact_json),
        ({"json_schema": json.dumps(SCHEMA)}, is_compact_json),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_compact_json),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "_"},
            lambda text: text.startswith("{_") and " " not in text,
        ),
        ({"guided_regex": "[0-9]{3}"}, lambda text: re.fullmatch("[0-9]{3}", text)),
        ({"regex": "[0-9]{3}"}, lambda text: re.fullmatch("[0-9]{3}", text)),
        ({"guided_choice": ['ja, "gut"', "né\n"]}, lambda text: text in ('ja, "gut"', "né\n")),
        ({"structured_outputs": {"choice": ["ja", "nein"]}}, lambda text: text in ("ja", "nein")),
        ({"ebnf": 'root ::= "a" | b\nb ::= [0-9] "!"'}, lambda text: re.fullmatch("a|[0-9]!", text)),
        ({"grammar": 'root ::= ("x" | "y"){2}'}, lambda text: re.fullmatch("[xy]{2}", text)),
        ({"guided_grammar": 'start: "ab" | /[0-9]{2}/'}, lambda text: re.fullmatch("ab|[0-9]{2}", text)),
    ],
)
def test_a_constraint_of_any_name_holds(client: openai.OpenAI, extra: dict[str, Any], holds: Any):
    found = client.completions.create(
        model="real", prompt="hi", max_tokens=60, temperature=1.0, seed=1, extra_body=extra
    )
    assert found.choices[0].finish_reason == "stop" and holds(found.choices[0].text), found.choices[0].text


@pytest.mark.parametrize(
    "extra", [{"grammar": "root ::= ("}, {"ebnf": "x"}, {"guided_grammar": "start: missing"}, {"regex": "("}]
)
def test_a_grammar_that_cannot_be_read_is_refused(client: openai.OpenAI, extra: dict[str, Any]):
    with pytest.raises(openai.BadRequestError, match="cannot be used as a constraint"):
        client.completions.create(model="real", prompt="hi", extra_body=extra)


def _calls(
    client: openai.OpenAI, *, stream: bool = False, **options: Any
) -> tuple[list[tuple[str, Any]], str | None, str]:
    """The calls of an answer, its content and its finish reason."""
    asked: dict[str, Any] = {
        "model": "real",
        "messages": MESSAGES,
        "tools": TOOLS,
        "temperature": 1.0,
        "max_tokens": 150,
    }
    asked |= options
    if stream:
        deltas, reason = [], None
        for chunk in client.chat.completions.create(**asked, stream=True):
            deltas.append(chunk.choices[0].delta)
            reason = chunk.choices[0].finish_reason or reason
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        content = "".join(delta.content or "" for delta in deltas) or None
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        calls, content, reason = choice.message.tool_calls or [], choice.message.content, choice.finish_reason
    return [(one.function.name, json.loads(one.function.arguments)) for one in calls], content, str(reason)


@diagonal(3)
@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_forced(client: openai.OpenAI, server: LiveServer, form: ToolCallFormat, stream: bool):
    set_format(server, form)
    named = {"type": "function", "function": {"name": "look"}}
    calls, content, reason = _calls(client, tool_choice=named, seed=2, stream=stream)
    assert [name for name, _ in calls] == ["look"] and content is None and reason == "tool_calls"
    jsonschema.validate(calls[0][1], SCHEMA)
    if stream:
        return
    found = client.chat.completions.create(
        model="real",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=90,
        seed=1,
        n=2,
    )
    written = [choice.message.tool_calls for choice in found.choices]
    assert all(calls is not None and len(calls) == 1 for calls in written)
    assert {calls[0].function.name for calls in written} <= {"look", "find"}


def test_a_forced_call_is_written_with_the_special_token(
    client: openai.OpenAI, server: LiveServer, engine: ThreadEngine
):
    set_format(server, "mistral")
    marker = engine.tokenizer.encode("[TOOL_CALLS]")
    found = client.chat.completions.create(
        model="real",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=150,
        extra_body={"return_token_ids": True},
    )
    assert len(marker) == 1 and found.choices[0].token_ids[0] == marker[0]


@diagonal(2)
@pytest.mark.parametrize(
    ("form", "begin"), [("hermes", "<tool_call>"), ("llama3", '{"name": "'), ("mistral", "[TOOL_CALLS]")]
)
def test_strict_tools_hold_calls_that_the_model_begins(
    client: openai.OpenAI, server: LiveServer, engine: ThreadEngine, form: ToolCallFormat, begin: str
):
    """The bias makes the model begin a call; where tools are not strict, what follows is anything."""
    set_format(server, form)
    [first, *_] = engine.tokenizer.encode(begin)
    free, *_ = _calls(client, logit_bias={str(first): 100}, max_tokens=40, seed=1)
    assert not free
    grammar_calls, content, _ = _calls(
        client, tools=STRICT, logit_bias={str(first): 12}, seed=1, parallel_tool_calls=False
    )
    assert grammar_calls and all(name in ("look", "find") for name, _ in grammar_calls), content


def test_strict_tools_leave_text_free(client: openai.OpenAI, server: LiveServer):
    set_format(server, "hermes")
    calls, content, _ = _calls(client, tools=STRICT, max_tokens=20, seed=3)
    assert not calls and content


def test_functions_are_the_older_form_of_tools(client: openai.OpenAI, server: LiveServer):
    set_format(server, "hermes")
    functions = [tool["function"] for tool in TOOLS]
    found = client.chat.completions.create(
        model="real", messages=MESSAGES, functions=functions, function_call={"name": "find"}, max_tokens=90
    )
    message = found.choices[0].message
    assert message.function_call is not None and message.function_call.name == "find" and message.tool_calls is None
    assert found.choices[0].finish_reason == "function_call"


def test_a_gap_is_filled_between_its_tokens(client: openai.OpenAI, engine: ThreadEngine):
    extra = {"return_token_ids": True}
    found = client.completions.create(model="real", prompt="ab", suffix="yz", max_tokens=2, extra_body=extra)
    before, after, middle = (engine.tokenizer.encode(f"<|fim_{name}|>")[0] for name in ("prefix", "suffix", "middle"))
    assert found.choices[0].prompt_token_ids == [before, *b"ab", after, *b"yz", middle]
    with pytest.raises(openai.BadRequestError, match="neither with echo"):
        client.completions.create(model="real", prompt="ab", suffix="yz", echo=True)


def test_special_tokens_are_hidden_unless_they_are_asked_for(client: openai.OpenAI, engine: ThreadEngine):
    [token] = engine.tokenizer.encode("<|fim_prefix|>")

    def text(**extra: bool) -> str:
        bias = {str(token): 100}
        found = client.completions.create(model="real", prompt="a", max_tokens=2, logit_bias=bias, extra_body=extra)
        return found.choices[0].text

    assert text() == text(skip_special_tokens=True) == ""
    assert text(skip_special_tokens=False) == "<|fim_prefix|>" * 2


def test_rerank_and_score_are_cosines_of_embeddings(client: openai.OpenAI, server: LiveServer):
    texts = ["hello", "hello there", "1234"]
    query, *others = (one.embedding for one in client.embeddings.create(model="real", input=["hello", *texts]).data)
    expected = [sum(x * y for x, y in zip(query, other)) for other in others]
    with server.client() as http:
        scored = http.post("/v1/score", json={"text_1": "hello", "text_2": texts}).json()
        assert [one["score"] for one in scored["data"]] == pytest.approx(expected, abs=1e-5)
        pairs = http.post("/score", json={"text_1": texts, "text_2": texts}).json()
        assert [one["score"] for one in pairs["data"]] == pytest.approx([1.0] * 3)
        documents = [{"text": texts[0]}, *texts[1:]]
        ranked = http.post("/v1/rerank", json={"query": "hello", "documents": documents, "top_n": 2}).json()
        assert [one["index"] for one in ranked["results"]] == sorted(range(3), key=lambda index: -expected[index])[:2]
        assert ranked["results"][0]["document"] == {"text": "hello"} and ranked["usage"]["total_tokens"] == 25
        wrong = http.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert wrong.status_code == 400 and "send one for all" in wrong.json()["error"]["message"]
