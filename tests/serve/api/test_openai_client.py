"""OpenAI's own client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from petatron.data.prompt.prompt_encoder import PromptEncoder
from petatron.data.tokenizer import ByteTokenizer
from petatron.serve.served_model_properties import ModelCard
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as found:
        yield found


@pytest.fixture
def engine(server: LiveServer) -> FakeEngine:
    assert isinstance(server.engine, FakeEngine)
    return server.engine


def test_every_form_of_prompt_gets_its_answers_in_order(client: openai.OpenAI, engine: FakeEngine):
    texts = ["abc", "wxyz", "k"]
    expected = [engine.greedy(text, 6) for text in texts]
    ids = [list(text.encode()) for text in texts]
    for prompt, wanted in ((texts, expected), (ids, expected), (texts[0], expected[:1]), (ids[1], expected[1:2])):
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=6, temperature=0)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
    assert answer.usage is not None and answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == 6


def test_streams_have_the_text_of_the_whole_answer(client: openai.OpenAI, engine: FakeEngine):
    stream = client.completions.create(
        model="fake",
        prompt=["ab", "cd"],
        max_tokens=9,
        temperature=0,
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = ["", ""], {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == ["ab" + engine.greedy("ab", 9), "cd" + engine.greedy("cd", 9)]
    assert reasons == {0: "length", 1: "length"} and usage is not None and usage.total_tokens == 22


def test_a_seed_repeats_its_samples_and_samples_differ(client: openai.OpenAI):
    def ask(prompt: str | list[str], **settings) -> list[str]:
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=8, **settings)
        return [choice.text for choice in answer.choices]

    three = ask("abc", n=3, seed=5)
    assert three == ask("abc", n=3, seed=5) and len(set(three)) == 3
    assert ask("abc", seed=5) == three[:1]  # alone or with others
    assert ask(["abc", "q", "abc"], seed=5)[::2] == three[:2]  # the same prompt again is another sample
    assert ask("abc") != ask("abc")


def test_stop_texts_and_biases(client: openai.OpenAI, engine: FakeEngine):
    whole = engine.greedy("stop", 12)
    answer = client.completions.create(
        model="fake",
        prompt="stop",
        max_tokens=12,
        temperature=0,
        stop=["\x00", "\x01", "\x02", "\x03", "\x04", whole[4:6]],
    )
    assert answer.choices[0].text == whole[:4] and answer.choices[0].finish_reason == "stop"
    streamed = client.completions.create(
        model="fake", prompt="stop", max_tokens=12, temperature=0, stop=whole[4:6], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[:4]
    biased = client.completions.create(model="fake", prompt="b", max_tokens=3, temperature=0, logit_bias={"33": 100})
    assert biased.choices[0].text == "!!!"


def test_all_sampling_fields_reach_the_engine(client: openai.OpenAI, engine: FakeEngine):
    client.post(
        "/completions",
        cast_to=object,
        body={
            "prompt": "a",
            "max_tokens": 4,
            "temperature": 0.5,
            "top_p": 0.9,
            "presence_penalty": 0.25,
            "frequency_penalty": -0.5,
            "seed": -1,
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "response_format": {"type": "regex", "regex": "[a-z]+"},
            "an_unknown_field": {"is": "ignored"},
        },
    )
    params = engine.seen[-1][1]
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (4, 0.5, 0.9, 7)
    assert (params.presence_penalty, params.frequency_penalty, params.min_p) == (0.25, -0.5, 0.1)
    assert (params.repetition_penalty, params.min_new_tokens, params.stop_ids) == (1.2, 2, (3,))
    assert params.constraint is not None and (params.constraint.kind, params.constraint.grammar) == ("regex", "[a-z]+")
    assert params.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ({"type": "json_object"}, "json"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}, "json_schema"),
        ({"type": "text"}, None),
    ],
)
def test_response_formats_are_constraints(client: openai.OpenAI, engine: FakeEngine, wanted: dict, kind: str | None):
    client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=1, response_format=wanted
    )
    constraint = engine.seen[-1][1].constraint
    assert (None if constraint is None else constraint.kind) == kind
    if kind == "json_schema":
        assert constraint is not None and json.loads(constraint.grammar) == {"type": "object"}


def test_a_chat_goes_through_the_template(client: openai.OpenAI, engine: FakeEngine):
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}],
        max_completion_tokens=5,
        temperature=0,
        n=2,
    )
    prompt = "[1 tools]<system>be<user>hi<assistant>"
    assert bytes(engine.seen[-1][0]).decode() == prompt
    assert [choice.message.content for choice in answer.choices] == [engine.greedy(prompt, 5)] * 2
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)


def test_a_chat_without_a_limit_ends_at_the_last_position(client: openai.OpenAI, engine: FakeEngine):
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], temperature=0)
    assert answer.usage is not None and answer.usage.total_tokens <= engine.max_length


def test_a_chat_stream_begins_with_the_role(client: openai.OpenAI, engine: FakeEngine):
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        temperature=0,
        stream=True,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and not chunks[0].choices[0].delta.content
    middle = [chunk for chunk in chunks[1:] if chunk.choices]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in middle)
    assert text == engine.greedy("<user>hi<assistant>", 4) and middle[-1].choices[0].finish_reason == "length"
    entries = [entry for chunk in middle for entry in (chunk.choices[0].logprobs.content or [])]
    assert "".join(entry.token for entry in entries) == text and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert entries[0].bytes == list(entries[0].token.encode())
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 4


def test_embeddings_have_unit_length_in_both_encodings(client: openai.OpenAI, server: LiveServer):
    found = client.embeddings.create(model="fake", input=["ab", "c"])  # the client asks for base64 and decodes it
    vectors = np.array([one.embedding for one in found.data])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6) and vectors.shape == (2, 3)
    with server.client() as http:
        plain = http.post("/v1/embeddings", json={"input": [[97, 98], [99]], "pooling": "last"}).json()
    assert np.allclose([one["embedding"] for one in plain["data"]], vectors, atol=1e-6)
    assert plain["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "petatron"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": [[]]}, "prompt", ""),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": 500}, "max_tokens", "leaves room for 199"),
        ({"prompt": "a" * 300}, "prompt", "has 300 tokens"),
        ({"prompt": [999]}, "prompt", "outside the vocabulary"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "outside the vocabulary"),
        ({"prompt": "a", "temperature": -1}, "temperature", ""),
        ({"prompt": "a", "suffix": "b"}, "suffix", "no tokens for it"),
        ({"prompt": "a", "best_of": 3}, "best_of", "equal to n"),
        ({"prompt": "a", "n": 1000}, "n", "more than"),
        ({"prompt": "a", "logprobs": 101}, "logprobs", ""),
        ({"prompt": "a", "stream": True, "echo": True, "logprobs": 1}, "stream", "not streamed"),
        ({"prompt": "a", "response_format": {"type": "regex"}}, "response_format", "needs regex"),
        ({"prompt": "a", "response_format": {"type": "regex", "regex": "unreadable"}}, None, "cannot be read"),
        (
            {"prompt": "a", "stream": True, "response_format": {"type": "regex", "regex": "unreadable"}},
            None,
            "cannot be",
        ),
        ({"prompt": "a", "model": "gpt-4"}, "model", "serves 'fake'"),
    ],
)
def test_a_wrong_request_is_an_error_object(server: LiveServer, body: dict, param: str | None, said: str):
    with server.client() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param and said in error["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url.url: Field required",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "needs logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, "the request has no tools"),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}},
            "may not set messages",
        ),
    ],
)
def test_a_wrong_chat_is_an_error_object(server: LiveServer, body: dict, said: str):
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_dimensions_of_embeddings_are_refused(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="fake", input="a", dimensions=2)


def test_tokenizer_routes(server: LiveServer):
    with server.client() as http:
        found = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
        assert found["tokens"] == [104, 195, 169] and found["count"] == 3
        assert found["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
        assert bytes(chat["tokens"]).decode() == "<user>x<assistant>"
        assert http.post("/detokenize", json={"tokens": [104, 195, 169]}).json() == {"prompt": "hé"}
        assert http.post("/detokenize", json={"tokens": [300]}).status_code == 400
        assert http.post("/tokenize", json={}).status_code == 400
        info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and info["vocab_size"] == 257 and "assistant" in info["chat_template"]


def test_a_model_without_a_chat_template_gets_the_dialogue_of_petatron_chat():
    engine = FakeEngine()
    card = ModelCard.of_engine(engine, name="fake", created_s=1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    encoder = PromptEncoder(ByteTokenizer())
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "stop": "Z"}
    with live_server(engine, card=card) as server, server.client() as http:
        found = http.post("/v1/chat/completions", json=body).json()
        ids, params = engine.seen[-1]
        assert ids == encoder.encode_messages(messages) == list(b"Be brief.\n\nUser: Hi\nAssistant:")
        assert params.stop_strings == ("Z", *encoder.stop_strings)
        assert found["choices"][0]["message"]["content"] == engine.greedy(ids, 6)
        assert http.post("/tokenize", json={"messages": messages}).json()["tokens"] == ids
        assert http.get("/v1/models").json()["data"][0]["chat_format"] == "plain"
        assert http.get("/tokenizer_info").json()["chat_template"] is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": 5}, "prompt: Input should be a valid string or a valid list"),
        ({"prompt": "a", "stop": ""}, "stop: String should have at least 1 character"),
        ({"prompt": "a", "stop": ["b", 1]}, "stop.1: Input should be a valid string"),
        (
            {"prompt": "a", "n": 0, "top_p": 2},
            "n: Input should be greater than or equal to 1; top_p: Input should be less",
        ),
    ],
)
def test_a_wrong_field_is_named_as_it_was_written(server: LiveServer, body: dict, said: str):
    with server.client() as http:
        error = http.post("/v1/completions", json=body).json()["error"]
    assert error["message"].startswith(said) and error["param"] == said.split(":")[0].split(".")[0]


def test_the_longest_prompt_is_what_the_model_card_says(server: LiveServer):
    with server.client() as http:
        most = http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert http.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == most
        assert http.post("/v1/completions", json={"prompt": [65] * most, "max_tokens": 1}).status_code == 200
        refused = http.post("/v1/completions", json={"prompt": [65] * (most + 1), "max_tokens": 1})
    assert refused.status_code == 400 and f"takes {most}." in refused.json()["error"]["message"]
