"""`/v1/rerank` and `/v1/score`: how alike texts are, by the cosine of their embeddings.

A decoder has no head that was trained to score a pair, so this is what its own hidden states say, as `/v1/embeddings` reports them:
right for a model that was trained for embeddings, and a rough order for any other.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.serve.http.api_error import ApiError
from petatron.serve.http.json_body import read_request
from petatron.serve.http.openai_requests import PoolingFields, RerankRequest, ScoreRequest
from petatron.serve.http.request_fields import POOLING_RULES
from petatron.serve.http.routes.embeddings import pooled, unit
from petatron.serve.http.server_state import state_of


async def post_rerank(request: Request) -> Response:
    """Documents in the order of their likeness to a query."""
    body = await read_request(request, RerankRequest, others=POOLING_RULES)
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    (query, *others), tokens = await _embed(request, body, [body.query, *documents], param="documents")
    scores = [_cosine(query, document) for document in others]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: body.top_n or None]:
        document = {"document": {"text": documents[index]}} if body.return_documents is not False else {}
        results.append({"index": index, **document, "relevance_score": scores[index]})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
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
    vectors, tokens = await _embed(request, body, [*first, *second], param="text_2")
    left, right = vectors[: len(first)], vectors[len(first) :]
    scores = [_cosine(*pair) for pair in zip(left * (len(right) // len(left)), right)]
    return JSONResponse(
        {
            "id": f"score-{body.request_id or secrets.token_hex(12)}",
            "object": "list",
            "model": state_of(request).model.name,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def _embed(
    request: Request, body: PoolingFields, texts: Sequence[str], *, param: str
) -> tuple[list[list[float]], int]:
    """Returns a vector of unit length for each text, and the number of their tokens."""
    vectors, tokens = await pooled(request, body, list(texts), param=param)
    return [unit(vector) for vector in vectors], tokens


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(operator.mul, left, right))
