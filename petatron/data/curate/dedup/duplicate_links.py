"""Connects documents with equal keys to clusters, in memory that does not grow with the keys.

Keys are in a file, one for each document in order. They are sorted in partitions, each of the documents whose key leaves one remainder, so
that a partition fits the memory it is given however many documents there are. In a group of equal keys the first document is the
leader; the others are compared with it, those that differ have a leader of their own, and so on.

Clusters are the connected components of the pairs that agree. `labels[document]` is the first document of its cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.word_hashes import Hashes

Documents = NDArray[np.int64]
Similarity = Callable[[Documents, Documents], NDArray[np.float64]]
"""The similarity of pairs of documents, each as two arrays; below 0 where they are no duplicates."""
ReadKeys = Callable[[int, int], Hashes]
"""The keys of the documents from the first to before the second."""

BYTES_PER_KEY = 48
"""Of a document of a partition while it is sorted: key, number, order, and the copies of these."""
_CHUNK_DOCUMENTS = 1 << 20
_COMPARED_PAIRS = 1 << 14
_MAX_LEADERS = 64


@dataclass(slots=True)
class DuplicateLinks:
    """The clusters so far, and the pairs that made them. `labels` has 8 bytes for each document."""

    labels: Documents
    pairs: list[tuple[Documents, Documents, NDArray[np.float64]]] = field(default_factory=list)
    uncompared: int = 0
    """Documents that were left when a group had too many leaders."""

    @classmethod
    def of(cls, num_documents: int) -> DuplicateLinks:
        return cls(np.arange(num_documents))

    @property
    def duplicates(self) -> NDArray[np.bool_]:
        """Which documents are not the first of their cluster."""
        return self.labels != np.arange(len(self.labels))

    def connect(self, first: Documents, second: Documents) -> None:
        """Joins the clusters of pairs.

        >>> links = DuplicateLinks.of(5)
        >>> links.connect(np.array([3, 1]), np.array([4, 3]))
        >>> links.labels.tolist()
        [0, 1, 2, 1, 1]
        """
        while len(first):
            low, high = self.labels[first], self.labels[second]
            low, high = np.minimum(low, high), np.maximum(low, high)
            np.minimum.at(self.labels, high, low)
            while not np.array_equal(flat := self.labels[self.labels], self.labels):
                self.labels[:] = flat
            apart = self.labels[first] != self.labels[second]
            first, second = first[apart], second[apart]


def link_equal_keys(
    links: DuplicateLinks,
    read_keys: ReadKeys,
    similarity: Similarity,
    *,
    is_candidate: NDArray[np.bool_],
    memory_bytes: int,
    keep_pairs: bool,
) -> None:
    """Connects the candidates that have equal keys and are similar."""
    num_partitions = max(1, -(-int(np.count_nonzero(is_candidate)) * BYTES_PER_KEY // memory_bytes))
    for partition in range(num_partitions):
        keys, documents = _partition(read_keys, is_candidate, partition, num_partitions)
        for first, second, similarities in _similar_pairs(links, keys, documents, similarity):
            if keep_pairs:
                links.pairs.append((first, second, similarities))
            links.connect(first, second)


def _partition(
    read_keys: ReadKeys, is_candidate: NDArray[np.bool_], partition: int, num_partitions: int
) -> tuple[Hashes, Documents]:
    keys: list[Hashes] = [np.zeros(0, np.uint64)]
    documents: list[Documents] = [np.zeros(0, np.int64)]
    for start in range(0, len(is_candidate), _CHUNK_DOCUMENTS):
        chosen = np.flatnonzero(is_candidate[start : start + _CHUNK_DOCUMENTS])
        chunk = read_keys(start, min(start + _CHUNK_DOCUMENTS, len(is_candidate)))[chosen]
        if num_partitions > 1:
            here = chunk % np.uint64(num_partitions) == partition
            chunk, chosen = chunk[here], chosen[here]
        keys.append(chunk)
        documents.append(chosen + start)
    return np.concatenate(keys), np.concatenate(documents)


def _similar_pairs(
    links: DuplicateLinks, keys: Hashes, documents: Documents, similarity: Similarity
) -> Iterator[tuple[Documents, Documents, NDArray[np.float64]]]:
    """Yields a leader, a later document of its group, and their similarity; the reader connects them before it asks for more."""
    order = np.argsort(keys, kind="stable")
    keys, documents = keys[order], documents[order]
    in_group = np.zeros(len(keys), bool)
    equal = keys[1:] == keys[:-1]
    in_group[1:] |= equal
    in_group[:-1] |= equal
    keys, documents = keys[in_group], documents[in_group]
    for _ in range(_MAX_LEADERS):
        if not len(keys):
            return
        is_leader = np.append(True, keys[1:] != keys[:-1])
        leaders = documents[np.flatnonzero(is_leader)[np.cumsum(is_leader) - 1]]
        apart = ~is_leader & (links.labels[documents] != links.labels[leaders])
        keys, documents, leaders = keys[apart], documents[apart], leaders[apart]
        differs = np.ones(len(keys), bool)
        for start in range(0, len(keys), _COMPARED_PAIRS):
            part = slice(start, start + _COMPARED_PAIRS)
            similarities = similarity(leaders[part], documents[part])
            similar = similarities >= 0
            differs[part] = ~similar
            if similar.any():
                yield leaders[part][similar], documents[part][similar], similarities[similar]
        keys, documents = keys[differs], documents[differs]
    links.uncompared += len(keys)
