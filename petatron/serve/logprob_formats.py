"""Formats log-probabilities for each API: completions, chat, and vLLM's prompt log-probabilities.

`lm_eval` calls an answer greedy if the token's log-probability *equals* the largest of `top_logprobs`: both are the same float here, taken
from the alternatives where the token is among them. `top_logprobs` is an object with texts as keys, and two ids may have one text: the
second gets its id as key, so that no alternative, and never the most likely one, is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from petatron.infer.engine_outputs import TokenLogprob
from petatron.serve.token_texts import TokenTexts

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def finite(logprob: float) -> float:
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB


def own_logprob(entry: TokenLogprob) -> float:
    return finite(next((value for token, value in entry.top if token == entry.token), entry.logprob))


def _name(token: int, texts: TokenTexts, as_ids: bool) -> str:
    """Names a token by its text or, as_ids, by its id: see vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token}" if as_ids else texts.text_of(token)


def top_by_text(entry: TokenLogprob, texts: TokenTexts, *, as_ids: bool = False) -> dict[str, float]:
    """Returns the token itself and its alternatives by text, the most likely first."""
    logprobs = {_name(entry.token, texts, as_ids): own_logprob(entry)}
    for token, value in entry.top:
        if token != entry.token:
            text = _name(token, texts, as_ids)
            logprobs[f"token_id:{token}" if text in logprobs else text] = finite(value)
    return dict(sorted(logprobs.items(), key=lambda item: -item[1]))


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprob | None], texts: TokenTexts, *, as_ids: bool = False
) -> dict[str, Any]:
    """Returns `logprobs` of /v1/completions; an entry is None for the first token of a prompt."""
    return {
        "tokens": [_name(token, texts, as_ids) for token in ids],
        "token_logprobs": [None if entry is None else own_logprob(entry) for entry in entries],
        "top_logprobs": [None if entry is None else top_by_text(entry, texts, as_ids=as_ids) for entry in entries],
        "text_offset": texts.offsets(ids),
    }


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts, *, as_ids: bool = False) -> dict[str, Any]:
    """Returns `logprobs` of /v1/chat/completions."""

    def named(token: int, value: float) -> dict[str, Any]:
        return {"token": _name(token, texts, as_ids), "logprob": finite(value), "bytes": list(texts.bytes_of(token))}

    return {
        "content": [
            {
                **named(entry.token, own_logprob(entry)),
                "top_logprobs": [named(*alternative) for alternative in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Returns `prompt_logprobs` as vLLM does: an object by token id for each prompt token, None for the first."""
    listed: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        values = {entry.token: own_logprob(entry), **{token: finite(value) for token, value in entry.top}}
        listed.append(
            {
                str(token): {"logprob": value, "rank": ranks.get(token), "decoded_token": texts.text_of(token)}
                for token, value in values.items()
            }
        )
    return listed


class AlignedTokens:
    """Splits the text of an answer into its tokens; streamed text that may become a stop text arrives late.

    hidden_ids: of tokens that are no text.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> tokens = AlignedTokens(TokenTexts(ByteTokenizer()), ())
    >>> h, i, end = (TokenLogprob(token, -1.0) for token in (104, 105, 256))
    >>> [piece for piece, _ in tokens.take("", [h])], [piece for piece, _ in tokens.take("hi", [i, end])]
    ([], ['h', 'i'])
    >>> tokens.rest() == ("", [end])
    True
    """

    def __init__(self, texts: TokenTexts, hidden_ids: Collection[int]) -> None:
        self._texts, self._hidden_ids = texts, frozenset(hidden_ids)
        self._waiting: deque[TokenLogprob] = deque()
        self._unread, self._num_chars = "", 0

    def take(self, text: str, entries: Sequence[TokenLogprob]) -> Iterator[tuple[str, TokenLogprob]]:
        """Adds new text and tokens, and yields each token whose text is complete, with the text."""
        self._unread += text
        self._waiting.extend(entries)
        while self._waiting:
            token = self._waiting[0].token
            place = self._num_chars if token in self._hidden_ids else self._texts.place(token, self._num_chars)[1]
            size = place - self._num_chars
            if size > len(self._unread):
                return
            piece, self._unread, self._num_chars = self._unread[:size], self._unread[size:], place
            yield piece, self._waiting.popleft()

    def rest(self) -> tuple[str, list[TokenLogprob]]:
        """Returns the rest of the answer; its tokens without text belong to a stop text, which is cut off."""
        return self._unread, list(self._waiting)
