"""The names of a recommender's items, as clients know them: a file with a line for each, in the order of their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import ConfigError, Problem
from petatron.data.recommendation.item_names_file import read_item_names

ITEM_NAMES_FLAG = "--item-names"


@dataclass(frozen=True, slots=True)
class ItemNames:
    names: list[str]
    numbers: dict[str, int]

    @classmethod
    def read(cls, path: Path, *, num_items: int) -> ItemNames:
        """Reads the names of a model's items; `ConfigError` for a file of another model.

        `DataError` if it is no file of names.
        """
        names = read_item_names(path)
        if len(names) != num_items:
            rule = f"has {len(names):,} names, and the model {num_items:,} items"
            fix = "Give the file that was written beside the histories that it was trained on."
            raise ConfigError([Problem(ITEM_NAMES_FLAG, str(path), rule, fix)])
        return cls(names, {name: number for number, name in enumerate(names)})
