"""Tokenizers: text to token ids and back. Nothing here needs torch or a network.

End of document (`eod`) is the id between documents. It comes from the tokenizer's own files when they name an
end-of-text token; a tokenizer without one has eod None, and asking to append it is an error.
Begin of document (`bod`) is the id that a tokenizer's files name as the first of a text, BERT's [CLS] included; most have none.
Encoding never adds special tokens of its own, and ignores truncation or padding stored in a tokenizer.json: these are
made for inference, and would silently truncate training documents.

The files are untrusted: the library panics on some, when it loads them or only when it encodes a text. Every call of it is
inside `reading_untrusted`, so that a user sees one error; and ids are checked against the vocabulary, the rows of the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from petatron.base.errors import DataError
from petatron.base.model_companion_files import find_companion_files, read_companion_file
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.config.schema.data import TokenizerConfig
from petatron.config.schema.sections.tokenizer_options import (
    DEFAULT_NUM_SPECIAL_TOKENS,
    DEFAULT_SPECIAL_TOKENS,
    MULTIMODAL,
    WORDPIECE_TYPES,
    TokenizerType,
    infer_tokenizer_type,
)
from petatron.data.bpe.byte_level_decoder import ByteTable, byte_characters
from petatron.data.data_file_error import data_file_error
from petatron.data.encoded_text import EncodedText, utf8_spans
from petatron.data.huggingface_special_tokens import library_special_ids, named_tokens
from petatron.data.multimodal.multimodal_tokenizer import (
    STORED_KEY,
    MultimodalOptions,
    MultimodalTokenizer,
)
from petatron.data.multimodal.stored_multimodal_config import stored_multimodal_config
from petatron.data.sentencepiece_tokenizer import (
    MODEL_FILE,
    SentencePieceOptions,
    SentencePieceTokenizer,
    stored_options,
)
from petatron.data.special_tokens import known_ids
from petatron.data.stored_tokenizer_options import read_stored_options
from petatron.data.tiktoken_tokenizer import TikTokenizer
from petatron.data.tokenizer_fingerprint import TokenizerFingerprint, fingerprint_of, library_fingerprint
from petatron.data.tokenizer_json_limits import check_growth, vocabulary_rows
from petatron.data.tokenizers_library import MAX_TOKENIZER_BYTES, LibraryTokenizer, load_fast, tokenizer_config
from petatron.data.vocabulary_kind import (
    GPT2_MERGES,
    GPT2_VOCABULARY,
    TOKENIZER_JSON,
    plain_reason,
    vocabulary_error,
    wrong_kind,
)
from petatron.data.wordpiece_tokenizer import (
    VOCABULARY_FILE,
    WordPieceOptions,
    WordPieceTokenizer,
    stored_wordpiece_options,
)

END_OF_TEXT = "<|endoftext|>"
_COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_NUMBER = re.compile(r"\S+")
# Names of the end-of-document token in published tokenizers, tried when no tokenizer_config.json names it.
EOD_CANDIDATES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
)


class TokenVocabulary(Protocol):
    """What ids stand for, and no more: grammars need this much of a tokenizer."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int | None: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def files(self) -> dict[str, bytes]:
        """Returns the files that a model folder needs so that its readers find this tokenizer; empty if it has none."""
        ...


