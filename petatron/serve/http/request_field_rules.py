"""The request fields of clients of OpenAI's API, vLLM, SGLang and llama.cpp, and what becomes of each.

A field that changes the answer is supported, or refused with the reason: never ignored. Fields of the bodies in `openai_requests.py` are
supported. `REFUSED` are not, unless their value is the one that changes nothing. `NO_EFFECT` have none on the answer, and are accepted.
Any other field is unknown: it is ignored, and named in the answer's header `IGNORED_HEADER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from petatron.serve.http.api_error import ApiError

IGNORED_HEADER = "x-petatron-ignored-fields"
_MAX_NAMED, _MAX_NAME_CHARS = 32, 64
_SAMPLER = "This server has no such sampler. Use temperature, top_k, top_p and min_p."
_TEXT_ALONE = "The model hears and speaks nothing: text and images are read, and text is written."
_IMAGES_AS_TRAINED = "Images are shown as the model was trained to see them."
_CODE = "The server runs no code of a request."
_STATELESS = "The server keeps nothing of a request."
_CACHE_HERE = "The key/value cache stays in this server."
_ROUTING = "The experts that tokens were routed to are not reported."
_BUDGET = "Use max_tokens for all that the model writes."


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What becomes of a field. reason: for people; neutral: values of a refused field that change nothing, and are accepted."""

    effect: Literal["refused", "none"]
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
    "ec_transfer_params": _refused(_CACHE_HERE, {}),
    "guided_decoding_backend": _refused("There is one: llguidance.", "auto", "guidance", "llguidance"),
    "kv_transfer_params": _refused(_CACHE_HERE, {}),
    "logprob_token_ids": _refused("Use logprobs, and read the ids among those that it reports."),
    "logits_processors": _refused(_CODE, []),
    "media_io_kwargs": _refused(_IMAGES_AS_TRAINED, {}),
    "mm_processor_kwargs": _refused(_IMAGES_AS_TRAINED, {}),
    "priority": _refused("Requests of a key are served in the order in which they arrive.", 0),
    "prompt_embeds": _refused("Prompts are texts or token ids."),
    "repetition_detection": _refused("Use repetition_penalty."),
    "routed_experts_prompt_start": _refused(_ROUTING, 0),
    "structural_tag": _refused("Use tools with strict true, or a grammar."),
    "thinking_token_budget": _refused(_BUDGET, -1),
    "vllm_xargs": _refused(_CODE, {}),
    "watermarking": _refused("The server marks no text.", False),
    # SGLang
    "custom_logit_processor": _refused(_CODE),
    "custom_params": _refused(_CODE, {}),
    "images_config": _refused(_IMAGES_AS_TRAINED, {}),
    "input_ids": _refused("Send token ids to /v1/completions, as prompt."),
    "lora_path": _refused("Name the adapter as the model (--lora NAME=FOLDER)."),
    "max_dynamic_patch": _refused(_IMAGES_AS_TRAINED),
    "min_dynamic_patch": _refused(_IMAGES_AS_TRAINED),
    "reasoning": _refused("Use reasoning_effort, or chat_template_kwargs."),
    "return_cached_tokens_details": _refused("The usage has prompt_tokens_details.cached_tokens.", False),
    "return_hidden_states": _refused("Use /v1/embeddings.", False),
    "return_meta_info": _refused("Use logprobs and return_token_ids. The usage has all counts.", False),
    "return_prompt_token_ids": _refused("Use return_token_ids.", False),
    "return_routed_experts": _refused(_ROUTING, False),
    "routed_experts_start_len": _refused(_ROUTING, 0),
    "sampling_params": _refused("Send its fields in the body itself.", {}),
    "session_params": _refused(_STATELESS, {}),
    "stop_regex": _refused("Use stop, or a regex for the whole answer.", []),
    "stream_reasoning": _refused(
        "Reasoning is streamed like the rest. Leave out stream, or include_reasoning false.", True
    ),
    "use_audio_in_video": _refused(_TEXT_ALONE, False),
    # llama.cpp
    "adaptive_target": _refused(_SAMPLER, -1),
    "dry_multiplier": _refused("Use repetition_penalty.", 0),
    "dynatemp_range": _refused(_SAMPLER, 0),
    "grammar_lazy": _refused("A grammar holds from the first token on. Use tools with strict true.", False),
    "grammar_triggers": _refused("A grammar holds from the first token on. Use tools with strict true.", []),
    "image_data": _refused("Send images in the messages of a chat.", []),
    "lora": _refused("Name the adapter as the model (--lora NAME=FOLDER).", []),
    "mirostat": _refused(_SAMPLER, 0),
    "n_cmpl": _refused("Use n, which is its name in OpenAI's API.", 1),
    "n_discard": _refused("A context that is full ends the answer.", 0),
    "n_indent": _refused("Use a regex for the answer.", 0),
    "n_keep": _refused("A context that is full ends the answer. Use truncate_prompt_tokens for a long prompt.", 0),
    "n_predict": _refused("Use max_tokens.", -1),
    "n_probs": _refused("Use logprobs.", 0),
    "parse_tool_calls": _refused("Send tool_choice none, or start the server with --tool-call-format none.", True),
    "post_sampling_probs": _refused("Log-probabilities are the model's own, before temperature and filters.", False),
    "reasoning_budget": _refused(_BUDGET, -1),
    "reasoning_format": _refused("Use separate_reasoning and include_reasoning.", "auto", "deepseek"),
    "repeat_penalty": _refused("Use repetition_penalty, which looks at the whole prompt and answer.", 1),
    "response_fields": _refused("Answers have OpenAI's fields.", []),
    "return_tokens": _refused("Use return_token_ids.", False),
    "samplers": _refused("The order is fixed: penalties, temperature, top_k, top_p, min_p.", []),
    "t_max_predict_ms": _refused("The server's own limit is --request-timeout.", 0, -1),
    "tfs_z": _refused(_SAMPLER, 1),
    "thinking_forced_open": _refused("The chat template says whether an answer begins as reasoning.", False),
    "top_n_sigma": _refused(_SAMPLER, -1),
    "typical_p": _refused(_SAMPLER, 1),
    "xtc_probability": _refused(_SAMPLER, 0),
    # Others' names for what there is
    "enable_thinking": _refused('Send it to the chat template: "chat_template_kwargs": {"enable_thinking": ...}.'),
    "max_new_tokens": _refused("Use max_tokens."),
}

