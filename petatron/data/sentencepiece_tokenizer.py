"""Tokenizers of SentencePiece `.model` files: Megatron's SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer.

A text has the ids that SentencePiece gives it; no BOS/EOS is added, and the names of control pieces in a text are ordinary text. Two
legacy modes of Megatron match special tokens in a text before the rest is divided into pieces: `legacy`, with a list of tokens, and
`vocab_extra_ids`, with sentinels for T5. A special token that is not a piece of the model gets an id after those of the pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from petatron.base.errors import DataError
from petatron.base.model_companion_files import find_companion_files, read_companion_file
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.encoded_text import EncodedText, Span
from petatron.data.sentencepiece_model.exact_bpe import vocabulary_as_json
from petatron.data.sentencepiece_model.model_file import WORD_BOUNDARY, PieceModel, read_piece_model
from petatron.data.sentencepiece_model.piece_decoder import PieceDecoder
from petatron.data.sentencepiece_model.piece_encoder import ExactBpeEncoder, build_piece_encoder
from petatron.data.special_tokens import find_sentinels, known_ids, sentinel_name, tokens_by_spelling
from petatron.data.stored_tokenizer_options import OPTIONS_KEY, read_stored_options
from petatron.data.tokenizer_fingerprint import TokenizerFingerprint, fingerprint_of, hash_of, library_fingerprint
from petatron.data.tokenizers_library import tokenizer_config

MODEL_FILE = "tokenizer.model"
_Decoded = TypeVar("_Decoded", str, bytes)
_COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceOptions:
    """The non-default options of a tokenizer.

    special_tokens: matched in texts before encoding (Megatron's --tokenizer-sentencepiece-legacy). vocab_extra_ids: None, or how many
    sentinels `<extra_id_i>` follow Megatron's `<CLS>`, `<SEP>`, `<EOD>` and `<MASK>`. keep_extra_spaces: consecutive spaces, which the
    model collapses, are preserved.
    """

    special_tokens: tuple[str, ...] = ()
    vocab_extra_ids: int | None = None
    keep_extra_spaces: bool = False


@dataclass(frozen=True, slots=True)
class _AddedTokens:
    """Ids of special tokens by their text. `drops_boundary`: encoding drops a lone space mark after a special token."""

    ids: Mapping[str, int]
    drops_boundary: bool
    eod: int | None


class SentencePieceTokenizer:
    """A `.model` file, or a model's folder with a tokenizer.model."""

    def __init__(self, path: str | Path, options: SentencePieceOptions | None = None) -> None:
        given = Path(path)
        file = given / MODEL_FILE if given.is_dir() else given
        self._model = read_piece_model(file)
        self._options = options = options or SentencePieceOptions()
        self._encoder = build_piece_encoder(self._model, keep_extra_spaces=options.keep_extra_spaces)
        self._decoder = PieceDecoder(self._model)
        self._tokens = _added_tokens(self._model, options)
        self._token_texts = {number: text for text, number in self._tokens.ids.items()}
        # Where several tokens match at the same position, the first in the list wins.
        self._pattern = re.compile("|".join(map(re.escape, self._tokens.ids)))
        self._boundary = next((id for id, piece in enumerate(self._model.pieces) if piece.text == WORD_BOUNDARY), None)
        self.vocab_size = max(len(self._model.pieces), *(number + 1 for number in self._token_texts), 0)
        self.bod = self._model.bos
        self.eod = self._model.eos if self._tokens.eod is None else self._tokens.eod
        names = {**_named_pieces(self._model), **self._tokens.ids}
        self.special_ids = _special_ids(self._model, names)
        self.sentinel_ids = find_sentinels(names.get)
        self.name = str(given)
        beside = find_companion_files(given, DataError, names=_COMPANION_FILES) if given.is_dir() else {}
        self._json: bytes | None = None
        self._companions = {name: read_companion_file(path, DataError) for name, path in beside.items()}

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with reading_untrusted(Path(self.name), _encode_error):
            if self._tokens.ids:
                return [self._encode_around_tokens(text) for text in texts]
            return self._encoder.encode_batch(texts)

    def _encode_around_tokens(self, text: str) -> list[int]:
        parts = self._parts(text)
        encoded = self._encoder.encode_batch([text[start:stop] for start, stop, _, _ in parts])
        ids: list[int] = []
        for (_, _, token, drops), part in zip(parts, encoded, strict=True):
            ids += part[1:] if drops and part[:1] == [self._boundary] else part
            ids += [] if token is None else [self._tokens.ids[token]]
        return ids

    def _parts(self, text: str) -> list[tuple[int, int, str | None, bool]]:
        """Returns the parts between special tokens: start, end, the token that follows, whether a lone space mark is dropped."""
        matches = list(self._pattern.finditer(text))
        starts, ends = [0, *(match.end() for match in matches)], [*(match.start() for match in matches), len(text)]
        tokens = [*(match.group() for match in matches), None]
        # Megatron keeps the space mark of the text after the last special token.
        drops = [self._tokens.drops_boundary and 0 < place < len(matches) for place in range(len(tokens))]
        return list(zip(starts, ends, tokens, drops, strict=True))

    def encode_with_offsets(self, text: str) -> EncodedText:
        with reading_untrusted(Path(self.name), _encode_error):
            if not self._tokens.ids:
                return self._encoder.encode_with_offsets(text)
            ids: list[int] = []
            spans: list[Span] = []
            for start, stop, token, drops in self._parts(text):
                part = self._encoder.encode_with_offsets(text[start:stop])
                kept = slice(1 if drops and part.ids[:1] == [self._boundary] else 0, None)
                ids += part.ids[kept]
                spans += [(start + first, start + last) for first, last in part.spans[kept]]
                if token is not None:
                    ids.append(self._tokens.ids[token])
                    spans.append((stop, stop + len(token)))
            return EncodedText(ids, spans)

    @property
    def fingerprint(self) -> TokenizerFingerprint:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> TokenizerFingerprint:
        tokens, options = self._tokens, self._options
        rules = [f"drops_boundary={tokens.drops_boundary}"] if tokens.ids else []
        special = [] if not tokens.ids else list(tokens.ids.items())  # in this order they are matched
        if isinstance(self._encoder, ExactBpeEncoder):
            of_pieces = library_fingerprint(self._encoder.fast, extra_rules=rules)
        else:
            of_pieces = _pieces_fingerprint(self._model, [*rules, f"keep_extra_spaces={options.keep_extra_spaces}"])
        return of_pieces if not special else replace(of_pieces, special_tokens=hash_of(special))

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes the spans between special tokens; special tokens decode to their names."""
        return "".join(self._decode_parts(ids, self._decoder.decode, str))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._decode_parts(ids, self._decoder.decode_bytes, str.encode))

    def _decode_parts(
        self, ids: Sequence[int], decode: Callable[[Sequence[int]], _Decoded], of_token: Callable[[str], _Decoded]
    ) -> Iterator[_Decoded]:
        span: list[int] = []
        for number in ids:
            if (token := self._token_texts.get(int(number))) is None:
                span.append(int(number))
                continue
            yield decode(span)
            yield of_token(token)
            span = []
        yield decode(span)

    def files(self) -> dict[str, bytes]:
        """Returns the files to save: tokenizer.model with an equivalent tokenizer.json if there is one, else with the options."""
        pieces = self._model.pieces
        ids = _special_ids(self._model, _named_pieces(self._model))
        named: dict[str, str | None] = {f"{role}_token": pieces[number].text for role, number in ids.items()}
        held = {MODEL_FILE: self._model.content}
        if self.has_exact_json:
            return {**held, "tokenizer.json": self.vocabulary_json(), **tokenizer_config(named), **self._companions}
        config = named | {OPTIONS_KEY: asdict(self._options)}
        return {**held, "tokenizer_config.json": json.dumps(config, indent=1).encode(), **self._companions}

    @property
    def has_exact_json(self) -> bool:
        """Whether a tokenizer.json gives the same ids for every text that does not contain the name of a special token."""
        return isinstance(self._encoder, ExactBpeEncoder) and not self._tokens.ids

    def vocabulary_json(self) -> bytes:
        """Returns a tokenizer.json that maps ids to tokens; it encodes as the model does only if `has_exact_json`."""
        if self._json is None:
            fast = self._encoder.fast if isinstance(self._encoder, ExactBpeEncoder) and self.has_exact_json else None
            self._json = vocabulary_as_json(self._model, fast, self._tokens.ids)
        return self._json


def _pieces_fingerprint(model: PieceModel, rules: Sequence[str]) -> TokenizerFingerprint:
    """Returns the fingerprint of a model that the sentencepiece library encodes with."""
    names = [
        *("algorithm", "byte_fallback", "adds_dummy_prefix", "removes_extra_spaces", "escape_whitespaces"),
        "treat_whitespace_as_suffix",
    ]
    return fingerprint_of(
        vocabulary=sorted((piece.text, number) for number, piece in enumerate(model.pieces)),
        rules={
            **{name: getattr(model, name) for name in names},
            "pieces": [(piece.score, piece.kind) for piece in model.pieces],
            "normalization_map": model.normalization_map.hex(),
            "extra": list(rules),
        },
        special_tokens=[],
        library="sentencepiece",
    )


def _named_pieces(model: PieceModel) -> dict[str, int]:
    """Returns the ids of control pieces and of the user's symbols, which are no parts of words."""
    return {piece.text: number for number, piece in enumerate(model.pieces) if piece.kind in ("control", "user")}


def _special_ids(model: PieceModel, names: Mapping[str, int]) -> dict[str, int]:
    """Returns the ids that the model has by role, and those of names that are spelled like one."""
    spelled = {role: names[token] for role, token in tokens_by_spelling(names).items()}
    unknown = next(number for number, piece in enumerate(model.pieces) if piece.kind == "unknown")
    ids = {"bos": model.bos, "eos": model.eos, "pad": model.pad, "unk": unknown}
    return known_ids(spelled | {role: number for role, number in ids.items() if number is not None})


def _added_tokens(model: PieceModel, options: SentencePieceOptions) -> _AddedTokens:
    if "" in options.special_tokens:
        raise DataError("--tokenizer-special-tokens names an empty token. Leave it out.")
    if options.vocab_extra_ids is None:
        return _AddedTokens(_token_ids(model, options.special_tokens), drops_boundary=True, eod=None)
    controls = [(model.pad, "<PAD>"), (model.bos, "<BOS>"), (model.eos, "<EOS>")]
    named = [text if number is None else model.pieces[number].text for number, text in controls]
    extra = [sentinel_name(number) for number in range(options.vocab_extra_ids)]
    ids = _token_ids(model, ["<CLS>", "<SEP>", "<EOD>", "<MASK>", *named, *extra])
    return _AddedTokens(ids, drops_boundary=False, eod=ids["<EOD>"])


def _token_ids(model: PieceModel, tokens: Sequence[str]) -> dict[str, int]:
    """Returns the ids of tokens: a piece's id if a piece has this text, else a new id after all pieces."""
    known = {piece.text: number for number, piece in enumerate(model.pieces) if piece.kind != "unknown"}
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    known |= {token: len(model.pieces) + place for place, token in enumerate(new)}
    return {token: known[token] for token in tokens}


def stored_options(folder: Path) -> SentencePieceOptions:
    """Returns the options of a folder's tokenizer.model that `files` stored."""
    stored = read_stored_options(folder)
    return SentencePieceOptions(
        special_tokens=stored.special_tokens,
        vocab_extra_ids=stored.vocab_extra_ids,
        keep_extra_spaces=stored.options.get("keep_extra_spaces", False) is True,
    )


def _encode_error(name: Path, why: str) -> DataError:
    return DataError(f"A text for the tokenizer {name} {why}. Check the text and the tokenizer's file.")
