"""Compares the vocabularies of two tokenizers, for the error about a model that would be trained with another vocabulary."""

from __future__ import annotations

from petatron.base.terminal_escape import printable
from petatron.data.tokenizer import Tokenizer, vocabulary_json
from petatron.data.tokenizers_library import load_fast


def vocabulary_difference(given: Tokenizer, held: Tokenizer) -> str | None:
    """Returns how the ids of two tokenizers differ in meaning, as a predicate of the first; None if they mean the same.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> vocabulary_difference(ByteTokenizer(), ByteTokenizer()) is None
    True
    """
    first, second = vocabulary_json(given), vocabulary_json(held)
    if first == second and first is not None:
        return None
    counts = f"{given.vocab_size:,} ids, where the model has learned {held.vocab_size:,}"
    if first is None or second is None:
        return f"has {counts}"
    ours, theirs = (load_fast(content).get_vocab(with_added_tokens=True) for content in (first, second))
    if ours == theirs:
        return None
    tokens, learned = ({number: token for token, number in ids.items()} for ids in (ours, theirs))
    number = min(number for number in tokens.keys() | learned.keys() if tokens.get(number) != learned.get(number))
    here, there = (_token_text(names.get(number)) for names in (tokens, learned))
    return f"has {counts}; id {number} is {here} here and {there} there"


def _token_text(token: str | None) -> str:
    return "nothing" if token is None else f"'{printable(token, max_chars=20)}'"
