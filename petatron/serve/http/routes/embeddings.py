"""`POST /v1/embeddings`: pooled last hidden states, of unit length."""

from __future__ import annotations

import base64
import math
import secrets
import struct
import time
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.json_body import read_request
from petatron.serve.http.openai_requests import EmbeddingRequest, PoolingFields, Prompt
from petatron.serve.http.request_fields import POOLING_RULES
from petatron.serve.http.routes.completions import check_batch
from petatron.serve.http.run_generations import complete
from petatron.serve.http.sampling import encode_prompts
from petatron.serve.http.server_state import state_of


async def post_embedding(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, EmbeddingRequest, others=POOLING_RULES)
    model = state.check_model(body.model)
    if body.dimensions is not None:
        raise ApiError(400, "dimensions is not supported: a hidden state cannot be shortened.", param="dimensions")
    if body.use_activation is not None and body.normalize not in (None, body.use_activation):
        raise ApiError(400, "normalize is the older name of use_activation. Send one of them.", param="normalize")
    vectors, count = await pooled(request, body, body.input, param="input")
    if body.use_activation is not False and body.normalize is not False:
        vectors = [unit(vector) for vector in vectors]

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
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


async def pooled(request: Request, body: PoolingFields, texts: Prompt, *, param: str) -> tuple[list[list[float]], int]:
    """Returns the pooled hidden state of each text, and the number of their tokens."""
    state = state_of(request)
    model = state.check_model(body.model)
    prompts = await encode_prompts(texts, body, model, state.options.limits, param=param)
    check_batch(len(prompts), state)
    params = SamplingParams(
        max_new_tokens=0, temperature=0.0, pooling=body.pooling or "mean", prefix_group=body.cache_salt or ""
    )
    generations = [Generation(prompt.ids, params, index=index) for index, prompt in enumerate(prompts)]
    completions = await complete(request, state, generations)
    return [completion.pooled or [] for completion in completions], sum(len(prompt.ids) for prompt in prompts)


def unit(vector: list[float]) -> list[float]:
    """Returns a vector of length one in its direction; zero stays zero.

    >>> unit([3.0, 4.0])
    [0.6, 0.8]
    """
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else vector
