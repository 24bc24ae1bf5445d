"""Traces a sample of a dataset to its documents: the ranges of their tokens, and the files and lines that they come from.

A dataset that can tell has a method `trace`. It uses the index that reading a sample uses, so the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from petatron.base.errors import DataError
from petatron.data.check_token_ids import TokenPlace, token_place
from petatron.data.document_provenance import DocumentProvenance, ProvenanceTable
from petatron.data.indexed_dataset import IndexedDataset


@dataclass(frozen=True, slots=True)
class TracedDocument:
    """Tokens of one document in a sample: `length` of them from `place`. source: None where the dataset has none beside it."""

    place: TokenPlace
    length: int
    source: DocumentProvenance | None

    def __str__(self) -> str:
        last = self.place.position + self.length - 1
        sequence = "" if self.place.sequence is None else f", sequence {self.place.sequence:,}"
        source = "" if self.source is None else f"  from {self.source}"
        return f"document {self.place.document:,}{sequence}: tokens {self.place.position:,} to {last:,}{source}"

    def as_json(self) -> dict[str, Any]:
        return {
            "document": self.place.document,
            "sequence": self.place.sequence,
            "first_token": self.place.position,
            "num_tokens": self.length,
            "source": None if self.source is None else asdict(self.source),
        }


@dataclass(frozen=True, slots=True)
class SampleTrace:
    """One sample: the dataset that it is of, its number there, and its documents. change: what is done with these, if anything."""

    dataset: str
    index: int
    documents: tuple[TracedDocument, ...]
    change: str | None = None

    def as_json(self) -> dict[str, Any]:
        documents = [document.as_json() for document in self.documents]
        return {"dataset": self.dataset, "index": self.index, "change": self.change, "documents": documents}


def trace_sample(dataset: object, index: int) -> SampleTrace:
    """Returns what a sample is made of; raises `DataError` for a kind of dataset that cannot tell."""
    trace = getattr(dataset, "trace", None)
    if trace is None:
        raise DataError(
            f"Samples of {type(dataset).__name__} cannot be traced to documents: it has no method `trace`. Mock data has no documents; "
            "a kind of dataset of your own may have the method."
        )
    return trace(index)


def trace_documents(
    dataset: IndexedDataset, sources: ProvenanceTable | None, pieces: list[tuple[int, int, int]]
) -> tuple[TracedDocument, ...]:
    """Returns the documents of pieces of sequences: number, first token and length."""
    places = [(token_place(dataset, sequence, start), length) for sequence, start, length in pieces if length]
    return tuple(
        TracedDocument(place, length, None if sources is None else sources[place.document]) for place, length in places
    )
