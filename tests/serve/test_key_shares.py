"""The share of one API key of the open sequences: alone it has all, and it keeps no other key out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import httpx
import pytest

from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation_handle import Generation, QueueFullError
from petatron.serve.sequence_admission import OpenSequences
from petatron.serve.serve_options import ServeLimits
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

KEYS = ("a-key-of-some-length-0123456789", "another-key-of-some-length-01234")


def _in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def _request(owner: str, count: int = 1, *, begun: bool = False) -> list[Generation]:
    made = [Generation([1], SamplingParams(owner=owner)) for _ in range(count)]
    for one in made:
        one.first_token_s = 1.0 if begun else None
    return made


@_in_loop
async def test_a_lone_key_has_all_and_gives_way_from_its_newest_request_on():
    opened = OpenSequences(12)
    first, second, third = (_request("a", 4) for _ in range(3))
    for one in (first, second, third):
        assert opened.add(one) == []
    with pytest.raises(QueueFullError, match="12 of 12"):
        opened.add(_request("a"))
    assert opened.add(_request("b", 5)) == [*third, *second] and len(opened) == 9
    assert opened.add(_request("b", 1)) == [] and opened.add(_request("a", 2)) == []
    with pytest.raises(QueueFullError, match="6 of them of this key, whose share is 6"):
        opened.add(_request("b"))
    assert len(opened) == 12


@_in_loop
async def test_requests_that_have_begun_do_not_give_way():
    """But their key opens no more than its share while the other asks; so it finds room as they end."""
    now = [0.0]
    opened = OpenSequences(4, clock=lambda: now[0])
    running = _request("a", 4, begun=True)
    opened.add(running)
    with pytest.raises(QueueFullError):
        opened.add(_request("b", 2))
    opened.discard(running[0])
    with pytest.raises(QueueFullError):
        opened.add(_request("a"))
    with pytest.raises(QueueFullError):
        opened.add(_request("b", 2))
    opened.discard(running[1])
    assert opened.add(_request("b", 2)) == [] and len(opened) == 4
    opened.discard(running[2])
    assert opened.add(_request("a")) == [], "it is within its share again"


@_in_loop
async def test_a_refusal_is_forgotten_after_a_while():
    now = [0.0]
    opened = OpenSequences(2, clock=lambda: now[0])
    running = _request("a", 2, begun=True)
    opened.add(running)
    with pytest.raises(QueueFullError):
        opened.add(_request("b"))
    opened.discard(running[0])
    now[0] = 60.0
    assert opened.add(_request("a")) == [], "who does not come again reserves nothing"


@_in_loop
async def test_keys_within_their_shares_never_give_way():
    opened = OpenSequences(9)
    for owner in "abc":
        assert opened.add(_request(owner, 3)) == []
    for owner in "abc":
        with pytest.raises(QueueFullError):
            opened.add(_request(owner))
    assert len(opened.add(_request("d", 2))) == 3, "a further key makes shares smaller"
    for one in tuple(opened):
        opened.discard(one)
    assert len(opened) == 0 and opened.share_of("a") == 9


def _hold_all(server: LiveServer, key: str, count: int, answers: list[httpx.Response]) -> list[threading.Thread]:
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}

    def ask() -> None:
        with server.client() as http:
            answers.append(http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for one in threads:
        one.start()
    server.wait_until(lambda: server.thread.num_open == count)
    return threads


@pytest.mark.parametrize("stream", [False, True])
def test_one_key_cannot_keep_another_out(stream: bool):
    """It had opened all sequences of the server; the other is answered, and the newest of the first one are told to come again."""
    limits = ServeLimits(max_open=12, max_batch=12)
    engine = FakeEngine(max_sequences=4, step_s=0.005)
    with live_server(engine, limits=limits, api_keys=KEYS) as server:
        refused: list[httpx.Response] = []
        held = _hold_all(server, KEYS[0], 12, refused)
        with server.client() as http:
            body = {"prompt": "b", "max_tokens": 1, "stream": stream}
            answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[1]}"})
            again = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[0]}"})
        assert answer.status_code == 200
        assert again.status_code in (200, 429)
        for one in held:
            one.join()
        assert sorted(one.status_code for one in refused) == [200] * 11 + [429]
        [told] = [one for one in refused if one.status_code == 429]
        assert told.headers["Retry-After"] == "1" and "share" in told.json()["error"]["message"]
        server.wait_until(server.is_idle)
        assert not engine.requests
