"""Clients that leave, engines that fail, servers that drain or swap: no sequence is left behind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from petatron.base.errors import LaunchError
from petatron.infer.engine_outputs import TokenEvent, TokenLogprob
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation_handle import Generation
from petatron.serve.http import follow_training_run as follow_run_module
from petatron.serve.http.follow_training_run import follow_run
from petatron.serve.http.run_generations import joined_texts
from petatron.serve.http.server_state import ServerState
from petatron.serve.served_model_properties import ModelCard
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

LONG = {"prompt": "abc", "max_tokens": 90, "temperature": 0}


def _start(server: LiveServer, body: dict, answers: list) -> threading.Thread:
    def ask() -> None:
        with server.client() as http:
            answers.append(http.post("/v1/completions", json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_a_client_that_leaves_is_cancelled():
    engine = FakeEngine(step_s=0.01, max_sequences=2)
    with live_server(engine) as server:
        for stream in (False, True):
            for _ in range(3):
                with server.client() as http, pytest.raises(httpx.ReadTimeout):
                    timeout = httpx.Timeout(5, read=0.15)
                    body = {**LONG, "stream": stream, "n": 3}
                    with http.stream("POST", "/v1/completions", json=body, timeout=timeout) as answer:
                        for _ in answer.iter_lines():
                            raise httpx.ReadTimeout("enough")
        server.wait_until(server.is_idle)
        assert not engine.requests and not engine.finished and engine.stats.generated_tokens < 1000
        with server.client() as http:
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_stream_that_is_left_while_it_waits_is_cancelled():
    engine = FakeEngine(step_s=0.02, max_sequences=1)
    with live_server(engine) as server:
        answers: list = []
        running = _start(server, LONG, answers)
        server.wait_until(lambda: engine.has_work)
        with server.client() as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={**LONG, "stream": True}, timeout=httpx.Timeout(5, read=0.1))
        server.wait_until(lambda: server.thread.num_open == 1)
        assert not answers and len(engine.requests) == 1
        running.join()
        assert len(engine.seen) == 2 and engine.stats.generated_tokens == 90, "nothing was generated for who had left"


class _Elsewhere(FakeEngine):
    """A step ends when it is let go, or is woken, and then brings nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.woken, self.let_go = threading.Event(), False

    def wake(self) -> None:
        self.woken.set()

    def step(self):
        while not self.let_go:
            if self.woken.wait(0.01):
                self.woken.clear()
                return []
        return super().step()


def test_a_request_reaches_an_engine_whose_step_has_not_ended():
    engine = _Elsewhere()
    with live_server(engine) as server:
        answers: list = []
        waiting = [_start(server, {**LONG, "max_tokens": 3 + number}, answers) for number in range(3)]
        server.wait_until(lambda: len(engine.seen) == 3)
        assert not answers and engine.stats.generated_tokens == 0
        engine.let_go = True
        for thread in waiting:
            thread.join()
        assert sorted(answer.json()["usage"]["completion_tokens"] for answer in answers) == [3, 4, 5]


def test_a_draining_server_finishes_what_is_open_and_refuses_the_rest():
    engine = FakeEngine(step_s=0.005)
    with live_server(engine) as server:
        answers: list = []
        open_request = _start(server, LONG, answers)
        server.wait_until(lambda: engine.has_work)
        server.thread.drain()
        with server.client() as http:
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            ready = http.get("/readyz")
            assert ready.status_code == 503 and ready.json()["status"] == "draining"
            assert http.get("/healthz").status_code == 200
        open_request.join()
        assert answers[0].json()["choices"][0]["text"] == engine.greedy("abc", 90)
    assert engine.closed


def test_an_engine_that_fails_is_reported_and_served_no_more():
    engine = FakeEngine(step_s=0.01)
    with live_server(engine) as server:
        answers: list = []
        waiting = _start(server, LONG, answers)
        server.wait_until(lambda: engine.has_work)
        with server.client() as http:
            with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                engine.fail_with = RuntimeError("secret: CUDA is gone")
                rest = [line for line in lines if line]
            assert (
                rest[-1] == "data: [DONE]"
                and json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"
            )
            waiting.join()
            assert answers[0].status_code == 503 and "secret" not in answers[0].text + "".join(rest)
            assert http.get("/healthz").status_code == 503 and http.get("/readyz").json()["status"] == "failed"
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert server.thread.num_open == 0


def test_an_idle_engine_that_has_ended_is_reported_without_a_request():
    engine = FakeEngine()
    with live_server(engine) as server, server.client() as http:
        assert http.get("/healthz").status_code == 200
        engine.ended_with = LaunchError("The engine's process has ended.")
        server.wait_until(lambda: http.get("/healthz").status_code == 503, timeout_s=5)
        assert http.get("/readyz").json()["status"] == "failed" and not engine.seen


