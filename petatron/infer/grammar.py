"""Grammars for constrained decoding: checked, and compiled by llguidance over a tokenizer's vocabulary. Nothing here needs torch.

Some schemas end the process or raise in the library: a constant of -2^63 is a crash in llguidance 1.9.1, and integers of more than 64 bits
are no numbers to it. These are refused here, before it sees them; what else a grammar of a stranger may do is why a server first compiles
it in a process of its own (`serve/isolation`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.terminal_escape import printable_lines
from petatron.data.tokenizer import TokenVocabulary, vocabulary_json
from petatron.infer.sampling_params import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_SHOWN_CHARS = 500
ANY_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Between the parts of JSON, for requests that want it; bounded: a model that has lost its way would fill an answer with spaces."""
_COMPACT_JSON = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "json": "white space of JSON",
}
_ANY_JSON = {"type": "object"}
_REPLACEMENT = "\ufffd"
_LEAST_NUMBER, _NUMBER_BOUND = -(1 << 63) + 512, 1 << 64
"""Integers just above -2^63 are -2^63 in float64, where the library ends up with them."""


def check_constraint_library() -> None:
    """Raises `ConfigError` if llguidance is not installed."""
    try:
        library = importlib.util.find_spec("llguidance")
    except ValueError:  # it was unloaded on purpose
        library = None
    if library is None:
        rule = "needs the llguidance package, which is not installed"
        raise ConfigError([Problem("constrained decoding", "", rule, "Install it: pip install 'petatron[serve]'")])


def compile_grammar(constraint: Constraint, vocabulary: Callable[[], LLTokenizer]) -> LLMatcher:
    """Returns the matcher at the beginning of a text; `DataError` for a grammar that cannot be compiled."""
    check_constraint_library()
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(vocabulary(), _grammar(constraint), log_level=0)
        why = matcher.get_error() if matcher.is_error() else None
    except DataError:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        why, matcher = str(error), None
    if why is not None or matcher is None:
        shown = printable_lines((why or "it failed").strip()[:_MAX_SHOWN_CHARS])
        raise DataError(f"The {_NAMES[constraint.kind]} cannot be used as a constraint: {shown}")
    return matcher


def check_schema_numbers(schema: Any) -> None:
    """Raises `DataError` for numbers that the library cannot take, wherever they are in a schema.

    >>> check_schema_numbers({"const": -(2**63)})
    Traceback (most recent call last):
    petatron.base.errors.DataError: The JSON schema has the number -9223372036854775808: use numbers above -2^63 + 512 and below 2^64.
    """
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, int | float) and not _LEAST_NUMBER < value < _NUMBER_BOUND:
            shown = str(value) if abs(value) < 10**40 else "of more than 40 digits"
            raise DataError(f"The JSON schema has the number {shown}: use numbers above -2^63 + 512 and below 2^64.")


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.grammar)
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(constraint.grammar))
    whitespace = constraint.whitespace
    options = _COMPACT_JSON if whitespace is None else {"whitespace_pattern": whitespace}
    if constraint.kind == "json":
        return LLMatcher.grammar_from_json_schema(_ANY_JSON, defaults=options)
    try:
        schema = json.loads(constraint.grammar)
    except (ValueError, RecursionError) as error:
        raise DataError(f"The JSON schema is not JSON: {error}. Check it.") from error
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise DataError(f"The JSON schema is {type(schema).__name__}, and not an object. Check it.")
    check_schema_numbers(schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)


def _lark(grammar: str) -> str:
    """Returns a grammar in Lark's notation; llguidance reads GBNF, of which EBNF as SGLang takes it is a part."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # its parser of other notations raises what it meets
        why = printable_lines(str(error)[:_MAX_SHOWN_CHARS])
        raise DataError(f"The grammar cannot be used as a constraint: {why}") from error


class _TokenBytes:
    """A vocabulary as llguidance reads it, of a tokenizer without tokenizer.json.

    After the tokenizer's own come an end and all single bytes, which no mask includes: llguidance encodes texts that must follow, and
    expects that every text has tokens.
    """

    bos_token_id = None

    def __init__(self, tokenizer: TokenVocabulary) -> None:
        texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        self.eos_token_id = len(texts)
        # Part of a character, or no text at all: never allowed, since its bytes are unknown.
        special = {
            token for token, text in enumerate(texts) if not text or _REPLACEMENT in text or token == tokenizer.eod
        }
        self.special_token_ids = [*sorted(special), self.eos_token_id]
        self.tokens = [f"<{token}>".encode() if token in special else text.encode() for token, text in enumerate(texts)]
        self.tokens += [b"<end>", *(bytes([byte]) for byte in range(256))]
        hidden = set(self.special_token_ids)
        self._ids = {text: token for token, text in reversed(list(enumerate(self.tokens))) if token not in hidden}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Returns the ids of a text, the longest token first."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next(end for end in ends if text[start:end] in self._ids)
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def build_vocabulary(tokenizer: TokenVocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    content = vocabulary_json(tokenizer)
    try:
        if content is None:
            return LLTokenizer(TokenizerWrapper(_TokenBytes(tokenizer)))
        eod = {} if tokenizer.eod is None else {"eos_token": tokenizer.eod}
        return LLTokenizer(content.decode(), **eod)
    except ValueError as error:
        why = printable_lines(str(error)[:_MAX_SHOWN_CHARS])
        raise DataError(f"llguidance cannot use the tokenizer {tokenizer.name}: {why}") from error
