"""SIGTERM: what is open finishes or is told why it does not, the server ends in time, and its log has no traceback."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from petatron.serve.http.app import build_app
from petatron.serve.http.server import DrainingServer, build_server
from petatron.serve.serve_options import ServeLimits, ServeOptions
from petatron.serve.served_model_properties import ModelCard
from tests.load_deadline import scaled, wait_until
from tests.serve.fake_engine import FakeEngine

LONG = {"prompt": ["a", "b", "c"], "n": 4, "max_tokens": 9000, "temperature": 0}


@dataclass
class _Draining:
    server: DrainingServer
    thread: threading.Thread
    engine: FakeEngine
    url: str

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def end_s(self) -> float:
        """Returns how long it takes to end from now on."""
        began_s = time.monotonic()
        self.thread.join(scaled(20))
        assert not self.thread.is_alive()
        return time.monotonic() - began_s


@contextmanager
def _draining_server(drain_timeout_s: float) -> Iterator[_Draining]:
    engine = FakeEngine(step_s=0.01, max_length=10_000, max_sequences=64)
    card = ModelCard.of_engine(engine, name="fake", created_s=1)
    app = build_app(engine, card, ServeOptions(limits=ServeLimits(drain_timeout_s=drain_timeout_s)))
    ready = threading.Event()
    server = build_server(app, on_ready=ready.set)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        assert ready.wait(scaled(20))
        yield _Draining(server, thread, engine, url)
        server.should_exit = True
        thread.join(scaled(10))


def _ask(url: str, body: dict, answers: dict[str, httpx.Response | httpx.HTTPError], name: str) -> threading.Thread:
    def ask() -> None:
        try:
            answers[name] = httpx.post(f"{url}/v1/completions", json=body, timeout=scaled(30), trust_env=False)
        except httpx.HTTPError as error:
            answers[name] = error

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def _wait_for_work(engine: FakeEngine, count: int) -> None:
    wait_until(lambda: len(engine.requests) >= count, "all requests", seconds=20)


def test_after_the_drain_time_clients_are_told_and_the_server_ends(caplog: pytest.LogCaptureFixture):
    answers: dict = {}
    with _draining_server(0.3) as running:
        asking = [
            _ask(running.url, {**LONG, "stream": name == "stream"}, answers, name) for name in ("plain", "stream")
        ]
        _wait_for_work(running.engine, 24)
        running.signal()
        assert running.end_s() < 3
        for thread in asking:
            thread.join()
    assert answers["plain"].status_code == 503 and answers["plain"].json()["error"]["code"] == "not_serving"
    events = [line for line in answers["stream"].text.split("\n\n") if line]
    assert answers["stream"].status_code == 200 and events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "not_serving"
    assert running.engine.closed and not running.engine.requests, "the cancellations reach the engine before its end"
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == [
        "24 sequences are cancelled: draining took too long"
    ]


def test_a_client_that_sends_no_more_is_cut_off(caplog: pytest.LogCaptureFixture):
    with _draining_server(0.3) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.1)
            running.signal()
            assert running.end_s() < 3
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_second_signal_ends_at_once_and_quietly(caplog: pytest.LogCaptureFixture):
    answers: dict = {}
    with _draining_server(30) as running:
        asking = [
            _ask(running.url, {**LONG, "stream": name == "stream"}, answers, name) for name in ("plain", "stream")
        ]
        _wait_for_work(running.engine, 24)
        running.signal()
        time.sleep(0.15)
        assert running.thread.is_alive() and not answers, "the first signal drains"
        running.signal()
        assert running.end_s() < 2
        for thread in asking:
            thread.join()
    assert all(isinstance(answer, httpx.RemoteProtocolError | httpx.ReadError) for answer in answers.values()), answers
    assert running.engine.closed
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