class _Reloadable(FakeEngine):
    """Another step is another function."""

    step_number = 1

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.reloaded: list[tuple[str, int]] = []
        self.broken: set[int] = set()

    def reload(self, step: Path) -> _Reloadable:
        assert not self.requests, "a swap waits for what is open"
        number = int(step.name.removeprefix("step-"))
        self.reloaded.append((step.name, number))
        if number not in self.broken:
            self.step_number = self.salt = number
        return self


Found = list[tuple[int, Path]]


@pytest.fixture
def found_steps(monkeypatch: pytest.MonkeyPatch) -> Found:
    """What a look at the run's folder finds."""
    steps: Found = []

    def look(folder: Path, *, after: int, rejected: set[int], served_properties: object) -> tuple[int, Path] | None:
        newer = [one for one in steps if one[0] > after and one[0] not in rejected]
        return max(newer, default=None)

    monkeypatch.setattr(follow_run_module, "newest_sound_step", look)
    return steps


def _watch(engine: _Reloadable) -> Callable[[ServerState], AsyncIterator[None]]:
    def describe() -> ModelCard:
        return ModelCard.of_engine(engine, name="fake", created_s=1, step=engine.step_number)

    return follow_run(Path("run"), engine, describe, interval_s=0.01)


def test_a_server_swaps_between_requests(found_steps: Found):
    engine = _Reloadable(step_s=0.005)
    old, new = engine.greedy("abc", 90), FakeEngine(salt=2).greedy("abc", 90)
    with live_server(engine, background=_watch(engine)) as server:
        answers: list = []
        first = _start(server, LONG, answers)
        server.wait_until(lambda: engine.has_work)
        found_steps.append((2, Path("step-2")))
        server.wait_until(lambda: server.thread.state == "swapping")
        held = [_start(server, LONG, answers) for _ in range(2)]  # wait for the new model
        for thread in (first, *held):
            thread.join()
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [old, new, new]
        server.wait_until(lambda: server.state.model.step == 2)
        with server.client() as http:
            assert http.get("/v1/models").json()["data"][0]["step"] == 2
            assert "petatron_model_swaps_total 1.0" in http.get("/metrics").text
            assert "petatron_model_step 2.0" in http.get("/metrics").text


def test_a_step_that_cannot_be_loaded_is_tried_once(found_steps: Found):
    engine = _Reloadable()
    engine.broken = {3}
    with live_server(engine, background=_watch(engine)) as server:
        found_steps.append((3, Path("step-3")))
        server.wait_until(lambda: engine.reloaded == [("step-3", 3)])
        found_steps.append((4, Path("step-4")))
        server.wait_until(lambda: server.state.model.step == 4)
    assert engine.reloaded == [("step-3", 3), ("step-4", 4)]


def test_a_full_queue_while_swapping_is_503():
    engine = FakeEngine()
    with live_server(engine) as server:
        server.thread._swapping, server.thread._open.most = True, 0
        with server.client() as http:
            answer = http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and "newer model" in answer.json()["error"]["message"]


def test_idle_engines_step_so_that_other_ranks_do_not_give_up(monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngine()
    monkeypatch.setattr("petatron.serve.engine_thread._IDLE_STEP_S", 0.01)
    with live_server(engine) as server:
        steps: list[int] = []
        engine.step = lambda: steps.append(1) or []  # type: ignore[assignment,method-assign]
        server.thread._commands.put(lambda: None)  # wakes the thread, which then waits for so long alone
        server.wait_until(lambda: len(steps) > 2)
        assert not engine.has_work and not engine.seen, "no step had work"
        assert server.thread.state == "serving"


def test_64_clients_get_what_each_would_get_alone():
    engine = FakeEngine(max_sequences=16)
    prompts = [f"prompt {number}" for number in range(64)]
    expected = [engine.greedy(prompt, 12) for prompt in prompts]
    with live_server(engine) as server:
        found: dict[int, str] = {}

        def ask(number: int) -> None:
            body = {"prompt": prompts[number], "max_tokens": 12, "temperature": 0, "stream": number % 2 == 1}
            with server.client() as http:
                answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            if number % 2:
                events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
                found[number] = "".join(event["choices"][0]["text"] for event in events)
            else:
                found[number] = answer.json()["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(64)] == expected
        server.wait_until(server.is_idle)
        assert not engine.finished


def test_events_that_wait_are_joined():
    async def sequences() -> tuple[Generation, ...]:
        return tuple(Generation([1], SamplingParams(), index=index) for index in range(2))

    one, other = asyncio.run(sequences())
    logprob = TokenLogprob(7, -0.5, ())
    ready = [
        (one, TokenEvent(0, 5, "a")),
        (other, TokenEvent(1, 5, "x")),
        (one, TokenEvent(0, 6, "b")),
        (other, TokenEvent(1, 7, "y", logprob)),
        (one, TokenEvent(0, 7, "", None, "length")),
        (other, TokenEvent(1, 8, "z")),
    ]
    assert joined_texts(ready) == [
        (one, TokenEvent(0, 7, "ab", None, "length")),
        (other, TokenEvent(1, 5, "x")),
        (other, TokenEvent(1, 7, "y", logprob)),
        (other, TokenEvent(1, 8, "z")),
    ]
