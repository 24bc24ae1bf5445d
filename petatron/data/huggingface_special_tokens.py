"""The special tokens that the files of a Hugging Face tokenizer name.

A role comes from `tokenizer_config.json`, else from `special_tokens_map.json`, else from `tokenizer.json`: the tokens that its
post-processor puts around a text, the unknown token of its model, a special token spelled like the role. A role that one of the first two
sets to null is absent, whatever the vocabulary has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.base.untrusted_files import read_limited_json, reading_untrusted
from petatron.data.special_tokens import ROLES, known_ids, tokens_by_spelling
from petatron.data.tokenizers_library import MAX_TOKENIZER_BYTES

_NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def named_tokens(folder: Path) -> dict[str, str | None]:
    """Returns the special tokens that a folder's settings name, by role; None where they say that there is none."""
    tokens: dict[str, str | None] = {}
    for file in (folder / name for name in _NAMING_FILES):
        if not file.exists():
            continue
        with reading_untrusted(file, _naming_file_error):
            settings = read_limited_json(file, MAX_TOKENIZER_BYTES)
            if not isinstance(settings, dict):
                raise TypeError("it is no object")
            for role in ROLES:
                if role not in tokens and f"{role}_token" in settings:
                    tokens[role] = _token_text(f"{role}_token", settings[f"{role}_token"])
    return tokens


def library_special_ids(fast: FastTokenizer, named: Mapping[str, str | None], eod: int | None) -> dict[str, int]:
    """Returns the special ids of a tokenizer.json, whose end of document is its eos."""
    spelled = tokens_by_spelling({token.content for token in fast.get_added_tokens_decoder().values() if token.special})
    tokens = {**spelled, **_tokens_by_place(fast), **named}
    ids = {role: fast.token_to_id(token) for role, token in tokens.items() if token is not None}
    return known_ids(ids | {"eos": eod})


def _tokens_by_place(fast: FastTokenizer) -> dict[str, str]:
    """Returns the tokens around a text of BERT and RoBERTa, and that of what the model cannot encode."""
    tokens: dict[str, str] = {}
    outer: Any = {} if fast.post_processor is None else json.loads(fast.post_processor.__getstate__())
    for processor in (outer, *outer.get("processors", ())):
        if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
            tokens |= {role: processor[role][0] for role in ("cls", "sep")}
    unknown = getattr(fast.model, "unk_token", None)
    return tokens if unknown is None else {**tokens, "unk": unknown}


def _token_text(name: str, token: Any) -> str | None:
    """Returns the text of a token, which is a string or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{name} is neither a text nor an object with its content")
    (text or "").encode()  # half a surrogate is no text, and cannot be looked up
    return text


def _naming_file_error(path: Path, why: str) -> DataError:
    return DataError(f"{path} is not valid JSON: it {why}. Copy it again, or remove it.")
