"""Why a record of images and text makes no sample: a kind, which reports count by, and the reason in words."""

from __future__ import annotations

from typing import Literal

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable

RecordErrorKind = Literal[
    "no json",
    "wrong form",
    "no text",
    "tag without image",
    "image without tag",
    "image token in text",
    "too long",
    "too many patches",
]


class RecordError(DataError):
    """A record that makes no sample.

    >>> str(RecordError("too long", "has 90 tokens"))
    'The record has 90 tokens.'
    """

    def __init__(self, kind: RecordErrorKind, reason: str) -> None:
        """`reason` is a predicate of the record, without a full stop."""
        self.kind, self.reason = kind, printable(reason)
        super().__init__(f"The record {self.reason}.")
