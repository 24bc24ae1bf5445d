"""What a server refuses, with which status, and who may ask at all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import openai
import pytest

from petatron.base.errors import ConfigError
from petatron.serve.serve_options import ServeLimits, ServeOptions
from tests.load_deadline import within
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

KEY = "a-key-of-some-length-0123456789"
LIMITS = ServeLimits(
    max_body_bytes=4000, max_prompt_tokens=50, max_tokens=40, max_batch=4, max_n=3, max_open=6, request_timeout_s=0.6
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(max_sequences=2), limits=LIMITS, api_keys=("another-key-0123456789", KEY)) as found:
        yield found


def _post(server: LiveServer, body: dict | bytes, path: str = "/v1/completions", **headers: str):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    with server.client() as http:
        return http.post(path, content=content, headers=sent)


def _is_error(answer, status: int, code: str | None = None) -> bool:
    error = answer.json()["error"]
    return (
        answer.status_code == status
        and set(error) == {"message", "type", "param", "code"}
        and code in (None, error["code"])
    )


def test_a_key_is_needed_for_everything_but_health_and_the_page(server: LiveServer):
    with server.client() as http:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/tokenizer_info", "/nothing"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": KEY},
                {"Authorization": f"Basic {KEY}"},
            ):
                answer = http.get(path, headers=headers)
                assert _is_error(answer, 401, "invalid_api_key") and answer.headers["www-authenticate"] == "Bearer"
        assert http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        assert [http.get(path).status_code for path in ("/", "/healthz", "/readyz")] == [200, 200, 200]
        assert "default-src 'none'" in http.get("/").headers["content-security-policy"]
        assert "access-control-allow-origin" not in http.get("/", headers={"Origin": "https://evil.example"}).headers
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "a" * 60}, 400),
        ({"prompt": ["a"] * 5}, 400),
        ({"prompt": "a", "n": 4}, 400),
        ({"prompt": ["a"] * 3, "n": 3}, 400),  # nine sequences can never be open at once
        ({"prompt": "a", "max_tokens": 41}, 400),
        ({"prompt": "a" * 5000}, 413),
        (b"{", 400),
        (b"[" * 3000, 400),
        (b"\xff", 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 3000 + b"}", 400),
        (b"", 400),
    ],
)
def test_what_is_too_much_or_no_json_is_refused(server: LiveServer, body: dict | bytes, status: int):
    assert _is_error(_post(server, body), status)


def test_other_content_types_addresses_and_methods(server: LiveServer):
    assert _is_error(_post(server, {"prompt": "a"}, **{"Content-Type": "text/plain"}), 415)
    assert _is_error(_post(server, {}, path="/v1/nothing"), 404)
    wrong = _post(server, {}, path="/healthz")
    assert _is_error(wrong, 405) and wrong.headers["allow"] == "GET"


def test_a_body_without_a_length_is_cut_off(server: LiveServer):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
        raw.sendall(head.encode())
        raw.sendall(b"".join(b"400\r\n" + b"a" * 0x400 + b"\r\n" for _ in range(5)))  # and no end
        assert b"413" in raw.recv(200).split(b"\r\n")[0]


def test_a_full_queue_answers_429_and_a_slow_answer_504(server: LiveServer):
    engine = server.engine
    assert isinstance(engine, FakeEngine)
    engine.step_s = 0.1  # so that 40 tokens take longer than the server allows
    answers: list = []
    ask = {"prompt": ["a"] * 3, "max_tokens": 40}
    threads = [threading.Thread(target=lambda: answers.append(_post(server, ask))) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.thread.num_open == 6)
        with within(5, "a refusal"):
            refused = _post(server, {"prompt": "b", "max_tokens": 1})
        assert _is_error(refused, 429, "queue_full") and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        stream = _post(server, {"prompt": "b", "max_tokens": 40, "stream": True})
        assert _is_error(stream, 429)  # a stream is refused with a status too
        for thread in threads:
            thread.join()
        assert all(_is_error(answer, 504, "timeout") for answer in answers)
        server.wait_until(server.is_idle)
        late = _post(server, {"prompt": "b", "max_tokens": 40, "stream": True})
        events = [line for line in late.text.split("\n\n") if line]
        assert late.status_code == 200 and json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert events[-1] == "data: [DONE]"
    finally:
        engine.step_s = 0.0
    server.wait_until(server.is_idle)
    assert _post(server, {"prompt": "b", "max_tokens": 1}).status_code == 200


def test_metrics_count_requests_and_measure_tokens(server: LiveServer):
    _post(server, {"prompt": "abc", "max_tokens": 5})
    _post(server, {"prompt": "abc", "max_tokens": 500})
    with server.client(headers={"Authorization": f"Bearer {KEY}"}) as http:
        found = http.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in found.text.splitlines() if not line.startswith("#"))
    assert float(values['petatron_http_requests_total{route="/v1/completions",status="200"}']) >= 1
    assert float(values['petatron_http_requests_total{route="/v1/completions",status="400"}']) >= 1
    assert float(values["petatron_time_to_first_token_seconds_count"]) >= 1
    assert float(values["petatron_time_per_output_token_seconds_count"]) >= 1
    assert float(values["petatron_generated_tokens_total"]) >= 5 and float(values["petatron_prompt_tokens_total"]) >= 3
    for name in (
        "queue_length",
        "running_sequences",
        "cache_use_ratio",
        "cache_pages",
        "preemptions_total",
        "accepted_tokens_total",
    ):
        assert f"petatron_{name}" in values
    assert "abc" not in found.text


def test_off_loopback_a_key_is_required():
    ServeOptions(host="127.0.0.1").check()
    ServeOptions(host="0.0.0.0", api_keys=(KEY,)).check()
    for host in ("0.0.0.0", "::", "192.168.0.4", "node7"):
        with pytest.raises(ConfigError, match="no API key is set"):
            ServeOptions(host=host).check()
    with pytest.raises(ConfigError, match=r"300\.1\.1\.1 is not an address"):
        ServeOptions(host="300.1.1.1", api_keys=(KEY,)).check()
    with pytest.raises(ConfigError, match="shorter than 16"):
        ServeOptions(api_keys=("short",)).check()
    with pytest.raises(ConfigError, match="--max-batch"):
        ServeOptions(limits=ServeLimits(max_batch=600), port=99999).check()
    with pytest.raises(ConfigError, match="--request-timeout 0 allows nothing"):
        ServeOptions(limits=ServeLimits(request_timeout_s=0)).check()


def test_too_many_connections_answer_503():
    body = {"prompt": "a", "max_tokens": 60, "stream": True}
    with (
        live_server(FakeEngine(step_s=0.05), limits=ServeLimits(max_connections=1)) as server,
        server.client() as http,
        http.stream("POST", "/v1/completions", json=body) as held,
    ):
        assert held.status_code == 200
        refused = _post(server, {"prompt": "a", "max_tokens": 1})
        assert _is_error(refused, 503) and "retry-after" in refused.headers


def test_an_unexpected_failure_tells_nothing(caplog: pytest.LogCaptureFixture):
    engine = FakeEngine()
    with live_server(engine) as server:
        engine.submit = None  # type: ignore[assignment,method-assign]
        answer = _post(server, {"prompt": "a", "max_tokens": 1})
        assert _is_error(answer, 500, "internal_error") and "NoneType" not in answer.text
        del engine.submit
        assert _post(server, {"prompt": "a", "max_tokens": 1}).status_code == 200, (
            "one request does not fail the engine"
        )
