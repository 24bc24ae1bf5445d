"""`POST /v1/embeddings`: pooled last hidden states, of unit length."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.openai_requests import EmbeddingRequest
from petatron.serve.http.read_request import read_request
from petatron.serve.http.routes.completions import check_batch
from petatron.serve.http.run_generations import complete
from petatron.serve.http.sampling import encode_prompts
from petatron.serve.http.server_state import state_of


async def post_embedding(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, EmbeddingRequest)
    model = state.check_model(body.model)
    if body.dimensions is not None:
        raise ApiError(400, "dimensions is not supported: a hidden state cannot be shortened.", param="dimensions")
    prompts = await encode_prompts(
        body.input, model, state.options.limits, param="input", truncate=body.truncate_prompt_tokens
    )
    check_batch(len(prompts), state)
    params = SamplingParams(max_new_tokens=0, temperature=0.0, pooling=body.pooling)
    generations = [Generation(prompt.ids, params, index=index) for index, prompt in enumerate(prompts)]
    completions = await complete(request, state, generations)
    count = sum(len(prompt.ids) for prompt in prompts)
    return JSONResponse(
        {
            "object": "list",
            "model": model.name,
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(unit(one.pooled or []), body.encoding_format),
                }
                for index, one in enumerate(completions)
            ],
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


def unit(vector: list[float]) -> list[float]:
    """Returns a vector of length one in its direction; zero stays zero.

    >>> unit([3.0, 4.0])
    [0.6, 0.8]
    """
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else vector


def _encoded(vector: list[float], form: str | None) -> Any:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if form == "base64" else vector
