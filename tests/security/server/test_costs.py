"""What one request may cost the others, and what it may learn of them."""

from __future__ import annotations

import pytest

from petatron.serve.serve_options import ServeLimits
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import live_server

KEYS = ("a-key-of-some-length-0123456789", "another-key-of-some-length-01234")


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"prompt": ["a" * 100] * 32, "n": 16, "prompt_logprobs": 100, "max_tokens": 0}, 512 * 100 * 101),
        ({"prompt": ["a" * 100] * 10, "echo": True, "logprobs": 20, "max_tokens": 1}, 10 * (100 + 1) * 21),
        ({"prompt": "a", "n": 16, "logprobs": 20, "max_tokens": 60, "stream": True}, 16 * 60 * 21),
    ],
    ids=["prompts", "echo", "a stream"],
)
def test_a_request_has_a_cost_with_a_limit(body: dict, asked: int):
    """A few hundred bytes asked for gigabytes."""
    with live_server(FakeEngine(), limits=ServeLimits(max_logprobs=2000)) as server, server.client() as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_costly"
        assert f" {asked} log-probabilities" in answer.json()["error"]["message"]
        fits = http.post("/v1/completions", json={"prompt": "a" * 100, "logprobs": 18, "max_tokens": 60})
        assert fits.status_code == 200 and len(fits.json()["choices"][0]["logprobs"]["tokens"]) == 60


@pytest.mark.parametrize("shared", [False, True])
def test_keys_do_not_share_prefixes_unless_they_have_one_owner(shared: bool):
    """Else `cached_tokens` would tell one what another has sent."""
    engine = FakeEngine()
    with live_server(engine, api_keys=KEYS, share_prefixes=shared) as server, server.client() as http:
        for key in (*KEYS, KEYS[0]):
            for stream in (False, True):
                body = {"prompt": "a", "max_tokens": 1, "stream": stream}
                answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == 200
    groups = [params.prefix_group for _, params in engine.seen]
    assert not any(key in group for key in KEYS for group in groups)
    assert len(set(groups)) == (1 if shared else 2) and groups[0] == groups[1] == groups[-1]
