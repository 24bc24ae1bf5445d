"""`POST /v1/responses`: OpenAI's newer form of a chat. The server keeps no response, so each request has all items."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.serve.generation import Generation, Inbox
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.json_body import ignore_fields, nested_unknown_fields, read_request
from petatron.serve.http.request_fields import check_extra_fields
from petatron.serve.http.responses_answer import ResponseAnswer
from petatron.serve.http.responses_requests import RESPONSE_RULES, ResponsesRequest, chat_of, in_own_names
from petatron.serve.http.routes.chat import prepare_chat, unread_template_values
from petatron.serve.http.run_generations import complete
from petatron.serve.http.server_state import state_of

_WHOLE_ALONE = (
    *("use_beam_search", "echo", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    "return_prompt_text",
)
"""Fields of chats that have no place in a response object."""


async def post_response(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, ResponsesRequest, others=RESPONSE_RULES)
    chat, extra = chat_of(body)
    request.state.ignored_fields = check_extra_fields(extra, others=RESPONSE_RULES)
    ignore_fields(request, [*nested_unknown_fields(body), *nested_unknown_fields(chat)])
    if unusable := [name for name in _WHOLE_ALONE if (value := getattr(chat, name)) is not None and value is not False]:
        raise ApiError(400, f"{unusable[0]} is one of /v1/chat/completions alone.", param=unusable[0])
    state.check_model(body.model)
    try:
        prepared = await prepare_chat(chat, state)
    except ApiError as error:
        raise in_own_names(error, body) from None
    ignore_fields(request, unread_template_values(chat, state.model))
    answer = ResponseAnswer(
        body, chat, state.model, len(prepared.ids), prepared.splitter(), hidden_ids=prepared.params.hidden_ids
    )
    inbox: Inbox | None = Inbox() if body.stream else None
    generation = Generation(prepared.ids, prepared.params, inbox=inbox)
    if inbox is not None:
        return await answer.stream(state, generation, inbox).prepare(request)
    [completion] = await complete(request, state, [generation])
    return JSONResponse(answer.as_json(completion))
