"""tiktoken vocabularies: the bytes of each token in the order of their ranks, which is also the order of merges.

There are two file formats: a JSON list of `{"rank": 0, "token_bytes": "AA==", "token_str": "..."}`, in which the first 256 tokens are the
bytes in order (Megatron's, from Mistral and Nemotron), and lines with a token in base64 and its rank (`.tiktoken`).

tiktoken merges the pair of neighbors whose concatenation has the lowest rank, the leftmost if several are equal, until no concatenation
of neighbors is a token; a word that is itself a token is looked up without merges. The tokenizers library's BPE differs in one point: it
ranks *pairs*, not tokens. So the file is converted to a BPE: its merges are all pairs whose concatenation is a token, in the order of
that token's rank, and words are looked up first (`ignore_merges`).

The conversion is exact. It gives different ranks to pairs with the same concatenation, which have one rank in tiktoken. This would matter
only if two such pairs could both occur, and for each token only one pair can. When two neighbors are about to merge, no merge has crossed
the boundaries of their bytes so far, and the merges inside do not depend on the text outside. So these bytes have been merged exactly as
they would be if they were a text by themselves. Merging that text passes through at most one state with two tokens: that is the one pair.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.data.bpe.byte_level_decoder import byte_characters
from petatron.data.tokenizers_library import MAX_TOKENIZER_BYTES
from petatron.data.vocabulary_kind import TIKTOKEN, vocabulary_error

MAX_TOKEN_BYTES = 1 << 10
"""Published vocabularies have tokens of up to 128 bytes; the limit bounds `_merges`, which tries every split of a token."""
_JSON_KEYS = {"rank", "token_bytes", "token_str"}


def read_token_ranks(path: Path) -> list[bytes]:
    """Returns the tokens of a vocabulary by rank; `DataError` if the file is not a tiktoken vocabulary."""
    with reading_untrusted(path, _ranks_error):
        content = read_limited_bytes(path, MAX_TOKENIZER_BYTES)
        tokens = _tokens_of_json(content) if content.lstrip()[:1] in (b"[", b"{") else _tokens_of_lines(content)
        if len(set(tokens)) != len(tokens):
            raise ValueError("two ranks have the same token")
        if any(len(token) not in range(1, MAX_TOKEN_BYTES + 1) for token in tokens):
            raise ValueError(f"a token has no bytes, or more than {MAX_TOKEN_BYTES}")
        if missing := [byte for byte in range(256) if bytes([byte]) not in set(tokens)]:
            raise ValueError(f"there is no token for the byte {missing[0]:#04x}")
    return tokens


def _tokens_of_json(content: bytes) -> list[bytes]:
    entries = json.loads(content)
    if not isinstance(entries, list):
        raise TypeError("it is an object, not the list of a vocabulary")
    tokens: list[bytes] = []
    for rank, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.keys() != _JSON_KEYS or entry["rank"] != rank:
            raise ValueError(f"entry {rank} is not rank {rank} with token_bytes and token_str")
        tokens.append(base64.b64decode(entry["token_bytes"], validate=True))
    if tokens[:256] != [bytes([byte]) for byte in range(256)]:
        raise ValueError("the first 256 tokens are not the bytes in order")
    return tokens


def _tokens_of_lines(content: bytes) -> list[bytes]:
    tokens: list[bytes] = []
    for line in content.split(b"\n"):
        if line:
            token, rank, *others = *line.split(), b"", b""
            if any(others) or not rank.isdigit():
                raise ValueError("a line is not a token and its rank")
            if int(rank) != len(tokens):
                raise ValueError(f"rank {int(rank)} follows rank {len(tokens) - 1}")
            tokens.append(base64.b64decode(token, validate=True))
    return tokens


def build_byte_level_bpe(tokens: Sequence[bytes], special_tokens: Sequence[str], pattern: str) -> FastTokenizer:
    """Returns the tokenizer whose first ids are special tokens, matched in any text, and whose other ids are tokens by rank.

    A token that contains the text of a special token never occurs, since texts are split at special tokens first. It keeps its id under a
    placeholder name, because its own name may be that of the special token, and a name can have only one id.
    """
    characters = byte_characters()
    names = ["".join(map(characters.__getitem__, token)) for token in tokens]
    specials = [token.encode() for token in special_tokens]
    first_bytes = {special[:1] for special in specials}
    hidden = {
        rank
        for rank, token in enumerate(tokens)
        if any(bytes([byte]) in first_bytes for byte in token) and any(special in token for special in specials)
    }
    first = len(special_tokens)
    vocabulary = {special: number for number, special in enumerate(special_tokens)}
    vocabulary |= {
        f"<unreachable {first + rank}>" if rank in hidden else name: first + rank for rank, name in enumerate(names)
    }
    reachable = {token: name for rank, (token, name) in enumerate(zip(tokens, names)) if rank not in hidden}
    model = models.BPE(vocab=vocabulary, merges=list(_merges(reachable)), ignore_merges=True)
    fast = FastTokenizer(model)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return fast


def _merges(names: dict[bytes, str]) -> Iterator[tuple[str, str]]:
    """Yields the pairs whose concatenation is a token, in the order of the tokens' ranks."""
    for token in names:
        for cut in range(1, len(token)):
            left, right = names.get(token[:cut]), names.get(token[cut:])
            if left is not None and right is not None:
                yield left, right


def _ranks_error(path: Path, why: str) -> DataError:
    fix = "Give --tokenizer-model the .json with rank, token_bytes and token_str of each token that Megatron reads, or a .tiktoken file of "
    return DataError(vocabulary_error(path, why, TIKTOKEN, f"{fix}lines `token rank`"))
