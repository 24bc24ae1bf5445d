"""Which cases of a test the default suite keeps (`tests/longform.py`)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from tests.longform import mark_diagonals


class _Case:
    """As much of a collected case as choosing needs."""

    def __init__(self, marker: pytest.MarkDecorator, *, later: bool = False, **indices: int) -> None:
        self.function, self.callspec = "a test", SimpleNamespace(indices=indices)
        self.markers = {"diagonal": marker.mark, **({"matrix": pytest.mark.matrix.mark} if later else {})}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers[marker.name] = marker.mark


def _kept(cases: list[_Case]) -> list[tuple[int, ...]]:
    mark_diagonals(cases)  # type: ignore[arg-type]
    return [tuple(case.callspec.indices.values()) for case in cases if "matrix" not in case.markers]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("sizes", [(3, 3), (7, 3), (2, 3, 4)])
def test_every_value_of_a_product_is_in_some_case(sizes: tuple[int, ...], count: int):
    marker = pytest.mark.diagonal(count)
    rows = list(itertools.product(*map(range, sizes)))
    kept = _kept([_Case(marker, **{f"p{number}": index for number, index in enumerate(row)}) for row in rows])
    assert len(rows) // count - 1 <= len(kept) <= len(rows) // count + 1
    for number, size in enumerate(sizes):
        assert {row[number] for row in kept} == set(range(size))


def test_of_one_list_the_next_one_in_turn():
    """A product that was written as one list of tuples has a period."""
    marker = pytest.mark.diagonal(3)
    assert [row[0] for row in _kept([_Case(marker, name=index, form=index) for index in range(12)])] == [0, 4, 8, 9]


def test_what_is_later_anyway_does_not_count():
    marker = pytest.mark.diagonal(2)
    cases = [_Case(marker, later=index % 2 == 0, kind=index) for index in range(8)]
    assert [row[0] for row in _kept(cases)] == [1, 7]
