"""Every field that clients of OpenAI's API, vLLM, SGLang and llama.cpp send to completions and chats, and what becomes of it.

A field that changes the answer is supported, or refused with the reason: never ignored. Fields of the bodies in `openai_requests.py` are
supported. `REFUSED` are not, unless their value is the one that changes nothing. `NO_EFFECT` have none on the answer, and are accepted.
Any other field is unknown: it is ignored, and named in the answer's header `IGNORED_HEADER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel

from petatron.serve.http.api_error import ApiError

IGNORED_HEADER = "x-petatron-ignored-fields"
_MAX_NAMED, _MAX_NAME_CHARS = 32, 64
_SAMPLER = "This server has no such sampler. Use temperature, top_k, top_p and min_p."
_TEXT_ALONE = "The model reads and writes text alone."
_CODE = "The server runs no code of a request."
_STATELESS = "The server keeps nothing of a request."
_HERE = "Read only by another server's scheduler or log."


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What becomes of a field. reason: for people; neutral: values of a refused field that change nothing, and are accepted."""

    effect: Literal["supported", "refused", "none"]
    reason: str = ""
    neutral: tuple[Any, ...] = ()


def _refused(reason: str, *neutral: Any) -> FieldRule:
    return FieldRule("refused", reason, neutral)


REFUSED: Mapping[str, FieldRule] = {
    # OpenAI
    "audio": _refused(_TEXT_ALONE),
    "modalities": _refused(_TEXT_ALONE, ["text"]),
    "moderation": _refused("The server judges no content."),
    "verbosity": _refused("The model has no such setting. Ask for it in a message.", "medium"),
    "web_search_options": _refused("The server searches no web. Offer a tool that does."),
    # vLLM
    "chat_template": _refused(
        "A template is a program, and the server runs none of a request: start it with --chat-template FILE."
    ),
    "cache_salt": _refused(
        "Prompts of all clients share one prefix cache here: start the server with --no-prefix-caching."
    ),
    "guided_decoding_backend": _refused("There is one: llguidance.", "auto", "guidance", "llguidance"),
    "kv_transfer_params": _refused("The key/value cache stays in this server.", {}),
    "logits_processors": _refused(_CODE, []),
    "media_io_kwargs": _refused(_TEXT_ALONE, {}),
    "mm_processor_kwargs": _refused(_TEXT_ALONE, {}),
    "priority": _refused("Requests of a key are served in the order in which they arrive.", 0),
    "prompt_embeds": _refused("Prompts are texts or token ids."),
    "repetition_detection": _refused("Use repetition_penalty."),
    "structural_tag": _refused("Use tools with strict true, or a grammar."),
    "thinking_token_budget": _refused("Use max_tokens for all that the model writes."),
    "vllm_xargs": _refused(_CODE, {}),
    # SGLang
    "custom_logit_processor": _refused(_CODE),
    "custom_params": _refused(_CODE, {}),
    "lora_path": _refused("The server serves one model, without adapters."),
    "return_hidden_states": _refused("Use /v1/embeddings.", False),
    "session_params": _refused(_STATELESS, {}),
    "stop_regex": _refused("Use stop, or a regex for the whole answer.", []),
    "stream_reasoning": _refused(
        "Reasoning is streamed like the rest. Leave out stream, or include_reasoning false.", True
    ),
    # llama.cpp
    "dry_multiplier": _refused("Use repetition_penalty.", 0),
    "dynatemp_range": _refused(_SAMPLER, 0),
    "grammar_lazy": _refused("A grammar holds from the first token on. Use tools with strict true.", False),
    "grammar_triggers": _refused("A grammar holds from the first token on. Use tools with strict true.", []),
    "lora": _refused("The server serves one model, without adapters.", []),
    "mirostat": _refused(_SAMPLER, 0),
    "n_discard": _refused("A context that is full ends the answer.", 0),
    "n_indent": _refused("Use a regex for the answer.", 0),
    "n_keep": _refused("A context that is full ends the answer. Use truncate_prompt_tokens for a long prompt.", 0),
    "n_predict": _refused("Use max_tokens.", -1),
    "n_probs": _refused("Use logprobs.", 0),
    "post_sampling_probs": _refused("Log-probabilities are the model's own, before temperature and filters.", False),
    "reasoning_format": _refused("Use separate_reasoning and include_reasoning.", "auto", "deepseek"),
    "repeat_penalty": _refused("Use repetition_penalty, which looks at the whole prompt and answer.", 1),
    "samplers": _refused("The order is fixed: penalties, temperature, top_k, top_p, min_p.", []),
    "t_max_predict_ms": _refused("The server's own limit is --request-timeout.", 0, -1),
    "tfs_z": _refused(_SAMPLER, 1),
    "top_n_sigma": _refused(_SAMPLER, -1),
    "typical_p": _refused(_SAMPLER, 1),
    "xtc_probability": _refused(_SAMPLER, 0),
    # Others' names for what there is
    "enable_thinking": _refused('Send it to the chat template: "chat_template_kwargs": {"enable_thinking": ...}.'),
    "max_new_tokens": _refused("Use max_tokens."),
}

NO_EFFECT: Mapping[str, FieldRule] = {
    name: FieldRule("none", reason)
    for reason, names in (
        (
            "Kept for whoever sends it; nothing of a request is stored.",
            ("user", "metadata", "store", "safety_identifier"),
        ),
        (
            "Changes how fast an answer comes at most, not the answer.",
            (
                *("prediction", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
                *("cache_prompt", "id_slot"),
            ),
        ),
        (_HERE, ("rid", "extra_key", "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room")),
        ("Adds to an answer what no client of this server reads.", ("timings_per_token", "return_progress", "verbose")),
        (
            "Has an effect on slow tokenizers of transformers alone, which are not used here.",
            ("spaces_between_special_tokens",),
        ),
        (
            "Has an effect beside a sampler that is refused alone.",
            (
                *(
                    "mirostat_tau",
                    "mirostat_eta",
                    "dynatemp_exponent",
                    "dry_base",
                    "dry_allowed_length",
                    "dry_penalty_last_n",
                ),
                *("dry_sequence_breakers", "xtc_threshold", "repeat_last_n", "min_keep"),
            ),
        ),
    )
    for name in names
}


def field_rules(body: type[BaseModel]) -> dict[str, FieldRule]:
    """Returns the rule of every field that a route knows, those of its body included."""
    supported = {field.alias or name: FieldRule("supported") for name, field in body.model_fields.items()}
    return {**NO_EFFECT, **REFUSED, **supported}


def check_extra_fields(extra: Mapping[str, Any], *, others: Mapping[str, FieldRule] | None = None) -> list[str]:
    """Returns the unknown ones of the fields that a body does not have; raises `ApiError` with all that are refused.

    others: rules of one route, before those of all.
    """
    rules = {**NO_EFFECT, **REFUSED, **(others or {})}
    refused = [
        name
        for name, value in extra.items()
        if value is not None and name in rules and rules[name].effect == "refused" and value not in rules[name].neutral
    ]
    if refused:
        text = " ".join(f"{name} is not supported: {rules[name].reason}" for name in refused)
        raise ApiError(400, text, param=refused[0], code="unsupported_field")
    return [name for name in extra if name not in rules]


def header_value(names: list[str]) -> str:
    """Returns names as the value of a header, whatever characters they have.

    >>> header_value(["tempratur", "a\\nb"])
    'tempratur, a%0Ab'
    """
    return ", ".join(quote(name[:_MAX_NAME_CHARS], safe="") for name in names[:_MAX_NAMED])