class Tokenizer(TokenVocabulary, Protocol):
    """The tokenizer interface of data, training and generation.

    special_ids: the ids of the special tokens that the tokenizer's own files name, by role: bos, eos, unk, sep, pad, cls, mask.
    sentinel_ids: the sentinels of span corruption, `<extra_id_0>`, `<extra_id_1>`, ..., in the order of their use.
    fingerprint: equal for tokenizers that give every text the same ids, wherever their files are.
    """

    @property
    def bod(self) -> int | None: ...
    @property
    def special_ids(self) -> Mapping[str, int]: ...
    @property
    def sentinel_ids(self) -> tuple[int, ...]: ...
    @property
    def fingerprint(self) -> TokenizerFingerprint: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode_with_offsets(self, text: str) -> EncodedText:
        """Returns the ids of a text with the characters of each; raises `DataError` where a tokenizer cannot know them."""
        ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes that ids stand for, so that a part of a character is not replaced.

        Of the ids of a text they are its UTF-8, unless the tokenizer changes texts before it divides them: composes characters (NFC),
        lowercases, collapses spaces, or has no id for some.
        """
        ...


class HuggingFaceTokenizer(LibraryTokenizer):
    """A tokenizer.json, or a folder with one (and perhaps a tokenizer_config.json that names the eos token)."""

    def __init__(self, path: str | Path) -> None:
        given = Path(path)
        file = given / "tokenizer.json" if given.is_dir() else given
        if not file.is_file():
            what = "is not a file" if file.exists() else "does not exist"
            raise DataError(
                f"Tokenizer {file} {what}. Give --tokenizer-model a tokenizer.json or a folder that holds one; "
                "names of models on a hub are not downloaded."
            )
        names = ("tokenizer.json", *_COMPANION_FILES)
        beside = find_companion_files(given, DataError, names=names) if given.is_dir() else {}
        with reading_untrusted(file, _tokenizer_file_error):
            content = read_limited_bytes(file, MAX_TOKENIZER_BYTES)
            self._fast = load_fast(content)
            check_growth(file, self._fast)
            is_byte_level = isinstance(self._fast.decoder, decoders.ByteLevel)
            self._table = ByteTable(self._fast, given) if is_byte_level else None
            self.vocab_size = vocabulary_rows(file, self._fast)
        self.name = str(given)
        named = named_tokens(file.parent)
        self.eod = _first_id(self._fast, (named.get("eos"), *EOD_CANDIDATES))
        self.bod = _first_id(self._fast, [named.get("bos"), named.get("cls")])
        self.special_ids = library_special_ids(self._fast, named, self.eod)
        self._files = {name: read_companion_file(path, DataError) for name, path in beside.items()}
        self._files["tokenizer.json"] = content

    def files(self) -> dict[str, bytes]:
        return {**_default_tokenizer_config(self._fast, self.eod), **self._files}


class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's byte-level BPE from its vocab.json and merges.txt.

    Text is encoded literally, as GPT-2's own encoder does: the characters of <|endoftext|> in a document do not
    become the end-of-document id.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        for path, flag in ((vocab_file, "--vocab-file"), (merge_file, "--merge-file")):
            if not Path(path).is_file():
                what = "is not a file" if Path(path).exists() else "does not exist"
                raise DataError(f"Tokenizer file {path} {what}. Check {flag}.")
        self._files = {"vocab.json": _read_file(Path(vocab_file)), "merges.txt": _read_file(Path(merge_file))}
        files = (Path(vocab_file), Path(merge_file))
        with reading_untrusted(files[0], lambda _, why: _gpt2_error(files, why)):
            self._fast = FastTokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
            self._fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            self._fast.decoder = decoders.ByteLevel()
            self._table = ByteTable(self._fast, Path(vocab_file))
            self.vocab_size = vocabulary_rows(vocab_file, self._fast)
            self.eod = self._fast.token_to_id(END_OF_TEXT)
        self.special_ids = known_ids({"eos": self.eod})
        self.name = f"GPT2BPETokenizer({vocab_file}, {merge_file})"

    def files(self) -> dict[str, bytes]:
        merged = {"tokenizer.json": self._fast.to_str().encode()}
        return {**_default_tokenizer_config(self._fast, self.eod), **merged, **self._files}


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255 and end of document as 256: no files, any text.

    >>> ByteTokenizer().encode("hé")
    [104, 195, 169]
    """

    name = "ByteTokenizer"
    vocab_size = 257
    eod = 256
    bod = None
    special_ids: Mapping[str, int] = {"eos": eod}
    sentinel_ids = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_with_offsets(self, text: str) -> EncodedText:
        return EncodedText(self.encode(text), utf8_spans(text))

    @property
    def fingerprint(self) -> TokenizerFingerprint:
        return library_fingerprint(_byte_level_bpe())

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; ids above 255 and bytes that are not UTF-8 become the replacement character."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(bytes([number]) if number < 256 else "\ufffd".encode() for number in ids)

    def files(self) -> dict[str, bytes]:
        """Returns a byte-level BPE without merges: the same ids, for readers that know tokenizer.json alone."""
        fast = _byte_level_bpe()
        fast.add_special_tokens([END_OF_TEXT])
        return {**_default_tokenizer_config(fast, self.eod), "tokenizer.json": fast.to_str().encode()}


