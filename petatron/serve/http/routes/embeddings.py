"""`/v1/embeddings`: pooled last hidden states, of unit length. `/v1/rerank` and `/v1/score`: how alike texts are, by their cosine.

A decoder has no head that was trained to score a pair, so a score is what its own hidden states say, as `/v1/embeddings` reports them:
right for a model that was trained for embeddings, and a rough order for any other.
"""

from __future__ import annotations

import base64
import math
import operator
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation_handle import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.json_body import read_request
from petatron.serve.http.openai_requests import EmbeddingRequest, PoolingFields, Prompt, RerankRequest, ScoreRequest
from petatron.serve.http.request_field_rules import POOLING_RULES
from petatron.serve.http.request_to_engine import encode_prompts
from petatron.serve.http.routes.completions import check_batch
from petatron.serve.http.run_generations import complete
from petatron.serve.http.server_state import state_of


async def post_embedding(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, EmbeddingRequest, others=POOLING_RULES)
    model = state.check_model(body.model)
    if body.dimensions is not None:
        raise ApiError(400, "dimensions is not supported: a hidden state cannot be shortened.", param="dimensions")
    if body.use_activation is not None and body.normalize not in (None, body.use_activation):
        raise ApiError(400, "normalize is the older name of use_activation. Send one of them.", param="normalize")
    of_unit_length = body.use_activation is not False and body.normalize is not False
    vectors, usage = await _embed(request, body, body.input, param="input", of_unit_length=of_unit_length)

    def encoded(vector: list[float]) -> Any:
        packed = struct.pack(f"<{len(vector)}f", *vector)
        return base64.b64encode(packed).decode() if body.encoding_format == "base64" else vector

    return JSONResponse(
        {
            "id": f"embd-{body.request_id or secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": [
                {"object": "embedding", "index": index, "embedding": encoded(vector)}
                for index, vector in enumerate(vectors)
            ],
            "usage": usage,
        }
    )


async def post_rerank(request: Request) -> Response:
    """Documents in the order of their likeness to a query."""
    body = await read_request(request, RerankRequest, others=POOLING_RULES)
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    (query, *others), usage = await _embed(request, body, [body.query, *documents], param="documents")
    scores = [_cosine(query, document) for document in others]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: body.top_n or None]:
        document = {"document": {"text": documents[index]}} if body.return_documents is not False else {}
        results.append({"index": index, **document, "relevance_score": scores[index]})
    name = state_of(request).model.name
    return JSONResponse(
        {"id": f"rerank-{body.request_id or secrets.token_hex(12)}", "model": name, "usage": usage, "results": results}
    )


async def post_score(request: Request) -> Response:
    """One number for each pair of texts."""
    body = await read_request(request, ScoreRequest, others=POOLING_RULES)
    first, second = ([texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        text = f"text_1 has {len(first)} texts and text_2 {len(second)}: send one for all, or as many."
        raise ApiError(400, text, param="text_1")
    vectors, usage = await _embed(request, body, [*first, *second], param="text_2")
    left, right = vectors[: len(first)], vectors[len(first) :]
    scores = [_cosine(*pair) for pair in zip(left * (len(right) // len(left)), right)]
    return JSONResponse(
        {
            "id": f"score-{body.request_id or secrets.token_hex(12)}",
            "object": "list",
            "model": state_of(request).model.name,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": usage,
        }
    )


async def _embed(
    request: Request, body: PoolingFields, texts: Prompt, *, param: str, of_unit_length: bool = True
) -> tuple[list[list[float]], dict[str, int]]:
    """Returns the pooled hidden state of each text, and the counts of their tokens."""
    state = state_of(request)
    model, limits = state.check_model(body.model), state.options.limits
    suffix = () if body.add_special_tokens is False else model.suffix_ids
    prompts = await encode_prompts(texts, body, model, limits, param=param, suffix=suffix)
    check_batch(len(prompts), state)
    params = SamplingParams(
        max_new_tokens=0,
        temperature=0.0,
        pooling=body.pooling or "mean",
        prefix_group=body.cache_salt or "",
        adapter=model.adapter,
    )
    generations = [Generation(prompt.ids, params, index=index) for index, prompt in enumerate(prompts)]
    completions = await complete(request, state, generations)
    vectors, count = [completion.pooled or [] for completion in completions], sum(len(prompt.ids) for prompt in prompts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return [unit(vector) for vector in vectors] if of_unit_length else vectors, usage


def unit(vector: list[float]) -> list[float]:
    """Returns a vector of length one in its direction; zero stays zero.

    >>> unit([3.0, 4.0])
    [0.6, 0.8]
    """
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else vector


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(operator.mul, left, right))
