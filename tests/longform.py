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


def every_second(cases: Iterable[Any]) -> list[Any]:
    """The first, third, ... case in the default suite, the others later."""
    return one_in(2, cases)


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The first of every so many cases in the default suite, the others later."""
    return [
        case if number % count == 0 else later(*(case if isinstance(case, tuple) else (case,)))
        for number, case in enumerate(cases)
    ]
