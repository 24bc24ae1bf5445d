"""The id that documents begin with where `--append-bod` asks for it; most tokenizers have none, and end documents instead."""

from __future__ import annotations

import json

from petatron.data.fill_in_middle import token_id
from petatron.data.sentencepiece_tokenizer import SentencePieceTokenizer
from petatron.data.tokenizer import Tokenizer

_NAMES = ("bos_token", "cls_token")


def begin_of_document(tokenizer: Tokenizer) -> int | None:
    """Returns the id of the token that the tokenizer's files name as the beginning of a text; None if they name none.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> begin_of_document(ByteTokenizer())
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        return tokenizer.bos
    config = json.loads(tokenizer.files().get("tokenizer_config.json", b"{}"))
    values = (config.get(name) for name in _NAMES) if isinstance(config, dict) else ()
    names = (value.get("content") if isinstance(value, dict) else value for value in values)
    ids = (token_id(tokenizer, name) for name in names if isinstance(name, str))
    return next((number for number in ids if number is not None), None)