class NullTokenizer:
    """Text that already is token ids, separated by spaces. The last id of the vocabulary is the end of document.

    >>> NullTokenizer(100).encode("3 1 4"), NullTokenizer(100).eod
    ([3, 1, 4], 99)
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise DataError(f"NullTokenizer with --vocab-size {vocab_size} has no ids. Give a positive --vocab-size.")
        self.name = f"NullTokenizer({vocab_size})"
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.bod = None
        self.special_ids = {"eos": self.eod}
        self.sentinel_ids = ()

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer expects token ids separated by spaces: {error}") from error
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise DataError(f"Token ids {min(ids)}..{max(ids)} are outside the vocabulary of {self.vocab_size} ids.")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> EncodedText:
        return EncodedText(self.encode(text), [match.span() for match in _NUMBER.finditer(text)])

    @property
    def fingerprint(self) -> TokenizerFingerprint:
        """Returns one that is of no library, since ids stand for whatever the text that made them was."""
        return fingerprint_of(vocabulary=None, rules=None, special_tokens=[self.eod], library="null")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(number)) for number in ids)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        raise DataError(
            f"The ids of {self.name} stand for no bytes of a text: it knows numbers alone. Give the tokenizer that made the ids."
        )

    def files(self) -> dict[str, bytes]:
        return {}


def build_tokenizer(config: TokenizerConfig, *, vocab_size: int | None = None) -> Tokenizer:
    """Builds the configured tokenizer; its type follows from the files given when it is not named."""
    kind = config.tokenizer_type or _implied_type(config)
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise DataError("NullTokenizer needs --vocab-size.")
        return NullTokenizer(vocab_size)
    if kind == "GPT2BPETokenizer":
        vocab = _required(config.vocab_file, kind, "--vocab-file")
        return GPT2BPETokenizer(vocab, _required(config.merge_file, kind, "--merge-file"))
    if kind in WORDPIECE_TYPES:
        wordpiece = WordPieceOptions(
            lowercase=kind == "BertWordPieceLowerCase",
            special_tokens=config.tokenizer_special_tokens,
            vocab_extra_ids=config.vocab_extra_ids or 0,
            splits_in_python=config.tokenizer_hf_no_use_fast,
        )
        return WordPieceTokenizer(_required(config.vocab_file, kind, "--vocab-file"), wordpiece)
    if kind is None:
        raise DataError(
            "No tokenizer is given. Use --tokenizer-model FILE (a tokenizer.json), --vocab-file and --merge-file (GPT-2), --vocab-file "
            "with --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase, --tokenizer-type ByteTokenizer, or --tokenizer-type "
            "NullTokenizer with --vocab-size."
        )
    if kind == MULTIMODAL:
        return _build_multimodal(config, vocab_size)
    model = _required(config.tokenizer_model, kind, "--tokenizer-model")
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(model)
    if kind == "TikTokenizer":
        return TikTokenizer(
            model,
            pattern=config.tiktoken_pattern or "v2",
            num_special_tokens=config.tiktoken_num_special_tokens or DEFAULT_NUM_SPECIAL_TOKENS,
            special_tokens=config.tokenizer_special_tokens or DEFAULT_SPECIAL_TOKENS,
            vocab_size=vocab_size,
        )
    options = SentencePieceOptions(
        special_tokens=config.tokenizer_special_tokens,
        vocab_extra_ids=(config.vocab_extra_ids or None) if kind == "SentencePieceTokenizer" else None,
        keep_extra_spaces=not config.tokenizer_sentencepiece_ignore_extra_whitespaces,
    )
    return SentencePieceTokenizer(model, options)


def _build_multimodal(config: TokenizerConfig, vocab_size: int | None) -> MultimodalTokenizer:
    """Builds a MultimodalTokenizer around the tokenizer of the other files."""
    folder = None if config.tokenizer_model is None else Path(config.tokenizer_model)
    held = _folder_text_tokenizer(folder) if folder is not None and folder.is_dir() else None
    base = build_tokenizer(held or replace(config, tokenizer_type=None), vocab_size=vocab_size)
    options = MultimodalOptions(
        prompt_format=config.tokenizer_prompt_format,
        special_tokens=config.special_tokens,
        image_tag_type=config.image_tag_type,
        force_system_message=config.force_system_message,
    )
    return MultimodalTokenizer(base, options, vocabulary=vocabulary_json(base))


def _implied_type(config: TokenizerConfig) -> TokenizerType | None:
    implied = infer_tokenizer_type(
        tokenizer_model=config.tokenizer_model,
        vocab_file=config.vocab_file or config.merge_file,  # one alone is told to lack the other
        merge_file=config.merge_file or config.vocab_file,
        tiktoken_pattern=config.tiktoken_pattern,
    )
    return None if implied is None else implied[0]


def folder_tokenizer(folder: Path) -> TokenizerConfig | None:
    """Returns the settings that open the tokenizer of a model folder; None if it has none that can be opened."""
    config = _folder_text_tokenizer(folder)
    stored = None if config is None else read_stored_options(folder).options.get(STORED_KEY)
    if stored is None:
        return config
    with reading_untrusted(folder / "tokenizer_config.json", data_file_error):
        return stored_multimodal_config(folder, stored)


def _folder_text_tokenizer(folder: Path) -> TokenizerConfig | None:
    """Returns the settings of a folder's tokenizer without what a MultimodalTokenizer adds."""
    if (folder / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():
        return TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    if (folder / MODEL_FILE).is_file():
        options = stored_options(folder)
        return TokenizerConfig(
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=str(folder),
            tokenizer_special_tokens=options.special_tokens,
            tokenizer_sentencepiece_legacy=bool(options.special_tokens),
            tokenizer_sentencepiece_ignore_extra_whitespaces=not options.keep_extra_spaces,
            vocab_extra_ids=options.vocab_extra_ids,
        )
    if (folder / VOCABULARY_FILE).is_file():
        wordpiece = stored_wordpiece_options(folder)
        return TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase" if wordpiece.lowercase else "BertWordPieceCase",
            vocab_file=str(folder / VOCABULARY_FILE),
            tokenizer_special_tokens=wordpiece.special_tokens,
            vocab_extra_ids=wordpiece.vocab_extra_ids or None,
            tokenizer_hf_no_use_fast=wordpiece.splits_in_python,
        )
    return None


