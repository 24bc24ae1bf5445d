"""The fingerprint of a tokenizer: equal wherever its files are and whatever form they have, another when any text would have other ids.

It is a hash of three parts, each with a hash of its own so that a difference can be named: the vocabulary (which id a token has), the
rules (how a text is normalized and divided, and which pieces merge) and the special tokens that are matched in texts first.

Files of several kinds open as a tokenizer of the tokenizers library, so that a vocab.txt, a vocab.json with merges.txt, a tiktoken
vocabulary and the tokenizer.json made of them have equal fingerprints. What decides nothing about ids is left out: decoder, post-processor,
truncation, padding, whether a special token is shown. The order of merges that make the same piece does not count, since only one of these
pairs occurs. An id that is only added to texts by those who ask (the end of a document) is no part of the fingerprint.

Rules that another library executes (SentencePiece's unigram models, words divided in Python) cannot be compared with those of a
tokenizer.json: `rules` begins with the name of the library, and rules of two libraries count as equal if the vocabularies are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any, Self

from tokenizers import Tokenizer as FastTokenizer

_LIBRARY = "tokenizers"
_NO_EFFECT = ("trim_offsets",)
_MATCHING = ("id", "content", "single_word", "lstrip", "rstrip", "normalized")
"""What decides where an added token is in a text."""
_HEX_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFingerprint:
    """Hashes of what maps text to ids."""

    vocabulary: str
    rules: str
    special_tokens: str

    def __str__(self) -> str:
        """Returns one hash of all parts."""
        return hash_of(asdict(self))

    def record(self) -> dict[str, str]:
        """Returns the parts, for JSON."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Self:
        """Returns the fingerprint of stored parts; raises for others."""
        parts = {part.name: record[part.name] for part in fields(cls)}
        if not all(isinstance(value, str) for value in parts.values()):
            raise TypeError("a part of the fingerprint is no text")
        return cls(**parts)

    def has_rules_of(self, other: TokenizerFingerprint) -> bool:
        """Whether both divide texts alike, as far as rules can be compared."""
        ours, theirs = self.rules.partition(":")[0], other.rules.partition(":")[0]
        return ours != theirs or self.rules == other.rules


def fingerprint_of(
    *, vocabulary: Any, rules: Any, special_tokens: Any, library: str = _LIBRARY
) -> TokenizerFingerprint:
    """Returns the fingerprint of values that JSON can have."""
    return TokenizerFingerprint(
        vocabulary=hash_of(vocabulary), rules=f"{library}:{hash_of(rules)}", special_tokens=hash_of(special_tokens)
    )


def library_fingerprint(
    fast: FastTokenizer, *, extra_rules: Sequence[str] = (), library: str = _LIBRARY
) -> TokenizerFingerprint:
    """Returns the fingerprint of a tokenizer of the tokenizers library; `extra_rules` are those of code around it."""
    content = json.loads(fast.to_str())
    model = {name: value for name, value in content["model"].items() if name not in ("vocab", "merges")}
    rules = {
        "normalizer": _steps(content["normalizer"], "normalizers"),
        "pre_tokenizer": _steps(content["pre_tokenizer"], "pretokenizers"),
        "model": _without_defaults(model),
        "merges": _merged_pieces(content["model"].get("merges", ())),
        "scores": _scores(content["model"]["vocab"]),
        "extra": list(extra_rules),
    }
    added = [[token.get(name) for name in _MATCHING] for token in content["added_tokens"]]
    return fingerprint_of(
        vocabulary=sorted(fast.get_vocab(with_added_tokens=False).items()),
        rules=rules,
        special_tokens=sorted(added, key=lambda token: token[0]),
        library=library,
    )


def hash_of(value: Any) -> str:
    """Returns a hash of a value that JSON can have.

    >>> hash_of({"a": 1, "b": [2]}) == hash_of({"b": (2,), "a": 1})
    True
    """
    content = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(content.encode(), digest_size=_HEX_DIGITS // 2).hexdigest()


def _steps(step: Mapping[str, Any] | None, list_name: str) -> list[dict[str, Any]]:
    """Returns steps in their order, however sequences of them are nested."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for part in step[list_name] for inner in _steps(part, list_name)]
    return [{name: value for name, value in step.items() if name not in _NO_EFFECT}]


def _without_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are set: files of earlier versions lack some, and an empty prefix is none."""
    return {name: value for name, value in model.items() if value not in (None, "", False, 0.0)}


def _merged_pieces(merges: Sequence[Any]) -> list[list[str]]:
    """Returns merges in their order; those that make the same piece, one after the other, in the order of the alphabet."""
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in merges]
    groups = groupby(pairs, key="".join)
    return [["\0".join(pair) for pair in sorted(group)] for _, group in groups]


def _scores(vocabulary: Any) -> list[float]:
    """Returns the scores of a unigram vocabulary by id; none where it maps tokens to ids."""
    return [] if isinstance(vocabulary, Mapping) else [score for _, score in vocabulary]
