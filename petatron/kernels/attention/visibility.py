"""`Visibility`, the attention mask: which keys a query sees; one immutable value from a layer's spec to the kernel.

    causal    a token sees itself and the tokens before it
    full      a token sees all tokens
    prefix    a token of a prefix sees all of the prefix, any other one what it sees causally
    cross     a token sees the keys of another sequence

and of these only some, where the value says so:

    documents    those of its own document; padding is in documents of its own, so no token sees it
    chunk c      those of its own chunk: documents are cut into c tokens each, which are then documents
    window w     those less than w positions away, in both directions where it sees tokens after itself
    first_k k    besides, the first k tokens of its document, where they are before the window
    key_spans    cross: a span of the keys for each token

`bias` says that a score gets a number which depends on the distance of the two tokens alone: ALiBi's, or a layer's own table.

A layer's spec has the value without the parts of a batch; `of_batch` adds these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from petatron.kernels.attention.document_layout import Documents, KeySpans

VisibilityKind = Literal["causal", "full", "prefix", "cross"]
DistanceBias = Literal["alibi", "relative"]
"""alibi: a slope per head times the distance. relative: a table that the layer passes."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """See above. Two values are equal if those of their layers are, whatever the batch."""

    kind: VisibilityKind = "causal"
    window: int | None = None
    chunk: int | None = None
    first_k: int = 0
    bias: DistanceBias | None = None
    documents: Documents | None = field(default=None, compare=False, repr=False)
    key_spans: KeySpans | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind == "cross":
            assert self.window is None and self.chunk is None and not self.first_k and self.bias is None, (
                "keys of another sequence have no distance to a query: cross attention has no window, chunk, first tokens or bias"
            )
        assert self.kind == "cross" or self.key_spans is None, "spans of keys are those of another sequence"
        assert self.window is None or self.window >= 1, f"a window of {self.window} tokens"
        assert self.chunk is None or self.chunk >= 1, f"chunks of {self.chunk} tokens"

    @classmethod
    def full(cls, *, window: int | None = None) -> Visibility:
        return cls("full", window)

    @classmethod
    def prefix(cls) -> Visibility:
        return cls("prefix")

    @classmethod
    def cross(cls) -> Visibility:
        return cls("cross")

    @property
    def is_causal(self) -> bool:
        """Whether no token sees one after it, so that text can be generated."""
        return self.kind == "causal"

    def of_batch(self, documents: Documents | None, key_spans: KeySpans | None = None) -> Visibility:
        """Returns the value with the documents of a batch, and for cross attention the keys that each query sees."""
        if documents is None and key_spans is None:
            return self
        return Visibility(self.kind, self.window, self.chunk, self.first_k, self.bias, documents, key_spans)

    def within(self, length: int) -> Visibility:
        """Returns the value for sequences of `length` tokens: without a window, first tokens or chunks that exclude none of them.

        >>> Visibility(window=8, chunk=4).within(8)
        Visibility(kind='causal', window=None, chunk=4, first_k=0, bias=None)
        """
        window = None if self.window is None or self.window >= length else self.window
        chunk = None if self.chunk is None or self.chunk >= length else self.chunk
        first_k = self.first_k if window is not None else 0
        if window == self.window and chunk == self.chunk and first_k == self.first_k:
            return self
        return Visibility(self.kind, window, chunk, first_k, self.bias, self.documents, self.key_spans)

    def last_tokens(self, length: int) -> int | None:
        """Returns how many of a sequence's tokens its last one sees causally, if these are its last ones; None: all.

        >>> Visibility(chunk=4).last_tokens(4), Visibility(chunk=4).last_tokens(5), Visibility(window=3).last_tokens(5)
        (4, 1, 3)
        """
        if self.chunk is None:
            return self.window
        inside = (length - 1) % self.chunk + 1
        return inside if self.window is None else min(inside, self.window)


CAUSAL = Visibility()


@dataclass(frozen=True, slots=True)
class VisibilitySupport:
    """What a kernel can compute, declared beside it: the kinds, and which restrictions of them.

    score_rules: caps, sinks and biases of scores (`score_modifiers.py`).
    """

    kinds: frozenset[VisibilityKind]
    window: bool = False
    chunk: bool = False
    first_k: bool = False
    documents: bool = False
    key_spans: bool = False
    score_rules: bool = False

    @classmethod
    def of(cls, *kinds: VisibilityKind, **restrictions: bool) -> VisibilitySupport:
        return cls(frozenset(kinds), **restrictions)

    def includes(self, visibility: Visibility, *, score_rules: bool = False) -> bool:
        """Whether the kernel can compute a visibility."""
        return (
            visibility.kind in self.kinds
            and (visibility.window is None or self.window)
            and (visibility.documents is None or self.documents)
            and (visibility.chunk is None or self.chunk)
            and (not visibility.first_k or self.first_k)
            and (visibility.key_spans is None or self.key_spans)
            and (not score_rules or self.score_rules)
        )


_RESTRICTIONS = ("window", "chunk", "first_k", "documents", "key_spans", "score_rules")
EVERYTHING = VisibilitySupport.of("causal", "full", "prefix", "cross", **dict.fromkeys(_RESTRICTIONS, True))
"""What the reference computes, on any device."""
