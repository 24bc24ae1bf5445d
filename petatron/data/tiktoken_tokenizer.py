"""Megatron's TikTokenizer: special tokens first, then the tokens of a tiktoken vocabulary by rank, truncated to vocab_size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from petatron.base.errors import DataError
from petatron.config.schema.sections.tokenizer_options import (
    DEFAULT_NUM_SPECIAL_TOKENS,
    DEFAULT_SPECIAL_TOKENS,
    DEFAULT_TIKTOKEN_SIZE,
    special_token_problem,
)
from petatron.data.bpe.pre_tokenizer_patterns import TIKTOKENIZER_PATTERNS
from petatron.data.bpe.tiktoken_vocabulary import build_byte_level_bpe, read_token_ranks
from petatron.data.special_tokens import known_ids, tokens_by_spelling
from petatron.data.tokenizers_library import LibraryTokenizer, tokenizer_config


class TikTokenizer(LibraryTokenizer):
    """Special tokens have ids 0, 1, ..., and a token of rank r has the id r + the number of special tokens.

    The name of a special token in a text encodes to its id. `vocab_size` includes special tokens; the default is all tokens of the file, at
    most 131,072. The tokens with the highest ranks are cut off.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        pattern: str = "v2",
        num_special_tokens: int = DEFAULT_NUM_SPECIAL_TOKENS,
        special_tokens: Sequence[str] = DEFAULT_SPECIAL_TOKENS,
        vocab_size: int | None = None,
    ) -> None:
        names = special_token_names(special_tokens, num_special_tokens)
        tokens = read_token_ranks(Path(path))
        size = min(vocab_size or DEFAULT_TIKTOKEN_SIZE, num_special_tokens + len(tokens))
        if vocab_size is not None and size < vocab_size:
            raise DataError(
                f"--vocab-size {vocab_size} is more than the {num_special_tokens} special tokens and {len(tokens):,} tokens of {path}. "
                f"Use {size} or less, or leave it out."
            )
        if size < num_special_tokens + 256:
            raise DataError(
                f"--vocab-size {size} has no room for {num_special_tokens} special tokens and the 256 bytes of {path}. Use "
                f"{num_special_tokens + 256} or more, or fewer --tiktoken-num-special-tokens."
            )
        kept = tokens[: size - num_special_tokens]
        self._fast = build_byte_level_bpe(kept, names, TIKTOKENIZER_PATTERNS[pattern])
        self._table = _IdBytes([*(name.encode() for name in names), *kept])
        self.vocab_size = size
        self.eod = names.index("</s>")
        self.bod = names.index("<s>") if "<s>" in names else None
        roles = {role: names.index(token) for role, token in tokens_by_spelling(names).items()}
        self.special_ids = known_ids(roles | {"eos": self.eod})
        self.name = f"TikTokenizer({path}, {pattern}, {num_special_tokens} special tokens)"

    def files(self) -> dict[str, bytes]:
        """Returns a tokenizer.json (byte-level BPE) that gives the same ids, and a tokenizer_config.json that names special tokens."""
        named = {f"{role}_token": self._fast.id_to_token(number) for role, number in self.special_ids.items()}
        return {**tokenizer_config(named), "tokenizer.json": self._fast.to_str().encode()}


class _IdBytes(dict[int, bytes]):
    """The bytes of each id; empty for ids after the last token (vocabulary padding)."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        super().__init__(enumerate(contents))

    def __missing__(self, number: int) -> bytes:
        if number < 0:
            raise DataError(f"{number} is no token id. Ids count from 0.")
        return b""


def special_token_names(named: Sequence[str], count: int) -> list[str]:
    """Returns the names of all special tokens: the given names, then `<SPECIAL_i>` up to `count`.

    >>> special_token_names(DEFAULT_SPECIAL_TOKENS, 9)[5:]
    ['<cls>', '<sep>', '<SPECIAL_7>', '<SPECIAL_8>']
    """
    if (problem := special_token_problem(named, count)) is not None:
        rule, fix = problem
        raise DataError(f"Special tokens {' '.join(named)} {rule}. {fix}")
    return [*named, *(f"<SPECIAL_{number}>" for number in range(len(named), count))]
