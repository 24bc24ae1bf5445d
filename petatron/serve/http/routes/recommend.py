"""`/v1/recommend`: the best items after a history, with their scores.

A history has items by number, or by name where the server was given the names (`--item-names`). Items that the model does not know are left
out, and named in the answer: a service may have newer items than its model. Of a history that is longer than the model reads, the most
recent items count.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation_handle import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.json_body import read_request
from petatron.serve.http.openai_requests import OpenAIRequest, RequestId
from petatron.serve.http.run_generations import complete
from petatron.serve.http.server_state import state_of

MAX_ITEMS, MAX_HISTORY, MAX_NAMED = 1000, 1 << 16, 100
"""The most items of an answer and of a history, and the most unknown ones that an answer names."""
_ItemName = Annotated[str, Field(min_length=1, max_length=512)]
_ItemNumber = Annotated[int, Field(ge=0, lt=1 << 62)]
_Time = Annotated[int, Field(ge=-(1 << 62), lt=1 << 62)]


class RecommendRequest(OpenAIRequest):
    """POST /v1/recommend. times: of the items of the history, in seconds. exclude_history: its items are not recommended."""

    history: Annotated[list[_ItemNumber | _ItemName], Field(min_length=1, max_length=MAX_HISTORY)]
    times: Annotated[list[_Time], Field(max_length=MAX_HISTORY)] | None = None
    k: Annotated[int, Field(ge=1, le=MAX_ITEMS)] = 10
    exclude_history: bool = True
    request_id: RequestId | None = None


async def post_recommend(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, RecommendRequest)
    model, names = state.check_model(body.model), state.options.item_names
    times = body.times or []
    if body.times is not None and len(times) != len(body.history):
        text = f"times has {len(times)} entries for {len(body.history)} items. Send one for each, or none."
        raise ApiError(400, text, param="times")
    ids = [item_id(item, names.numbers if names else None, model.vocab_size) for item in body.history]
    unknown = [item for item, number in zip(body.history, ids, strict=True) if number is None]
    known = [index for index, number in enumerate(ids) if number is not None][-model.max_prompt_tokens :]
    if not known:
        shown = ", ".join(map(repr, unknown[:5]))
        raise ApiError(400, f"The model knows no item of the history: {shown}.", param="history", code="unknown_items")
    params = SamplingParams(
        max_new_tokens=0,
        best_items=body.k,
        history_times=tuple(times[index] for index in known) if times else (),
        leave_out_history=body.exclude_history,
    )
    history = [number for index in known if (number := ids[index]) is not None]
    [completion] = await complete(request, state, [Generation(history, params, index=0)])
    return JSONResponse(
        {
            "id": f"rec-{body.request_id or secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": [
                {
                    "object": "recommendation",
                    "index": index,
                    "item": names.names[item] if names else item,
                    "score": score,
                }
                for index, (item, score) in enumerate(completion.items)
            ],
            "unknown_items": unknown[:MAX_NAMED],
            "num_unknown_items": len(unknown),
            "usage": {"prompt_tokens": len(history), "total_tokens": len(history)},
        }
    )


def item_id(item: int | str, numbers: dict[str, int] | None, num_items: int) -> int | None:
    """Returns the number of an item, given by name where there are names; None: the model does not know it.

    >>> item_id("12", {"12": 0}, 5), item_id(12, {"12": 0}, 5), item_id(3, None, 5), item_id(7, None, 5), item_id("3", None, 5)
    (0, 0, 3, None, None)
    """
    if numbers is not None:
        return numbers.get(str(item))
    return item if isinstance(item, int) and item < num_items else None
