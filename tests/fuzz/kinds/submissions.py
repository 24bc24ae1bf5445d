"""What clients send to a server: bodies with sampling values, schemas and grammars, and the chat template of a model.

The whole server answers, in this process, with a real engine, which lives through all cases: whatever one request asks for, it is
answered or refused, and the engine serves on. Grammars and templates, which a server gives to processes with limits, run here, where a
crash is found.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

import petatron
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.prompt.chat_template import ChatTemplate
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import Constraint
from petatron.serve.http.app import build_app
from petatron.serve.isolation.limited_worker import LimitedJobs, SentVocabulary
from petatron.serve.serve_options import ServeLimits, ServeOptions
from petatron.serve.served_model_properties import ModelCard
from tests.fuzz.kind import Kind, Refused
from tests.serve.in_process_engine import InProcessEngine

_MAX_BYTES = 1 << 20
_FLAGS = "--mock-data --lr 1e-3 --train-iters 2 --vocab-size 257 --num-layers 1 --max-position-embeddings 1024"
_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}{% endfor %}{{ tools | tojson if tools }}"
_SAMPLING = {
    "n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "presence_penalty": 0.1, "frequency_penalty": 0.2,
    "repetition_penalty": 1.1, "logit_bias": {"65": 2.0, "66": -3}, "seed": 7, "stop": ["x", "\n\n"], "stop_token_ids": [3, 4],
    "min_tokens": 1, "ignore_eos": True, "stream": False, "max_tokens": 6,
}  # fmt: skip
_SCHEMA = {
    "type": "object", "title": "a", "required": ["a"], "additionalProperties": False,
    "properties": {
        "a": {"type": "integer", "minimum": -5, "maximum": 99}, "b": {"enum": ["x", 1, None, -2.5]}, "c": {"const": -17},
        "d": {"type": "array", "items": {"type": "string", "pattern": "^[ab]{1,3}$", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "e": {"anyOf": [{"type": "number", "multipleOf": 0.5}, {"$ref": "#/$defs/f"}]},
    },
    "$defs": {"f": {"type": "boolean"}},
}  # fmt: skip
_FILES: Mapping[str, tuple[str, Any]] = {
    "completion.json": ("/v1/completions", {"prompt": ["abc", "d"], "logprobs": 2, "echo": True, **_SAMPLING}),
    "tokens.json": ("/v1/completions", {"prompt": [[65, 66], [67]], "prompt_logprobs": 1, **_SAMPLING}),
    "chat.json": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "user", "content": "b"},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"x": [1]},
            "logprobs": True,
            "top_logprobs": 2,
            **_SAMPLING,
        },
    ),
    "constrained.json": (
        "/v1/completions",
        {"prompt": "a", **_SAMPLING, "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}},
    ),
    "embedding.json": ("/v1/embeddings", {"input": ["a", "bc"], "encoding_format": "float", "pooling": "mean"}),
    "tokenize.json": ("/tokenize", {"messages": [{"role": "user", "content": "b"}], "return_token_strs": True}),
    "detokenize.json": ("/detokenize", {"tokens": [65, 66, 67]}),
}
_REGEX = "(a|b{2,5}[^x\\n]+)*\\d{1,3}(?i:Ab)"


class _HereIsolation:
    """`Isolation` without processes."""

    def __init__(self) -> None:
        self._jobs = LimitedJobs(SentVocabulary(SentVocabulary.content_of(ByteTokenizer())))

    async def check_constraint(self, constraint: Constraint, *, owner: str = "") -> None:
        self._jobs.compile(constraint.kind, constraint.grammar)

    async def render(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> str:
        return self._jobs.render(**template.sources(), arguments=dict(arguments))

    def close(self) -> None:
        """Nothing is open."""


class _Server:
    def __init__(self) -> None:
        run = petatron.load("tiny-llama", _FLAGS.split())
        model = petatron.build_model(run, petatron.launch(run))
        engine = InProcessEngine(model, ByteTokenizer(), EngineOptions(max_sequences=8, num_pages=192, page_size=8))
        card = ModelCard.of_engine(engine, name="fuzzed", created_s=1, chat_template=_TEMPLATE)
        limits = ServeLimits(max_tokens=8, max_n=4, max_batch=4, max_open=16, request_timeout_s=8.0)
        self._app = build_app(engine, card, ServeOptions(limits=limits))
        state = self._app.state.petatron
        state.isolation = _HereIsolation()
        state.model = replace(state.model, isolation=state.isolation)
        self._loop = asyncio.new_event_loop()
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._loop.run_until_complete(self._lifespan.__aenter__())

    def post(self, path: str, content: bytes) -> int:
        return self._loop.run_until_complete(self._post(path, content))

    async def _post(self, path: str, content: bytes) -> int:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post(path, content=content, headers={"Content-Type": "application/json"})
            health = await http.get("/healthz")
        assert health.status_code == 200, "the engine has failed"
        assert answer.status_code in (200, 504) or 400 <= answer.status_code < 500, (
            f"{answer.status_code} {answer.text}"
        )
        if answer.status_code != 200:
            raise Refused(f"{answer.status_code} {answer.text[:300]}")
        json.loads(answer.content) if "stream" not in answer.headers["content-type"] else None
        return answer.status_code


def make(name: str) -> Kind:
    server = _Server()
    files = {file: json.dumps(body).encode() for file, (_, body) in _FILES.items()}
    files |= {
        "schema.json": json.dumps(_SCHEMA).encode(),
        "regex.txt": _REGEX.encode(),
        "template.txt": _TEMPLATE.encode(),
    }
    doors = {file: _door(server, file, path) for file, (path, _) in _FILES.items()}
    doors |= {"schema.json": _schema_door(server), "regex.txt": _regex_door(server), "template.txt": _template}
    return Kind(
        name,
        files,
        doors=doors,
        formats={".json": "json", ".txt": "text"},
        reads={door: (door,) for door in doors},
        shares={"schema.json": 3.0, "constrained.json": 2.0},
        wall_s=60.0,
    )


def _read(folder: Path, file: str) -> bytes:
    with reading_untrusted(folder / file, data_file_error):
        return read_limited_bytes(folder / file, _MAX_BYTES)


def _door(server: _Server, file: str, path: str) -> Any:
    return lambda folder, scratch: server.post(path, _read(folder, file))


def _constrained(response_format: bytes) -> bytes:
    return b'{"prompt": "a", "max_tokens": 4, "response_format": ' + response_format + b"}"


def _schema_door(server: _Server) -> Any:
    def door(folder: Path, scratch: Path) -> Any:
        schema = b'{"type": "json_schema", "json_schema": {"schema": ' + _read(folder, "schema.json") + b"}}"
        return server.post("/v1/completions", _constrained(schema))

    return door


def _regex_door(server: _Server) -> Any:
    def door(folder: Path, scratch: Path) -> Any:
        regex = json.dumps({"type": "regex", "regex": _read(folder, "regex.txt").decode(errors="replace")}).encode()
        return server.post("/v1/completions", _constrained(regex))

    return door


def _template(folder: Path, scratch: Path) -> Any:
    template = ChatTemplate(_read(folder, "template.txt").decode(errors="replace"))
    return template.render([{"role": "user", "content": "a"}], tools=[{"type": "function"}])
