"""Megatron's `PUT /api`: its clients' payloads, every field with an effect, and any body answered by JSON."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from petatron.infer.beam.beam_search import BeamParams, BeamSearch
from petatron.infer.engine_outputs import TokenLogprob
from tests.load_deadline import scaled
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine()) as found:
        yield found


def _put(server: LiveServer, **body: Any) -> Any:
    with server.client() as http:
        return http.put("/api", content=json.dumps(body))  # without a content type, as Megatron's client


def _params(server: LiveServer, **body: Any) -> Any:
    answer = _put(server, prompts=["ab"], **{"tokens_to_generate": 2, **body})
    assert answer.status_code == 200, answer.text
    assert isinstance(server.engine, FakeEngine)
    return server.engine.seen[-1][1]


def test_the_answer_has_text_segments_tokens_and_logprobs(server: LiveServer):
    engine = server.engine
    assert isinstance(engine, FakeEngine)
    answer = _put(server, prompts=["Hello world", "x"], tokens_to_generate=3, top_k=1, logprobs=True).json()
    assert answer["text"] == [text + engine.greedy(text, 3) for text in ("Hello world", "x")]
    for text, segments, tokens, logprobs in zip(
        *(answer[name] for name in ("text", "segments", "tokens", "logprobs")), strict=True
    ):
        assert "".join(segments) == text == bytes(tokens).decode() and len(logprobs) == len(tokens) - 1
    assert "logprobs" not in _put(server, prompts=["x"], tokens_to_generate=1).json()
    assert _put(server, prompts=["xy"], tokens_to_generate=0, logprobs=True).json()["tokens"] == [[120, 121]]


@pytest.mark.parametrize(("stop", "penalty"), [(None, None), (ord("e"), 0.0), (ord("e"), 2.0)])
def test_beam_search_has_texts_and_scores(server: LiveServer, stop: int | None, penalty: float | None):
    engine = server.engine
    assert isinstance(engine, FakeEngine)
    given = {"stop_token": stop} | ({} if penalty is None else {"length_penalty": penalty})
    answer = _put(server, prompts=["ab"], tokens_to_generate=4, beam_width=3, **given).json()
    stop_ids = (256,) if stop is None else (stop,)
    params = BeamParams(
        width=3, max_new_tokens=4, length_penalty=1.0 if penalty is None else penalty, stop_ids=stop_ids
    )
    search = BeamSearch(list(b"ab"), params, engine.vocab_size)
    while not search.is_over:
        rows = [(engine.logprobs(ids), one.logprobs) for ids, one in search.requests()]
        tops = [tuple((int(token), float(row[token])) for token in (-row).argsort()[:count]) for row, count in rows]
        search.advance([TokenLogprob(*top[0], top) for top in tops])
    assert answer["tokens"] == [[*b"ab", *one.ids] for one in search.answers]
    assert answer["scores"] == pytest.approx([one.score for one in search.answers])
    assert answer["text"] == ["ab" + bytes(one.text_ids(stop_ids)).decode() for one in search.answers]
    assert ["".join(row) for row in answer["segments"]] == [bytes(ids).decode() for ids in answer["tokens"]]
    assert len(answer["text"]) == 3 and answer["scores"] == sorted(answer["scores"], reverse=True)


def test_a_client_that_leaves_ends_its_beam_search():
    engine = FakeEngine(step_s=0.02)
    with live_server(engine) as server, server.client() as http:
        body = {"prompts": ["ab"], "beam_width": 4, "tokens_to_generate": 150}
        with pytest.raises(httpx.ReadTimeout):
            http.put("/api", json=body, timeout=httpx.Timeout(5, read=0.2))
        server.wait_until(server.is_idle)
        num_seen = len(engine.seen)
        time.sleep(0.1)
        assert num_seen == len(engine.seen) < 4 * 100, "no further step is asked for"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_documented_curl(server: LiveServer):
    command = f"""curl -s '{server.url}/api' -X 'PUT' -d '{{"prompts":["Hello world"], "tokens_to_generate":1}}'"""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=scaled(20), check=True)
    assert json.loads(done.stdout)["text"][0].startswith("Hello world")


def test_every_field_reaches_the_engine(server: LiveServer):
    plain = _params(server)
    assert (plain.temperature, plain.top_k, plain.top_p, plain.stop_ids) == (1.0, None, None, (256,))
    assert _params(server, temperature=0.5).temperature == 0.5
    assert _params(server, temperature=5e-324).greedy  # logits divided by it would overflow
    assert _params(server, top_k=1).greedy and _params(server, top_k=9).top_k == 9
    found = _params(server, top_p=0.9, top_p_decay=0.5, top_p_bound=0.2)
    assert (found.top_p, found.top_p_decay, found.top_p_bound) == (0.9, 0.5, 0.2)
    assert _params(server, stop_on_eol=True).stop_strings == ("\n",)
    assert _params(server, stop_on_double_eol=True).stop_strings == ("\n\n",)
    assert _params(server, random_seed=7).seed == 7 and _params(server).seed != _params(server).seed
    assert _params(server, stop_token=65).stop_ids == (65,)
    assert _params(server, logprobs=True).prompt_logprobs == 0
    assert _params(server, tokens_to_generate=5).max_new_tokens == 5
    assert _params(server, length_penalty=1, beam_width=None, no_log=True) == plain.__class__(
        **{**{name: getattr(plain, name) for name in plain.__slots__}, "seed": _last_seed(server)}
    )
    _params(server, add_BOS=True)
    assert isinstance(server.engine, FakeEngine) and server.engine.seen[-1][0] == [256, 97, 98]


def _last_seed(server: LiveServer) -> int:
    assert isinstance(server.engine, FakeEngine)
    return server.engine.seen[-1][1].seed


def test_no_line_break_after_a_colon_is_a_regular_language(server: LiveServer):
    for prompt, allowed, refused in (
        ("ab", ["x:y\nz", ":", "a::b", "\n", "a:", ""], ["a:\n", "::\n", "x\n:\ny"]),
        ("ab:", ["x\n", ": x", "", "::a\n"], ["\nx", ":\n", "x:\n"]),
    ):
        _put(server, prompts=[prompt], tokens_to_generate=1, prevent_newline_after_colon=True)
        assert isinstance(server.engine, FakeEngine)
        constraint = server.engine.seen[-1][1].constraint
        assert constraint is not None and constraint.kind == "regex"
        assert all(re.fullmatch(constraint.grammar, text) for text in allowed)
        assert not any(re.fullmatch(constraint.grammar, text) for text in refused)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": ["a"] * 129}, "128"),
        ({"prompts": "a"}, "prompts"),
        ({"prompts": [""]}, "add_BOS"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "logprobs"),
        ({"prompts": ["a"], "tokens_to_generate": -1}, "tokens_to_generate"),
        ({"prompts": ["a"], "tokens_to_generate": 1000}, "leaves room for 199"),
        ({"prompts": ["a"], "temperature": 0}, "temperature"),
        ({"prompts": ["a"], "top_k": 5, "top_p": 0.5}, "not both"),
        ({"prompts": ["a"], "top_p_decay": 0.5}, "need top_p"),
        ({"prompts": ["a"], "top_p": 0.5, "top_p_bound": 0.7}, "more than top_p"),
        ({"prompts": ["a"], "beam_width": 0}, "beam_width"),
        ({"prompts": ["a"], "beam_width": 1000}, "this server"),
        ({"prompts": ["a"], "beam_width": 17}, "beam_width 17 is more than the 16"),
        ({"prompts": ["a", "b"], "beam_width": 2}, "one prompt"),
        ({"prompts": ["a"], "beam_width": 2, "tokens_to_generate": 0, "logprobs": True}, "one token or more"),
        ({"prompts": ["a"], "beam_width": 2, "top_k": 5, "stop_on_eol": True}, "top_k, stop_on_eol: has no effect"),
        ({"prompts": ["a"], "beam_width": 2, "length_penalty": 1e300}, "is not between -50 and 50"),
        ({"prompts": ["a"], "length_penalty": 2}, "which beam_width asks for"),
        ({"prompts": ["a"], "max_len": 5}, "tokens_to_generate"),
        ({"prompts": ["a"], "sentences": ["b"]}, "prompts"),
        ({"prompts": ["a"], "stop_token": 300}, "outside the vocabulary"),
        ({"prompts": ["a"], "debug_fname": "/tmp/x"}, "debug_fname"),
    ],
)
def test_a_wrong_request_is_a_4xx_object(server: LiveServer, body: dict, said: str):
    answer = _put(server, **body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


FIELDS = (
    "prompts tokens_to_generate logprobs temperature top_k top_p top_p_decay top_p_bound add_BOS stop_on_eol stop_on_double_eol "
    "prevent_newline_after_colon random_seed stop_token length_penalty beam_width max_len sentences no_log"
).split()
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
NEARLY_RIGHT = st.fixed_dictionaries(
    {"prompts": st.lists(st.text(max_size=12), min_size=1, max_size=3)},
    optional={
        "tokens_to_generate": st.integers(0, 8),
        "temperature": st.floats(0, 3),
        "top_k": st.integers(0, 5),
        "top_p": st.floats(0, 1),
        "logprobs": st.booleans(),
        "add_BOS": st.booleans(),
        "stop_on_eol": st.booleans(),
        "random_seed": st.integers(0),
        "stop_token": st.integers(0, 300),
        "prevent_newline_after_colon": st.booleans(),
        "beam_width": st.integers(0, 4),
        "length_penalty": st.floats(-2, 2),
    },
)
BODIES = NEARLY_RIGHT | st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5) | VALUES


def _written(value: Any) -> bytes:
    return json.dumps(value, allow_nan=True).encode()


ANY_BODY = BODIES.map(_written) | st.binary(max_size=40)
IN_ANY_TIME = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=15, **IN_ANY_TIME)
@given(body=ANY_BODY)
def test_any_body_is_answered_with_json(server: LiveServer, body: bytes):
    _check_answer(server, body)


@pytest.mark.slow
@settings(max_examples=2000, **IN_ANY_TIME)
@given(body=ANY_BODY)
def test_any_body_is_answered_with_json_long(server: LiveServer, body: bytes):
    _check_answer(server, body)


def _check_answer(server: LiveServer, body: bytes) -> None:
    with server.client() as http:
        answer = http.put("/api", content=body)
    found = answer.json()
    if answer.status_code == 200:
        assert set(found) >= {"text", "segments", "tokens"}
        assert all(math.isfinite(value) for row in found.get("logprobs", []) for value in row)
        assert all(math.isfinite(value) for value in found.get("scores", []))
    else:
        assert 400 <= answer.status_code < 500 and set(found["error"]) == {"message", "type", "param", "code"}
    server.wait_until(server.is_idle)
