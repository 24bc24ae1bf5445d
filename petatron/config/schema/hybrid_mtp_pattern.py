"""MTP depths in Megatron's hybrid layer patterns: `M*M-/*-/*-` is the layers `M*M-` and two MTP depths, each `*-`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from petatron.base.errors import Problem
from petatron.config.schema.sections.hybrid import PREDICTION_DEPTH, STAGE_BOUNDARY


class HybridMtpPattern(NamedTuple):
    """The parts of a pattern: the layers of the main model, including `|` separators (pipeline stages), and those of each MTP depth."""

    main: str
    depths: tuple[str, ...]

    @property
    def layers(self) -> str:
        """Returns the layer pattern shared by all MTP depths."""
        return next((depth for depth in self.depths if depth), "").replace(STAGE_BOUNDARY, "")


def split_depths(pattern: str) -> HybridMtpPattern:
    """Splits a pattern into the main model's layers and the MTP depths.

    >>> split_depths("M*|M-/*-/*-")
    HybridMtpPattern(main='M*|M-', depths=('*-', '*-'))
    """
    main, *depths = pattern.split(PREDICTION_DEPTH)
    return HybridMtpPattern(main, tuple(depths))


def depth_problems(where: str, pattern: str) -> Iterator[Problem]:
    """Yields every problem of a pattern's MTP depths."""
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
