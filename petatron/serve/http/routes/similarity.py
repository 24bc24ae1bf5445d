"""`/v1/rerank` and `/v1/score`: how alike texts are, by the cosine of their embeddings.

A decoder has no head that was trained to score a pair, so this is what its own hidden states say, as `/v1/embeddings` reports them:
right for a model that was trained for embeddings, and a rough order for any other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.openai_requests import RerankRequest, ScoreRequest, SimilarityFields
from petatron.serve.http.read_request import read_request
from petatron.serve.http.routes.completions import check_batch
from petatron.serve.http.routes.embeddings import unit
from petatron.serve.http.run_generations import complete
from petatron.serve.http.sampling import encode_prompts
from petatron.serve.http.server_state import state_of


async def post_rerank(request: Request) -> Response:
    """Documents in the order of their likeness to a query."""
    body = await read_request(request, RerankRequest)
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    (query, *others), tokens = await _embed(request, body, [body.query, *documents], param="documents")
    scores = [_cosine(query, one) for one in others]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: body.top_n or None]:
        document = {"document": {"text": documents[index]}} if body.return_documents else {}
        results.append({"index": index, **document, "relevance_score": scores[index]})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    name = state_of(request).model.name
    return JSONResponse({"id": f"rerank-{secrets.token_hex(12)}", "model": name, "usage": usage, "results": results})


async def post_score(request: Request) -> Response:
    """One number for each pair of texts."""
    body = await read_request(request, ScoreRequest)
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        text = f"text_1 has {len(first)} texts and text_2 {len(second)}: send one for all, or as many."
        raise ApiError(400, text, param="text_1")
    vectors, tokens = await _embed(request, body, [*first, *second], param="text_2")
    left, right = vectors[: len(first)], vectors[len(first) :]
    scores = [_cosine(one, other) for one, other in zip(left * (len(right) // len(left)), right)]
    return JSONResponse(
        {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "model": state_of(request).model.name,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def _embed(
    request: Request, body: SimilarityFields, texts: Sequence[str], *, param: str
) -> tuple[list[list[float]], int]:
    """Returns a vector of unit length for each text, and the number of their tokens."""
    state = state_of(request)
    model = state.check_model(body.model)
    limits, truncate = state.options.limits, body.truncate_prompt_tokens
    prompts = await encode_prompts(list(texts), model, limits, param=param, truncate=truncate)
    check_batch(len(prompts), state)
    params = SamplingParams(max_new_tokens=0, temperature=0.0, pooling=body.pooling)
    generations = [Generation(prompt.ids, params, index=index) for index, prompt in enumerate(prompts)]
    completions: list[Any] = await complete(request, state, generations)
    return [unit(one.pooled or []) for one in completions], sum(len(prompt.ids) for prompt in prompts)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(left * right for left, right in zip(one, other))
