"""Depths of multi-token prediction in Megatron's hybrid patterns: `M*M-/*-/*-` is the layers M*M- and two depths of *- each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from petatron.base.errors import Problem
from petatron.config.schema.sections.hybrid import PREDICTION_DEPTH, STAGE_BOUNDARY


class HybridDepths(NamedTuple):
    """The parts of a pattern: the model's own layers, with bars where they have any, and the layers of each depth."""

    main: str
    depths: tuple[str, ...]

    @property
    def layers(self) -> str:
        """The layers of one depth: of the first that has some."""
        return next((depth for depth in self.depths if depth), "").replace(STAGE_BOUNDARY, "")


def split_depths(pattern: str) -> HybridDepths:
    """Takes a pattern apart.

    >>> split_depths("M*|M-/*-/*-")
    HybridDepths(main='M*|M-', depths=('*-', '*-'))
    """
    main, *depths = pattern.split(PREDICTION_DEPTH)
    return HybridDepths(main, tuple(depths))


def depth_problems(where: str, pattern: str) -> Iterator[Problem]:
    """Yields what is wrong with the depths of a pattern, all of it."""
    main, depths = split_depths(pattern)
    if depths and not main:
        yield Problem(where, pattern, "has no layers before its first /", "Write the model's own layers there.")
    if "" in depths:
        fix = "Write the layers of one depth of multi-token prediction after each /."
        yield Problem(where, pattern, "has a / without layers after it", fix)
    if any(STAGE_BOUNDARY in depth for depth in depths):
        rule = "has a | after a /, and depths of multi-token prediction are on the last stage, with the loss"
        yield Problem(where, pattern, rule, "Write | among the layers before the first / only.")
    kinds = [*dict.fromkeys(depth for depth in depths if depth)]
    if len(kinds) > 1:
        rule = f"has depths of different layers, {' and '.join(kinds)}, and all depths have the same"
        yield Problem(where, pattern, rule, "Write the same layers after each /.")
