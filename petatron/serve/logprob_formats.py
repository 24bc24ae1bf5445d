"""Log-probabilities in the forms that clients read.

`lm_eval` calls an answer greedy if the token's log-probability *equals* the largest of `top_logprobs`: both are the same float here, taken
from the alternatives where the token is among them. `top_logprobs` is an object with texts as keys, and two ids may have one text: the
second gets its id as key, so that no alternative, and never the most likely one, is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petatron.infer.completion import TokenLogprob
from petatron.serve.token_texts import TokenTexts

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def finite(logprob: float) -> float:
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB


def own_logprob(entry: TokenLogprob) -> float:
    return finite(next((value for token, value in entry.top if token == entry.token), entry.logprob))


def _name(token: int, texts: TokenTexts, as_ids: bool) -> str:
    """as_ids: as vLLM's `return_tokens_as_token_ids` writes tokens, which texts cannot always name."""
    return f"token_id:{token}" if as_ids else texts.text_of(token)


def top_by_text(entry: TokenLogprob, texts: TokenTexts, *, as_ids: bool = False) -> dict[str, float]:
    """Returns the token itself and its alternatives by text, the most likely first."""
    found = {_name(entry.token, texts, as_ids): own_logprob(entry)}
    for token, value in entry.top:
        if token != entry.token:
            text = _name(token, texts, as_ids)
            found[f"token_id:{token}" if text in found else text] = finite(value)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def completion_logprobs(
    ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    texts: TokenTexts,
    *,
    offset: int = 0,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Returns `logprobs` of /v1/completions; an entry is None for the first token of a prompt. offset: characters before the first."""
    return {
        "tokens": [_name(token, texts, as_ids) for token in ids],
        "token_logprobs": [None if entry is None else own_logprob(entry) for entry in entries],
        "top_logprobs": [None if entry is None else top_by_text(entry, texts, as_ids=as_ids) for entry in entries],
        "text_offset": [offset + start for start in texts.offsets(ids)],
    }


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts, *, as_ids: bool = False) -> dict[str, Any]:
    """Returns `logprobs` of /v1/chat/completions."""

    def named(token: int, value: float) -> dict[str, Any]:
        return {"token": _name(token, texts, as_ids), "logprob": finite(value), "bytes": list(texts.bytes_of(token))}

    return {
        "content": [
            {**named(entry.token, own_logprob(entry)), "top_logprobs": [named(*one) for one in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Returns `prompt_logprobs` as vLLM does: an object by token id for each prompt token, None for the first."""
    found: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        values = {entry.token: own_logprob(entry), **{token: finite(value) for token, value in entry.top}}
        found.append(
            {
                str(token): {"logprob": value, "rank": ranks.get(token), "decoded_token": texts.text_of(token)}
                for token, value in values.items()
            }
        )
    return found
