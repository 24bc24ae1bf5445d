"""Measure what a forward pass keeps alive for its backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Weak references to every memory that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks this of a mode; the wrapper for its compiler would take longer than most operations."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                memory = leaf.untyped_storage()
                self.seen.append((memory._weak_ref(), memory.nbytes()))
        return out


def kept_bytes(forward: Callable[[], Tensor], *, without: Iterable[Tensor]) -> tuple[int, Any]:
    """Bytes that live on after a forward pass while only its graph is held, and that graph's last node.

    Every memory counts once, however it is kept: saved by autograd, by a region or by a view. `without` (weights, the batch)
    is not counted, and neither is the result unless something saved it. No garbage is collected first: a cycle would count.
    """
    node: list[Any] = []
    size = alive_bytes(lambda: node.append(forward().grad_fn), without=without)
    return size, node[0]


def alive_bytes(run: Callable[[], object], *, without: Iterable[Tensor]) -> int:
    """Bytes that were made in a run and live on after it."""
    known = {x.untyped_storage()._weak_ref() for x in without}
    watch = _Watch()
    with watch:
        run()
    pauses_s = (0.0, 0.02) if dist.is_initialized() else (0.0,)
    return min(_alive(watch, known, pause_s) for pause_s in pauses_s)


def _alive(watch: _Watch, known: set[Any], pause_s: float) -> int:
    """A thread that communicates may hold its last buffer for a moment."""
    time.sleep(pause_s)
    alive = {ref: size for ref, size in watch.seen if not torch.UntypedStorage._expired(ref)}
    return sum(size for ref, size in alive.items() if ref not in known)
