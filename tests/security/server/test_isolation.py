"""Grammars and chat templates of strangers: they run in processes with limits, and cost their sender an error, nobody else anything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from petatron.base.errors import DataError
from petatron.data.prompt.chat_template import ChatTemplate
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.grammar import check_schema_numbers
from petatron.infer.sampling_params import Constraint
from petatron.serve.isolation.limited_worker import LimitedJobs
from petatron.serve.isolation.limited_worker_pool import Isolation, LimitedPool, LimitedProcess
from petatron.serve.serve_options import ServeLimits
from tests.longform import diagonal
from tests.security.limits import limited
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

pytest.importorskip("llguidance")
MEMORY_BYTES = 1 << 29
CRASHES_LLGUIDANCE = (
    {"const": -(2**63)},
    {"enum": [1, -(2**63) + 1]},
    {"anyOf": [{"const": -9.223372036854775808e18}]},
)
NO_NUMBERS = ({"title": 2**64}, {"const": -(2**63) - 1}, {"x": [{"y": 10**4000}]}, {"maximum": float("inf")})
TEMPLATES = {
    "memory of one text": "{{ '%.999999999f' % 1.0 }}",
    "a constant": "{{ 'a' * 10 ** 10 }}",
    "a long text": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.fixture(scope="module")
def isolation() -> Iterator[Isolation]:
    found = Isolation(ByteTokenizer(), timeout_s=1.5, memory_bytes=MEMORY_BYTES)
    yield found
    found.close()


def _schema(content: Any) -> Constraint:
    return Constraint(kind="json_schema", grammar=json.dumps(content))


@pytest.mark.parametrize("schema", [*CRASHES_LLGUIDANCE, *NO_NUMBERS], ids=lambda schema: str(schema)[:40])
def test_numbers_that_the_library_cannot_take_are_refused_first(schema: Any):
    with pytest.raises(DataError, match="schema has the number"):
        check_schema_numbers(schema)


def test_a_crash_is_an_error_of_its_job_alone():
    """The process ends in the middle of a job, as a segmentation fault ends it; the next job finds another."""
    process = LimitedProcess({"memory_bytes": MEMORY_BYTES, "tokenizer": None}, timeout_s=60.0)
    plain = {**ChatTemplate("{{ messages[0] }}").sources(), "arguments": {"messages": ["hi"]}}
    endless = {**ChatTemplate(TEMPLATES["time"]).sources(), "arguments": {"messages": []}}
    try:
        assert process.run("render", plain) == "hi"
        before = process.pid
        assert before is not None
        threading.Timer(0.2, os.kill, (before, signal.SIGSEGV)).start()
        with pytest.raises(DataError, match="cannot be handled"):
            process.run("render", endless)
        assert process.run("render", plain) == "hi" and process.pid != before
    finally:
        process.close()


@diagonal(2)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_has_limits_of_time_memory_and_size(isolation: Isolation, template: str):
    with limited(seconds=20):
        made = ChatTemplate(template)  # reading it computes nothing
        with pytest.raises(DataError, match=r"template|more time or memory"):
            asyncio.run(isolation.render(made, {"messages": []}))
        plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
        assert asyncio.run(isolation.render(plain, {"messages": [{"content": "héllo"}]})) == "héllo"


def test_jobs_of_one_owner_leave_a_process_to_others():
    """Four that take all their time, and a short one of somebody else, which comes last and is done first."""
    pool = LimitedPool({"memory_bytes": MEMORY_BYTES, "tokenizer": None}, size=2, timeout_s=1.0)
    plain = {**ChatTemplate("{{ messages[0] }}").sources(), "arguments": {"messages": ["hi"]}}
    endless = {**ChatTemplate(TEMPLATES["time"]).sources(), "arguments": {"messages": []}}

    async def ask() -> tuple[str, int]:
        await asyncio.gather(*(pool.run("render", plain) for _ in range(2)))  # both have started
        slow = [asyncio.ensure_future(pool.run("render", endless, owner="a")) for _ in range(4)]
        left = asyncio.ensure_future(pool.run("render", endless, owner="c"))
        await asyncio.sleep(0.05)
        left.cancel()
        text = await pool.run("render", plain, owner="b")
        num_done = sum(one.done() for one in slow)
        for one in slow[1:]:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return text, num_done

    try:
        text, num_done = asyncio.run(ask())
    finally:
        pool.close()
    assert text == "hi" and num_done <= 1


def test_what_is_compiled_here_and_there_is_the_same(isolation: Isolation):
    for good in (Constraint(kind="json"), Constraint(kind="regex", grammar="[ab]+"), _schema({"type": "object"})):
        asyncio.run(isolation.check_constraint(good))
    for wrong in (Constraint(kind="regex", grammar="("), _schema([1]), _schema({"type": "no such"})):
        with pytest.raises(DataError, match=r"constraint|schema"):
            asyncio.run(isolation.check_constraint(wrong))
    with pytest.raises(DataError, match="needs a tokenizer"):
        LimitedJobs(None).compile("json", "")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    limits = ServeLimits(isolation_timeout_s=2.0, isolation_memory_bytes=MEMORY_BYTES)
    with live_server(FakeEngine(), limits=limits) as found:
        yield found


@pytest.mark.parametrize("schema", [*CRASHES_LLGUIDANCE, *NO_NUMBERS[:3]], ids=lambda schema: str(schema)[:40])
def test_a_request_of_a_hundred_bytes_does_not_end_the_server(server: LiveServer, schema: Any):
    body = {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    with server.client() as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400 and "number" in answer.json()["error"]["message"]
        assert http.get("/healthz").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_template_that_never_ends_leaves_the_server_free():
    """Eight of them, more than there are processes and threads; and the server ends."""
    from petatron.serve.served_model_properties import ModelCard

    engine = FakeEngine()
    card = ModelCard.of_engine(engine, name="fake", created_s=1, chat_template=TEMPLATES["time"])
    limits = ServeLimits(isolation_timeout_s=0.5, request_timeout_s=1.0)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with live_server(engine, card=card, limits=limits) as server:

        async def ask() -> list[int]:
            import httpx

            async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=False, trust_env=False) as http:
                chats = [asyncio.ensure_future(http.post("/v1/chat/completions", json=chat)) for _ in range(8)]
                await asyncio.sleep(0.2)
                others = [
                    (await http.post("/v1/completions", json={"prompt": "a" * 100, "max_tokens": 1})).status_code
                    for _ in range(5)
                ]
                return [*others, *[answer.status_code for answer in await asyncio.gather(*chats)]]

        statuses = asyncio.run(ask())
        assert statuses[:5] == [200] * 5 and set(statuses[5:]) <= {400, 504}
        began = time.monotonic()
    assert time.monotonic() - began < 10
