"""Requests made from the server's own OpenAPI schema: it says what it takes, and answers nothing with a failure of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks
from schemathesis.generation import GenerationMode

from petatron.serve.serve_options import ServeLimits
from tests.load_deadline import scaled
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(max_length=64), limits=ServeLimits(max_body_bytes=1 << 16)) as found:
        yield found


LONG_EXAMPLES = 300
CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)


def test_every_name_in_a_path_is_a_parameter(server: LiveServer):
    with server.client() as http:
        paths = http.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            found = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert found == set(re.findall(r"{(\w+)}", path)), path
    assert "/v1/models/{model}" in paths


def _call_route(operation: Any, mode: GenerationMode, *, examples: int) -> int:
    """Returns the number of calls. Not through schemathesis' pytest plugin, which does not know this pytest."""
    calls = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case) -> None:
        nonlocal calls
        calls += 1
        case.call_and_validate(checks=CHECKS, timeout=scaled(30))

    with suppress(Unsatisfiable):  # a route without parameters has no wrong ones; `_check_calls` names those that have
        call()
    return calls


def _call_all(
    server: LiveServer, *, examples: int, modes: Sequence[GenerationMode] = tuple(GenerationMode)
) -> dict[tuple[str, GenerationMode], int]:
    """Returns the calls of each route and mode."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    return {
        (f"{one.method.upper()} {one.path}", mode): _call_route(one, mode, examples=examples)
        for one in operations
        for mode in modes
    }


def _check_calls(server: LiveServer, calls: Mapping[tuple[str, GenerationMode], int], *, examples: int) -> None:
    """Every route of the schema was called, those with a body also wrongly where asked; none failed, and nothing is left."""
    with server.client() as http:
        paths = http.get("/openapi.json").json()["paths"]
        counted = http.get("/metrics").text
    routes = {f"{method.upper()} {path}": one for path, methods in paths.items() for method, one in methods.items()}
    assert {name for name, _ in calls} == routes.keys()
    for (name, mode), count in calls.items():
        has_body = "requestBody" in routes[name]
        assert count >= (examples if has_body else mode is GenerationMode.POSITIVE), (name, mode, count)
    statuses = set(re.findall(r'petatron_http_requests_total\{route="[^"]*",status="(\d+)"\}', counted))
    assert "200" in statuses and not {one for one in statuses if one >= "500"}, statuses
    server.wait_until(server.is_idle)
    assert server.thread.num_open == 0 and server.thread.failure is None


def test_no_request_fails_the_server(server: LiveServer):
    _check_calls(server, _call_all(server, examples=3, modes=[GenerationMode.POSITIVE]), examples=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_request_fails_the_server_long(server: LiveServer):
    """Stateless on purpose: no answer of this server names something that a later request refers to."""
    _check_calls(server, _call_all(server, examples=LONG_EXAMPLES), examples=LONG_EXAMPLES)


def test_every_route_is_in_the_schema_with_its_body(server: LiveServer):
    with server.client() as http:
        found = http.get("/openapi.json").json()
    bodies = {path: operation for path, methods in found["paths"].items() for operation in methods.values()}
    similar = ("/v1/rerank", "/rerank", "/v1/score", "/score")
    generating = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
    for path in ("/api", *generating, "/v1/embeddings", *similar, "/tokenize", "/detokenize"):
        ref = bodies[path]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert ref.rpartition("/")[2] in found["components"]["schemas"]
    for path in generating:
        assert {"application/json", "text/event-stream"} == bodies[path]["responses"]["200"]["content"].keys()
    assert {"/v1/models", "/healthz", "/health", "/version", "/readyz", "/metrics", "/tokenizer_info"} <= bodies.keys()
