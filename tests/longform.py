"""Cases that belong to the long form: `make test-matrix` runs all of them, the default suite a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def later(*values: Any, nccl: bool = False) -> Any:
    """A case for the long form alone, and over NCCL where it says so."""
    return pytest.param(*values, marks=[pytest.mark.matrix, *([pytest.mark.over_nccl] if nccl else [])])


def over_nccl(*values: Any) -> Any:
    """A case for the default suite that `tests/nccl` has too."""
    return pytest.param(*values, marks=pytest.mark.over_nccl)


def cases_over_nccl(cases: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The values of the cases that run over NCCL too."""
    marked = (case for case in cases if any(mark.name == "over_nccl" for mark in getattr(case, "marks", ())))
    return [tuple(case.values) for case in marked]


def diagonal(count: int) -> pytest.MarkDecorator:
    """One in `count` of a test's cases in the default suite, the others later. Of a product of several parameters it is a diagonal, so that
    every value is in some case; of one list it is one of every `count`, the next one in turn."""
    return pytest.mark.diagonal(count)


def mark_diagonals(items: Iterable[pytest.Item]) -> None:
    """Marks the cases of tests with `diagonal` that the default suite leaves out."""
    tests: dict[Any, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("diagonal") and not item.get_closest_marker("matrix"):
            tests.setdefault(getattr(item, "function", item), []).append(item)
    for cases in tests.values():
        (count,) = cases[0].get_closest_marker("diagonal").args
        for case, place in zip(cases, _places([case.callspec.indices for case in cases], count), strict=True):
            if place % count:
                case.add_marker(pytest.mark.matrix)


def _places(cases: list[dict[str, int]], count: int) -> list[int]:
    """Of the index of every parameter in every case: numbers that grow by one from a case to the next along any parameter.

    >>> _places([{"a": row, "b": column, "c": column} for row in (0, 1) for column in (0, 1, 5)], 3)
    [0, 1, 2, 1, 2, 3]
    >>> _places([{"a": index} for index in range(6)], 3)
    [0, 1, 2, 2, 3, 4]
    """
    columns = {tuple(case[name] for case in cases) for name in cases[0]}  # names of one list have the same indices
    ranks = [{index: rank for rank, index in enumerate(sorted(set(column)))} for column in columns]
    several = [column for column, rank in zip(columns, ranks) if len(rank) > 1]
    if len(several) < 2:
        return [number - number // count for number in range(len(cases))]
    return [sum(rank[index] for rank, index in zip(ranks, row)) for row in zip(*columns)]


def every_second(cases: Iterable[Any]) -> list[Any]:
    """The first, third, ... case in the default suite, the others later."""
    return one_in(2, cases)


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The first of every so many cases in the default suite, the others later."""
    return [
        case if number % count == 0 else later(*(case if isinstance(case, tuple) else (case,)))
        for number, case in enumerate(cases)
    ]
