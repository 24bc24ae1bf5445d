"""Kernels for experts' rows that count how often each is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from petatron.kernels.moe.permute import MoEKernels


def counted(kernels: MoEKernels) -> tuple[MoEKernels, Counter[str]]:
    """The same kernels, and the calls of each by name from now on."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(kernels, name)(*args, **kwargs)

        return call

    return MoEKernels(**{field.name: counting(field.name) for field in fields(MoEKernels)}), calls
