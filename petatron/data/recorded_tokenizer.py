"""The tokenizer that a dataset was made with: `<prefix>.tokenizer` beside the .bin and .idx, and the rule that a run has the same.

A token file contains numbers, which are other tokens of another tokenizer, and training would not notice. So `petatron data preprocess`
records the fingerprint of its tokenizer, and a run with another one is refused by name. A tokenizer that differs in special tokens alone
is accepted: its ids of ordinary text are the same, and tokens that were added later are in no file.

Nothing is checked where nothing is known: for a file without a record (Megatron's tools write none), for a run without a tokenizer, and
for the NullTokenizer, whose ids come from another program. Nor for an address, where only .bin and .idx are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.base.remote_address import is_remote
from petatron.base.safe_files import open_atomic
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import is_count, read_limited_json, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.tokenizer import NullTokenizer, Tokenizer
from petatron.data.tokenizer_fingerprint import TokenizerFingerprint

_VERSION = 1
_MAX_BYTES = 1 << 16


def recorded_tokenizer_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTokenizer:
    """What is known of a tokenizer without its files: its name, fingerprint and number of ids."""

    name: str
    fingerprint: TokenizerFingerprint
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Returns what to record; None for the NullTokenizer, which did not make the ids."""
        if isinstance(tokenizer, NullTokenizer):
            return None
        return cls(name=tokenizer.name, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)

    def difference(self, tokenizer: Tokenizer) -> str | None:
        """Returns how another tokenizer gives ordinary text other ids; None if it gives the same, or if that is not known."""
        if isinstance(tokenizer, NullTokenizer):
            return None
        held, given = self.fingerprint, tokenizer.fingerprint
        if held.vocabulary != given.vocabulary:
            return f"its ids stand for other tokens ({self.vocab_size:,} ids then, {tokenizer.vocab_size:,} now)"
        if not held.has_rules_of(given):
            return "it has the same tokens and divides texts otherwise (its normalizer, its pattern or its merges)"
        return None

    def write(self, prefix: str | Path) -> None:
        """Writes the record of a dataset."""
        content = {
            "version": _VERSION,
            "name": self.name,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint.record(),
        }
        with open_atomic(recorded_tokenizer_path(prefix)) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")


def read_recorded_tokenizer(prefix: str | Path) -> RecordedTokenizer | None:
    """Returns the tokenizer that a dataset was made with; None where nothing says."""
    path = recorded_tokenizer_path(prefix)
    if is_remote(str(prefix)) or not path.exists():
        return None
    with reading_untrusted(path, data_file_error):
        content = read_limited_json(path, _MAX_BYTES)
        if content["version"] != _VERSION:
            raise ValueError(f"its version is not {_VERSION}")
        if not isinstance(content["name"], str) or not is_count(content["vocab_size"]):
            raise TypeError("the name or the number of ids is none")
        return RecordedTokenizer(
            name=content["name"],
            fingerprint=TokenizerFingerprint.of_record(content["fingerprint"]),
            vocab_size=content["vocab_size"],
        )


def check_recorded_tokenizer(prefix: str, tokenizer: Tokenizer | None, *, force: bool) -> None:
    """Raises if a dataset was made with another tokenizer than the run's, or warns with `force`."""
    recorded = None if tokenizer is None else read_recorded_tokenizer(prefix)
    if recorded is None or tokenizer is None or (difference := recorded.difference(tokenizer)) is None:
        return
    what = f"{prefix} was made with the tokenizer {printable(recorded.name)}, and {tokenizer.name} is another: {difference}"
    if not force:
        raise DataError(
            f"{what}. Use the tokenizer of the data, preprocess the text with this one, or add --force-tokenizer to train on these ids."
        )
    get_logger(__name__).warning("--force-tokenizer: %s", what)


def merged_tokenizer(prefixes: Sequence[str | Path]) -> RecordedTokenizer | None:
    """Returns the tokenizer of datasets to merge, None if some do not say; raises if they had different ones."""
    records = [(str(prefix), read_recorded_tokenizer(prefix)) for prefix in prefixes]
    known = [(prefix, record) for prefix, record in records if record is not None]
    for prefix, record in known[1:]:
        first_prefix, first = known[0]
        if record.fingerprint.vocabulary != first.fingerprint.vocabulary or not record.fingerprint.has_rules_of(
            first.fingerprint
        ):
            raise DataError(
                f"These datasets cannot be merged: {first_prefix} was made with the tokenizer {printable(first.name)}, {prefix} with "
                f"{printable(record.name)}, which is another. Preprocess all with the same tokenizer."
            )
    return known[0][1] if len(known) == len(records) else None
