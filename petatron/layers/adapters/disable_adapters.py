"""Turns the adapters of modules off for a while: then they compute what the model beneath does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def adapters_disabled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Empties the adapter slots of all linears in modules, and fills them again at the end.

    A slot is read in each forward, so nothing else changes: neither the GEMM of the weight, nor its communication, nor what is gathered
    for it. For forward passes alone: a backward pass belongs to the slots of its forward.

    >>> from petatron.layers.linear import Linear
    >>> linear = Linear(2, [2], bias=False)
    >>> linear.adapter = "an adapter"
    >>> with adapters_disabled([linear]):
    ...     print(linear.adapter)
    None
    >>> linear.adapter
    'an adapter'
    """
    slots: list[tuple[Any, Any]] = [
        (linear, linear.adapter)
        for module in modules
        for linear in module.modules()
        if getattr(linear, "adapter", None) is not None
    ]
    try:
        for linear, _ in slots:
            linear.adapter = None
        yield
    finally:
        for linear, adapter in slots:
            linear.adapter = adapter
