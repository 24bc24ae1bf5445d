"""The served model and its tokenizer: `/v1/models`, `/tokenize`, `/detokenize`, `/tokenizer_info`."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.serve.http.image_parts import measure_images
from petatron.serve.http.json_body import ignore_fields, read_request
from petatron.serve.http.openai_requests import ChatPromptFields, DetokenizeRequest, OpenAIRequest, TokenizeRequest
from petatron.serve.http.request_to_engine import check_ids, encode_text
from petatron.serve.http.routes.chat import chat_prompt, unread_template_values
from petatron.serve.http.run_generations import large_answer
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.served_model_properties import ModelCard


async def get_models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [_card(model) for model in _models(state_of(request))]})


async def get_model(request: Request, model: str) -> JSONResponse:
    """One model; the list of them where no name follows the slash."""
    if not model:
        return await get_models(request)
    return JSONResponse(_card(state_of(request).check_model(model)))


def _models(state: ServerState) -> list[ModelCard]:
    """Returns the served model, and it with each adapter."""
    return [state.model, *(state.check_model(name) for name in state.options.adapters)]


def _card(model: ModelCard) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "petatron",
        "max_model_len": model.max_prompt_tokens,
        "step": model.step,
        "chat_format": "template" if model.has_chat_template else "plain",
        "sampling": model.sampling_defaults.given(),
    }


async def post_tokenize(request: Request) -> Response:
    body = await read_request(request, TokenizeRequest)
    model = state_of(request).check_model(body.model)
    if body.messages is not None:
        measured = await measure_images(body.messages, model, state_of(request).options.limits)
        prompt = await chat_prompt(body.messages, body, model, tools=body.tools or [])
        prefix = model.prefix_ids if body.add_special_tokens else model.chat_prefix_ids
        encoded = encode_text(prompt.text, model) if measured is None else measured.encode(prompt.around_images)
        ids = [*prefix, *await encoded]
        ignore_fields(request, unread_template_values(body, model))
    else:
        ids = await encode_text(body.prompt or "", model)
        ids = ids if body.add_special_tokens is False else [*model.prefix_ids, *ids]
        given = {name for name in body.model_fields_set if getattr(body, name) not in (None, False)}
        of_chats = [name for name in ChatPromptFields.model_fields if name not in OpenAIRequest.model_fields]
        ignore_fields(request, [name for name in of_chats if name in given])

    def answer() -> dict[str, Any]:
        texts = {"token_strs": [model.texts.text_of(token) for token in ids]} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": model.max_prompt_tokens, "tokens": ids, **texts}

    return await large_answer(answer)


async def post_detokenize(request: Request) -> Response:
    body = await read_request(request, DetokenizeRequest)
    model = state_of(request).check_model(body.model)
    check_ids(body.tokens, model, param="tokens")
    tokenizer = model.needed_tokenizer()
    return await large_answer(lambda: {"prompt": tokenizer.decode(body.tokens)})


async def get_tokenizer_info(request: Request) -> JSONResponse:
    """The settings that a client needs to use this server's tokenizer; no file or path of the server."""
    model = state_of(request).model
    tokenizer = model.needed_tokenizer()
    answer: dict[str, Any] = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": model.max_prompt_tokens,
        "eos_token_id": tokenizer.eod,
        "bos_token_id": model.bos_id if "bos_token" in model.special_tokens else None,
        "chat_template": model.chat_template.source if model.has_chat_template else None,
    }
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        answer[name] = model.special_tokens.get(name)
    if answer["eos_token"] is None and tokenizer.eod is not None:
        answer["eos_token"] = tokenizer.decode([tokenizer.eod])
    return JSONResponse(answer)