NO_EFFECT: Mapping[str, FieldRule] = {
    name: FieldRule("none", reason)
    for reason, names in {
        "Kept for whoever sends it; nothing of a request is stored.": "user metadata store safety_identifier",
        "Changes how fast an answer comes at most, not the answer.": (
            "prediction service_tier prompt_cache_key prompt_cache_options prompt_cache_retention cache_prompt id_slot n_cache_reuse "
            "stream_interval"
        ),
        "Read only by another server's scheduler or log.": (
            "rid extra_key data_parallel_rank bootstrap_host bootstrap_port bootstrap_room session_id custom_labels ngram_corpus_id "
            "routed_dp_rank disagg_prefill_dp_rank"
        ),
        "Has an effect on routes of vLLM alone that render a prompt and generate nothing.": "return_token_offsets return_mm_kwargs",
        "Adds to an answer what no client of this server reads.": "timings_per_token return_progress verbose",
        "Has an effect on slow tokenizers of transformers alone, which are not used here.": "spaces_between_special_tokens",
        "Has an effect beside a sampler that is refused alone.": (
            "mirostat_tau mirostat_eta dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
            "xtc_threshold repeat_last_n min_keep adaptive_decay"
        ),
    }.items()
    for name in names.split()
}


_ACTIVATION = FieldRule("none", "A cosine has no activation.")
POOLING_RULES: Mapping[str, FieldRule] = {
    "messages": _refused("Send texts."),
    "padding": _refused("Texts are computed without padding.", "do_not_pad"),
    "embed_dtype": _refused("Vectors are of float32.", "float32"),
    "endianness": _refused("Bytes are little-endian.", "native", "little"),
    "task": _refused("The server embeds, and has no other head.", "embed", "score"),
    **dict.fromkeys(("instruct", "instruction"), _refused("Write it into the query.")),
    **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc"), _refused("Use truncate_prompt_tokens.")),
    **dict.fromkeys(("softmax", "activation", "use_activation"), _ACTIVATION),
}
"""Fields of embeddings, rerank and score alone."""


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
