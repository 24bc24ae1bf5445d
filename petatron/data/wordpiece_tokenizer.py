"""WordPiece tokenizers of a vocab.txt: Megatron's BertWordPieceLowerCase and BertWordPieceCase.

A text has the ids that transformers' BertTokenizer gives it, without [CLS] and [SEP] around it. The names of special tokens in a text
are their ids. `--tokenizer-hf-no-use-fast` divides texts into words as BERT's tokenizer in Python does (word_splitter.py says what
differs). Special tokens that the vocabulary lacks have ids after it: those of `--tokenizer-special-tokens`, then the
sentinels of `--vocab-extra-ids`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.encoded_text import EncodedText
from petatron.data.special_tokens import known_ids, sentinel_name, tokens_by_spelling
from petatron.data.stored_tokenizer_options import OPTIONS_KEY, read_stored_options
from petatron.data.tokenizer_fingerprint import TokenizerFingerprint, library_fingerprint
from petatron.data.tokenizers_library import LibraryTokenizer
from petatron.data.wordpiece.vocabulary_file import (
    CLASSIFIER,
    MASK,
    PADDING,
    SEPARATOR,
    SPECIAL_TOKENS,
    UNKNOWN,
    read_vocabulary,
)
from petatron.data.wordpiece.word_splitter import WordSplitter

VOCABULARY_FILE = "vocab.txt"
END_OF_DOCUMENT = ("[EOS]", SEPARATOR)
"""The token that ends a document: the first of these that there is."""
_ROLES = {"unk": UNKNOWN, "cls": CLASSIFIER, "sep": SEPARATOR, "pad": PADDING, "mask": MASK}


@dataclass(frozen=True, slots=True, kw_only=True)
class WordPieceOptions:
    """The options of a tokenizer.

    lowercase: lowercase texts and strip accents. special_tokens: further tokens whose names in a text are their ids. vocab_extra_ids: how
    many sentinels `<extra_id_i>` follow. splits_in_python: words are divided by `WordSplitter`.
    """

    lowercase: bool
    special_tokens: tuple[str, ...] = ()
    vocab_extra_ids: int = 0
    splits_in_python: bool = False


class WordPieceTokenizer(LibraryTokenizer):
    """A vocab.txt with the rules of BERT."""

    def __init__(self, vocab_file: str | Path, options: WordPieceOptions) -> None:
        if "" in options.special_tokens:
            raise DataError("--tokenizer-special-tokens names an empty token. Leave it out.")
        path = Path(vocab_file)
        vocabulary = read_vocabulary(path)
        sentinels = [sentinel_name(number) for number in range(options.vocab_extra_ids)]
        names = [*SPECIAL_TOKENS, *options.special_tokens, *sentinels]
        with reading_untrusted(path, data_file_error):
            # A name of a special token may stand in the vocabulary, and keeps its id there.
            self._fast = _build_fast(dict(vocabulary.ids), names, lowercase=options.lowercase)
        self._ids = self._fast.get_vocab(with_added_tokens=True)
        self._table = None
        self._options = options
        self.splits_in_python = options.splits_in_python
        self._splitter = WordSplitter(names, lowercase=options.lowercase) if options.splits_in_python else None
        self._json = self._fast.to_str().encode()
        if self._splitter is not None:
            self._fast.normalizer = None  # type: ignore[assignment]
            self._fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.vocab_size = max(self._ids.values()) + 1
        self._end = next(token for token in END_OF_DOCUMENT if token in self._ids)
        self.eod = self._ids[self._end]
        self.bod = self._ids[CLASSIFIER]
        self._roles = tokens_by_spelling(options.special_tokens) | _ROLES | {"eos": self._end}
        self.special_ids = known_ids({role: self._ids[token] for role, token in self._roles.items()})
        self.name = str(path)
        self._content = vocabulary.content

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._splitter is not None:
            texts = [" ".join(self._splitter.split(text)) for text in texts]
        return super().encode_batch(texts)

    def encode_with_offsets(self, text: str) -> EncodedText:
        """Returns ids and spans; words that Python divides have none, here as in transformers."""
        if self._splitter is not None:
            raise DataError(
                f"{self.name} divides texts into words in Python (--tokenizer-hf-no-use-fast), which does not follow characters "
                "from the text to its tokens. Leave the flag out to have their places."
            )
        return super().encode_with_offsets(text)

    @cached_property
    def _fingerprint(self) -> TokenizerFingerprint:
        if self._splitter is None:
            return library_fingerprint(self._fast)
        rules = [f"lowercase={self._options.lowercase}"]
        return library_fingerprint(self._fast, extra_rules=rules, library="python")

    def files(self) -> dict[str, bytes]:
        """Returns vocab.txt, its settings, and a tokenizer.json where that gives the same ids."""
        options = self._options
        config: dict[str, Any] = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": options.lowercase,
            **{f"{role}_token": token for role, token in self._roles.items()},
        }
        if stored := {name: value for name, value in asdict(options).items() if value and name != "lowercase"}:
            config[OPTIONS_KEY] = stored
        settings = {"tokenizer_config.json": json.dumps(config, indent=1).encode()}
        exact = {} if options.splits_in_python else {"tokenizer.json": self._json}
        return {VOCABULARY_FILE: self._content, **settings, **exact}

    def vocabulary_json(self) -> bytes:
        """Returns a tokenizer.json that maps ids to tokens; it encodes rare characters otherwise than words split in Python."""
        return self._json


def _build_fast(ids: dict[str, int], special_tokens: Sequence[str], *, lowercase: bool) -> FastTokenizer:
    fast = FastTokenizer(models.WordPiece(vocab=ids, unk_token=UNKNOWN))
    fast.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special_tokens])
    # Other programs put these around a text, as BERT expects; no text of ours is encoded with them.
    around = [(token, ids[token]) for token in (CLASSIFIER, SEPARATOR)]
    fast.post_processor = processors.TemplateProcessing(
        single=f"{CLASSIFIER}:0 $A:0 {SEPARATOR}:0",
        pair=f"{CLASSIFIER}:0 $A:0 {SEPARATOR}:0 $B:1 {SEPARATOR}:1",
        special_tokens=around,
    )
    return fast


def stored_wordpiece_options(folder: Path) -> WordPieceOptions:
    """Returns the options of a folder's vocab.txt: those that `files` stored, and the case that transformers reads there too."""
    stored = read_stored_options(folder)
    return WordPieceOptions(
        lowercase=stored.settings.get("do_lower_case", True) is not False,
        special_tokens=stored.special_tokens,
        vocab_extra_ids=stored.vocab_extra_ids or 0,
        splits_in_python=stored.options.get("splits_in_python", False) is True,
    )
