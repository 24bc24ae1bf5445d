"""Requests made from the server's own OpenAPI schema: it says what it takes, and answers nothing with a failure of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks
from schemathesis.generation import GenerationMode

from petatron.serve.serve_options import ServeLimits
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(max_length=64), limits=ServeLimits(max_body_bytes=1 << 16)) as found:
        yield found


CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)


def _call_all(server: LiveServer, *, examples: int, modes: Iterable[GenerationMode] = GenerationMode) -> None:
    """Not through schemathesis' pytest plugin, which does not know this pytest."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in modes:

            @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def call(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=CHECKS, timeout=30)

            try:
                call()
            except Unsatisfiable:  # a route without parameters has no wrong ones
                assert mode is GenerationMode.NEGATIVE and operation.method == "get"


def test_no_request_fails_the_server(server: LiveServer):
    _call_all(server, examples=3, modes=[GenerationMode.POSITIVE])
    server.wait_until(server.is_idle)


@pytest.mark.slow
def test_no_request_fails_the_server_long(server: LiveServer):
    _call_all(server, examples=100)
    server.wait_until(server.is_idle)


def test_every_route_is_in_the_schema_with_its_body(server: LiveServer):
    with server.client() as http:
        found = http.get("/openapi.json").json()
    bodies = {path: operation for path, methods in found["paths"].items() for operation in methods.values()}
    for path in ("/api", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
        ref = bodies[path]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert ref.rpartition("/")[2] in found["components"]["schemas"]
    assert {"/v1/models", "/healthz", "/readyz", "/metrics", "/tokenizer_info"} <= bodies.keys()
