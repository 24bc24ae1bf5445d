"""Why a record makes no sample: a kind, which reports count by, and the reason in words."""

from __future__ import annotations

from typing import Literal

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable

RefusalKind = Literal[
    "no json", "wrong form", "refused by the template", "nothing to learn", "too long", "unclear mask"
]


class RefusedConversation(DataError):
    """A record that makes no sample.

    >>> str(RefusedConversation("too long", "has 90 tokens"))
    'The record has 90 tokens.'
    """

    def __init__(self, kind: RefusalKind, reason: str) -> None:
        """`reason` is a predicate of the record, without a full stop."""
        self.kind: RefusalKind = kind
        self.reason = printable(reason, max_chars=400)
        super().__init__(f"The record {self.reason}.")
