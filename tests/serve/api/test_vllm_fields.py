"""Fields of vLLM's documentation, by route: each is known to the server, and those of prompts and vectors do what vLLM says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import openai
import pytest

from petatron.serve.http.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from petatron.serve.http.request_field_rules import IGNORED_HEADER, POOLING_RULES
from petatron.serve.http.responses_api_requests import RESPONSE_RULES, ResponsesRequest
from petatron.serve.served_model_properties import ModelCard
from tests.serve.api.field_rules import field_rules
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
)
SAMPLING = (
    "frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature top_p user "
    "use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "allowed_token_ids prompt_logprobs logprob_token_ids bad_words echo add_special_tokens response_format structured_outputs "
    "priority request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start "
    "return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection "
    "thinking_token_budget stream_interval best_of logits_processors guided_json guided_regex guided_choice guided_grammar "
    "guided_decoding_backend guided_whitespace_pattern model"
)
CHAT = (
    "messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls reasoning_effort include_reasoning "
    "add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs "
    "mm_processor_kwargs return_prompt_text"
)
RESPONSES = (
    "background include input instructions max_output_tokens max_tool_calls metadata model logit_bias parallel_tool_calls "
    "previous_response_id prompt reasoning service_tier store stream temperature text tool_choice tools top_logprobs top_p "
    "truncation user prompt_cache_key mm_processor_kwargs priority cache_salt enable_response_messages "
    "previous_input_messages previous_response vllm_xargs"
)
POOLING = "model user truncate_prompt_tokens truncation_side padding request_id priority mm_processor_kwargs cache_salt use_activation"
TOKENIZE = (
    "model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message chat_template "
    "chat_template_kwargs media_io_kwargs mm_processor_kwargs tools"
)


@pytest.mark.parametrize(
    ("body", "names", "others"),
    [
        (CompletionRequest, f"{SAMPLING} prompt suffix prompt_embeds", {}),
        (ChatCompletionRequest, f"{SAMPLING} {CHAT}", {}),
        (ResponsesRequest, RESPONSES, {**RESPONSE_RULES, **field_rules(ChatCompletionRequest)}),
        (
            EmbeddingRequest,
            f"{POOLING} input add_special_tokens encoding_format dimensions embed_dtype endianness normalize messages",
            POOLING_RULES,
        ),
        (RerankRequest, f"{POOLING} query documents top_n", POOLING_RULES),
        (ScoreRequest, f"{POOLING} text_1 text_2", POOLING_RULES),
        (TokenizeRequest, TOKENIZE, {}),
    ],
)
def test_every_field_is_known(body: Any, names: str, others: Mapping[str, Any]):
    assert set(names.split()) - field_rules(body).keys() - others.keys() == set()


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


def chat_prompt(client: openai.OpenAI, server: LiveServer, messages: list[Any], **extra: Any) -> str:
    client.chat.completions.create(model="fake", messages=messages, max_tokens=1, extra_body=extra)
    assert isinstance(server.engine, FakeEngine)
    return bytes(server.engine.seen[-1][0]).decode()


def test_messages_are_rendered_as_vllm_does(client: openai.OpenAI, server: LiveServer):
    earlier = {"role": "assistant", "content": "a", "reasoning": "hm"}
    assert chat_prompt(client, server, [{"role": "user"}, earlier]) == "<user><assistant>hma"
    user = [{"role": "user", "content": "x"}]
    assert chat_prompt(client, server, user, reasoning_effort="none") == "<user>x[False]"
    assert chat_prompt(client, server, user, reasoning_effort="low") == "<user>x[True]"
    given = {"enable_thinking": False}
    assert chat_prompt(client, server, user, reasoning_effort="low", chat_template_kwargs=given) == "<user>x[False]"


@pytest.mark.parametrize(
    ("path", "extra", "named"),
    [
        ("/v1/completions", {"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "text", "json_schema": {"schema": {}, "strict": True, "a": 1}, "b": 1}},
            "response_format.b, response_format.json_schema.a",
        ),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"enable_thinking": True, "mood": 1}},
            "chat_template_kwargs.mood",
        ),
        ("/v1/responses", {"reasoning": {"summary": "auto"}, "text": {"a": 1}}, "text.a, reasoning.summary"),
        ("/tokenize", {"tools": [], "documents": [{}], "continue_final_message": False}, "tools, documents"),
        ("/v1/embeddings", {"embed_overides": []}, "embed_overides"),
    ],
)
def test_fields_inside_objects_are_named_in_the_header(
    server: LiveServer, path: str, extra: dict[str, Any], named: str
):
    needed = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    key = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/embeddings": "input"}.get(path, "prompt")
    with server.client() as http:
        answer = http.post(path, json={key: needed[key], **extra})
    assert answer.status_code == 200 and answer.headers[IGNORED_HEADER] == named


def test_vectors(client: openai.OpenAI, server: LiveServer):
    def embed(**extra: Any) -> list[float]:
        return (
            client.embeddings.create(model="fake", input="abc", encoding_format="float", extra_body=extra)
            .data[0]
            .embedding
        )

    assert math.isclose(math.hypot(*embed()), 1, rel_tol=1e-6) and embed(pooling=None) == embed(use_activation=True)
    raw = [float(sum(b"abc")), 1.0, -2.0]
    assert embed(use_activation=False) == embed(normalize=False) == raw
    assert embed(use_activation=False, truncate_prompt_tokens=1)[0] == float(ord("c"))
    assert embed(use_activation=False, truncate_prompt_tokens=1, truncation_side="right")[0] == float(ord("a"))
    embed(cache_salt="mine")
    assert isinstance(server.engine, FakeEngine) and server.engine.seen[-1][1].prefix_group == "\nmine"
    for refused in ({"embed_dtype": "float16"}, {"endianness": "big"}, {"padding": "max_length"}, {"messages": []}):
        with pytest.raises(openai.BadRequestError, match="is not supported"):
            embed(**refused)
    embed(embed_dtype="float32", endianness="native", padding="do_not_pad")


def test_scores_and_ranks_under_all_their_names(server: LiveServer):
    pairs = [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
    with server.client() as http:
        found = [http.post("/score", json={one: "a", two: ["b", "c"], "request_id": "me"}).json() for one, two in pairs]
        assert all(one == found[0] for one in found) and found[0]["id"] == "score-me" and len(found[0]["data"]) == 2
        body = {"query": "a", "documents": ["b"], "return_documents": None, "softmax": False}
        ranked = http.post("/v2/rerank", json=body)
    assert ranked.json()["results"][0]["document"] == {"text": "b"} and IGNORED_HEADER not in ranked.headers


def test_tokenize_counts_what_completions_count(server: LiveServer):
    card = server.state.model
    server.state.model = replace(card, prefix_ids=(1,))
    with server.client() as http:
        counts = [
            http.post("/tokenize", json={"prompt": "a", **given}).json()["tokens"]
            for given in ({}, {"add_special_tokens": None}, {"add_special_tokens": True}, {"add_special_tokens": False})
        ]
        used = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    server.state.model = card
    assert counts == [[1, 97], [1, 97], [1, 97], [97]] and used == 2


def test_special_tokens_are_no_text_unless_they_are_asked_for(server: LiveServer):
    engine = server.engine
    assert isinstance(engine, FakeEngine)
    with server.client() as http:
        hidden = []
        for extra in ({}, {"skip_special_tokens": False}, {"stop": "x<|endoftext|>"}, {"stop": "x"}):
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **extra})
            hidden.append(engine.seen[-1][1].hidden_ids)
    assert hidden == [(256,), (), (), (256,)]


def test_errors_of_responses_have_the_names_of_the_route(server: LiveServer):
    with server.client() as http:
        for extra, param in (
            ({"max_output_tokens": 10_000}, "max_output_tokens"),
            ({"text": {"format": {"type": "odd"}}}, "text"),
            ({"input": "a" * 500}, "input"),
        ):
            error = http.post("/v1/responses", json={"input": "a", **extra}).json()["error"]
            assert error["param"] == param, error
