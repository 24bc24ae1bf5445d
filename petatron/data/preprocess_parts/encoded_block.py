"""The tokens of a block of lines, as a worker returns them: flat arrays, which cost little to send."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.data.document_provenance import DocumentIds


@dataclass(frozen=True, slots=True)
class EncodedKey:
    """One key of a block: concatenated tokens, tokens per sequence, sequences per line (0: the text was omitted)."""

    tokens: NDArray
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """lines: the numbers of the lines that are neither blank nor malformed; ids: those that their objects have, one after the other."""

    keys: tuple[EncodedKey, ...]
    documents: int
    malformed: tuple[tuple[int, str], ...]
    lines: NDArray[np.int64]
    ids: DocumentIds
