"""Builds the FastAPI app: routes, OpenAPI schema, and the framework's errors as error objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from petatron.base.errors import PetatronError
from petatron.base.version import __version__
from petatron.serve.engine_thread import EngineThread, ServedEngine
from petatron.serve.http import openai_requests as bodies
from petatron.serve.http.api_error import ApiError, ErrorAnswer, to_api_error
from petatron.serve.http.json_body import body_components, body_schema, naming_ignored_fields
from petatron.serve.http.metrics import ServerMetrics
from petatron.serve.http.request_guard_middleware import RequestGuard
from petatron.serve.http.responses_api_requests import ResponsesRequest
from petatron.serve.http.routes import chat, completions, embeddings, megatron, model_info, recommend
from petatron.serve.http.routes.responses import post_response
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.isolation.limited_worker_pool import Isolation
from petatron.serve.playground import PlaygroundPage
from petatron.serve.serve_options import ServeOptions
from petatron.serve.served_model_properties import ModelCard

_POST_ROUTES: tuple[tuple[str, str, Callable[[Request], Awaitable[Response]], type[BaseModel]], ...] = (
    ("PUT", "/api", megatron.put_api, megatron.MegatronRequest),
    ("POST", "/v1/completions", completions.post_completion, bodies.CompletionRequest),
    ("POST", "/v1/chat/completions", chat.post_chat_completion, bodies.ChatCompletionRequest),
    ("POST", "/v1/responses", post_response, ResponsesRequest),
    ("POST", "/v1/embeddings", embeddings.post_embedding, bodies.EmbeddingRequest),
    *(("POST", f"{prefix}/rerank", embeddings.post_rerank, bodies.RerankRequest) for prefix in ("/v1", "/v2", "")),
    *(("POST", f"{prefix}/score", embeddings.post_score, bodies.ScoreRequest) for prefix in ("/v1", "")),
    ("POST", "/v1/recommend", recommend.post_recommend, recommend.RecommendRequest),
    ("POST", "/tokenize", model_info.post_tokenize, bodies.TokenizeRequest),
    ("POST", "/detokenize", model_info.post_detokenize, bodies.DetokenizeRequest),
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 405, 408, 413, 415, 421, 429, 431, 500, 503, 504)
}
_EVENT = {
    "type": "object",
    "description": "One event of the stream: data is a chunk of the answer in JSON, or [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}


def build_app(
    engine: ServedEngine,
    model: ModelCard,
    options: ServeOptions,
    *,
    background: Callable[[ServerState], AsyncIterator[None]] | None = None,
) -> FastAPI:
    """Builds the app, which drives the engine and closes it at the end. background: a task that runs as long as the app."""
    metrics, limits = ServerMetrics(), options.limits
    thread = EngineThread(engine, max_open=limits.max_open, on_finish=metrics.observe)
    isolation = Isolation(
        model.tokenizer, timeout_s=limits.isolation_timeout_s, memory_bytes=limits.isolation_memory_bytes
    )
    state = ServerState(thread, model, options, metrics, isolation)
    state.replace_model(model)
    metrics.watch_engine(thread, lambda: state.model.step)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread.start()
        try:
            if background is None:
                yield
            else:
                async with asynccontextmanager(background)(state):
                    yield
        finally:
            isolation.close()
            await thread.close()

    app = FastAPI(title="petatron", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.petatron = state
    app.add_middleware(RequestGuard, options=options, metrics=metrics)
    app.add_exception_handler(HTTPException, _answer_framework_error)

    async def answer_error(_: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    for kind in (ValidationError, ApiError, PetatronError, TimeoutError):
        app.add_exception_handler(kind, answer_error)
    _add_routes(app, page=PlaygroundPage.read())
    _describe_bodies(app)
    return app


def _add_routes(app: FastAPI, *, page: PlaygroundPage) -> None:
    async def get_page() -> HTMLResponse:
        return HTMLResponse(page.html, headers=page.headers)

    for method, path, route, body in _POST_ROUTES:
        responses = _ERRORS | (_STREAMS if "stream" in body.model_fields else {})
        naming = naming_ignored_fields(route)
        app.add_api_route(path, naming, methods=[method], responses=responses, openapi_extra=body_schema(body))

    async def get_version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    for path, route in (
        ("/v1/models", model_info.get_models),
        ("/v1/models/{model:path}", model_info.get_model),
        ("/tokenizer_info", model_info.get_tokenizer_info),
        ("/healthz", _get_health),
        ("/health", _get_health),
        ("/readyz", _get_readiness),
        ("/version", get_version),
        ("/metrics", _get_metrics),
    ):
        kind = PlainTextResponse if path == "/metrics" else JSONResponse
        app.add_api_route(path, route, methods=["GET"], responses=_ERRORS, response_class=kind)
        app.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/", get_page, methods=["GET", "HEAD"], include_in_schema=False)


def _describe_bodies(app: FastAPI) -> None:
    """Adds request bodies to the OpenAPI schema; routes read them themselves, so the framework does not know them."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(
                body_components([body for *_, body in _POST_ROUTES])
            )
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi


async def _answer_framework_error(request: Request, error: HTTPException) -> Response:
    """Answers a request for an unknown path or method."""
    texts = {404: "There is nothing at this address.", 405: f"{request.method} is not allowed here."}
    response = ApiError(error.status_code, texts.get(error.status_code, "The request cannot be read.")).response()
    allowed = (error.headers or {}).get("Allow")
    if allowed is not None:
        response.headers["Allow"] = allowed
    return response


async def _get_health(request: Request) -> JSONResponse:
    """Whether the server works at all; if not, it should be restarted."""
    failed = state_of(request).thread.state == "failed"
    return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)


async def _get_readiness(request: Request) -> JSONResponse:
    """Whether new requests should be sent here now."""
    thread = state_of(request).thread
    return JSONResponse({"status": thread.state, "open": thread.num_open}, 200 if thread.state == "serving" else 503)


async def _get_metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
