"""The file of item histories: for each user the items that they had, in the order in which they had them, perhaps with times.

A safetensors file with three tensors: `offsets` [users + 1], `items` [all interactions] and, with times, `times` of the same length, in
seconds. Its metadata has the number of items. Items are numbered from 0 on; the names that they have elsewhere may be in a text file
beside it, NAME.items.txt, a line each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from petatron.base.errors import DataError
from petatron.base.safe_files import write_atomic
from petatron.base.untrusted_files import open_regular_file, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.index_cache import fingerprint
from petatron.data.recommendation.item_names_file import names_path

FORMAT = "petatron item histories 1"
MAX_ITEMS = 1 << 28
"""As many as a vocabulary may have."""
_HINT = "Write it with petatron.data.recommendation.history_file.write_histories"


@dataclass(frozen=True)
class ItemHistories:
    """All histories: user u has the items `offsets[u]` to `offsets[u + 1]`."""

    offsets: NDArray[np.int64]
    items: NDArray[np.int64]
    times: NDArray[np.int64] | None
    num_items: int

    @classmethod
    def of_users(
        cls,
        items: Sequence[Sequence[int] | NDArray[np.int64]],
        times: Sequence[Sequence[int] | NDArray[np.int64]] | None,
        *,
        num_items: int,
    ) -> ItemHistories:
        """Joins the histories of users; times, if there are any, have the same lengths.

        >>> ItemHistories.of_users([[0, 2], [1]], None, num_items=3).offsets.tolist()
        [0, 2, 3]
        """
        offsets = np.cumsum([0, *map(len, items)], dtype=np.int64)
        together = [
            np.concatenate([np.zeros(0, np.int64), *(np.asarray(x, np.int64) for x in values)])
            for values in (items, times or ())
        ]
        return cls(offsets, together[0], None if times is None else together[1], num_items)

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal histories."""
        parts = (self.offsets, self.items, *(() if self.times is None else (self.times,)))
        sums = [[int(x.sum()), int((x * (np.arange(len(x)) % 65_521 + 1)).sum())] for x in parts]
        return fingerprint({"kind": FORMAT, "items": self.num_items, "users": self.num_users, "sums": sums})

    def user(self, index: int) -> NDArray[np.int64]:
        """Returns the items of a user, the first one first."""
        return self.items[self.offsets[index] : self.offsets[index + 1]]

    def problem(self) -> str | None:
        """Returns what is wrong with them, as a predicate; None if nothing is."""
        offsets, items = self.offsets, self.items
        if not 0 <= self.num_items <= MAX_ITEMS:
            return f"has {self.num_items:,} items, and such a file at most {MAX_ITEMS:,}"
        if offsets.ndim != 1 or items.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            return "has offsets that are not increasing from 0"
        if offsets[-1] != len(items) or (self.times is not None and self.times.shape != items.shape):
            return "has other numbers of interactions in its tensors"
        if len(items) and (items.min() < 0 or items.max() >= self.num_items):
            wrong = items[(items < 0) | (items >= self.num_items)]
            return f"has the item {wrong[0]} ({len(wrong):,} such interactions), and says that its items are 0 to {self.num_items - 1}"
        return None


def write_histories(path: Path, histories: ItemHistories, names: Sequence[str] | None = None) -> None:
    """Writes histories, and the names of items beside them."""
    if problem := histories.problem():
        raise DataError(f"The histories for {path} cannot be written: what is given {problem}.")
    tensors = {"offsets": histories.offsets, "items": histories.items}
    tensors |= {} if histories.times is None else {"times": histories.times}
    write_atomic(path, save(tensors, metadata={"format": FORMAT, "num_items": str(histories.num_items)}))
    if names is not None:
        if len(names) != histories.num_items or any("\n" in name for name in names):
            raise DataError(f"{len(names):,} names were given for {histories.num_items:,} items. Give a line for each.")
        write_atomic(names_path(path), "".join(f"{name}\n" for name in names))


def read_histories(path: Path) -> ItemHistories:
    """Reads a file of histories; raises `DataError` for one that is damaged or of another kind."""
    with reading_untrusted(path, data_file_error):
        open_regular_file(path).close()
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DataError(f"{path} is no file of item histories. {_HINT}.")
            keys = set(file.keys())
            tensors = {key: file.get_tensor(key) for key in ("offsets", "items", "times") if key in keys}
            if any(x.dtype != np.int64 for x in tensors.values()):
                raise data_file_error(path, "has tensors of another dtype than int64")
            histories = ItemHistories(
                tensors["offsets"], tensors["items"], tensors.get("times"), int(metadata["num_items"])
            )
        if problem := histories.problem():
            raise data_file_error(path, problem)
        return histories
