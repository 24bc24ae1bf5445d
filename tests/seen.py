"""Counts what torch is asked to do, below autograd: copies, or reads of single numbers by the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """How often one of the `names` (as in `aten::clone`) was called with at least so many `elements` coming out."""

    def __init__(self, *names: str, elements: int = 0) -> None:
        super().__init__()
        self.names, self.elements, self.count = names, elements, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        size = out.numel() if isinstance(out, Tensor) else 1
        if func.overloadpacket.__name__ in self.names and size >= self.elements:
            self.count += 1
        return out
