"""Weights besides the trained ones, which evaluations measure too."""

from __future__ import annotations

from contextlib import AbstractContextManager

from petatron.checkpoint.stateful import Stateful


class AlternativeWeights(Stateful):
    """A component with weights of its own for the whole model, which evaluations measure beside the trained ones.

    >>> AlternativeWeights().is_ready
    True
    """

    @property
    def is_ready(self) -> bool:
        """Whether its weights differ from the trained ones by now."""
        return True

    def in_model(self) -> AbstractContextManager[None]:
        """Returns a context in which the model computes with these weights; afterwards it has its own again, bit for bit."""
        raise NotImplementedError