def open_tokenizer_files(path: Path) -> Tokenizer:
    """Opens the tokenizer of a folder, or of a file of any kind that its name tells."""
    config = folder_tokenizer(path) if path.is_dir() else None
    return build_tokenizer(config or TokenizerConfig(tokenizer_model=str(path)))


def vocabulary_json(tokenizer: TokenVocabulary) -> bytes | None:
    """Returns a tokenizer.json that says what the ids stand for; None if there is no text for them. It may encode otherwise."""
    if isinstance(tokenizer, SentencePieceTokenizer | WordPieceTokenizer | MultimodalTokenizer):
        return tokenizer.vocabulary_json()
    return tokenizer.files().get("tokenizer.json")


def _byte_level_bpe() -> FastTokenizer:
    fast = FastTokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_characters())}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def _default_tokenizer_config(fast: FastTokenizer, eod: int | None) -> dict[str, bytes]:
    return tokenizer_config({"eos_token": None if eod is None else fast.id_to_token(eod)})


def _read_file(path: Path) -> bytes:
    with reading_untrusted(path, data_file_error):
        return read_limited_bytes(path, MAX_TOKENIZER_BYTES)


def _tokenizer_file_error(file: Path, why: str) -> DataError:
    return DataError(
        vocabulary_error(file, why, TOKENIZER_JSON, "Copy it again, or name its kind with --tokenizer-type")
    )


def _gpt2_error(files: tuple[Path, Path], why: str) -> DataError:
    what = f"{files[0]} and {files[1]} are not a GPT-2 vocabulary and its merges"
    other = wrong_kind(files, (GPT2_VOCABULARY, GPT2_MERGES))
    if other is None:
        return DataError(f"{what}: one of them {plain_reason(why)}. Copy them again.")
    return DataError(f"{what}: the {('first', 'second')[other[0]]} is {other[1].name}. {other[1].fix}.")


def _first_id(fast: FastTokenizer, tokens: Sequence[str | None]) -> int | None:
    """Returns the id of the first token that the vocabulary has."""
    ids = (fast.token_to_id(token) for token in tokens if token is not None)
    return next((number for number in ids if number is not None), None)


def _required(value: str | None, kind: str, flag: str) -> str:
    if value is None:
        raise DataError(f"{kind} needs {flag}.")
    return value
