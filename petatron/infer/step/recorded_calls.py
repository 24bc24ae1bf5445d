"""The tensor operations of a function on fixed tensors, recorded once and repeated without the Python around them.

What a CUDA graph is to kernels, this is to calls of PyTorch on a CPU. A decode step of a small model is a thousand such calls of a few
microseconds, and as much time again passes in the modules, contexts and checks between them. A recording keeps every tensor of the
function where it is. Then views need not be made again: they still show what they showed. What computes is called again with its
result as `out`, in the order of the first time.

    recorded      t = view(weight)    y = mm(x, t)         z = view(y)    s = silu(z)
    repeated                          mm(x, t, out=y)                     silu(z, out=s)

So weights may change in place between repetitions, and inputs are changed by writing to the tensors that the function read. What Python
decides from values is not repeated; `Unrecordable` is raised where it reads one through an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[[], Any]


class Unrecordable(Exception):
    """An operation gives a value to Python, which may decide by it what comes next."""


class RecordedCalls:
    """Runs a function, and repeats its tensor operations."""

    def __init__(self, function: Callable[[], Any]) -> None:
        recorder = _Recorder()
        with recorder:
            self.outputs = function()
        self._calls = recorder.calls

    def __len__(self) -> int:
        return len(self._calls)

    def repeat(self) -> Any:
        """Computes the outputs anew, in the same tensors, and returns them."""
        for call in self._calls:
            call()
        return self.outputs


class _Recorder(TorchDispatchMode):
    """Runs operations, and keeps those that compute as calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # what is made of other operations is recorded as those
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        found = func(*args, **kwargs)
        results = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if not all(isinstance(result, Tensor) for result in results):
            if any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
                raise Unrecordable(f"{func} gives a value to Python")
            return found  # of dtypes and sizes
        if func._schema.is_mutable:
            self.calls.append(partial(_binding(func), *args, **kwargs))
        elif not all(_is_view(result, (*args, *kwargs.values())) for result in results):
            self.calls.append(_call_into(func, args, kwargs, results))
        return found


def _is_view(result: Tensor, args: Sequence[Any]) -> bool:
    """Whether a result has the memory of an argument."""
    memory = result.untyped_storage().data_ptr()
    return any(isinstance(arg, Tensor) and arg.untyped_storage().data_ptr() == memory for arg in args)


def _name(func: Any) -> str:
    """
    >>> _name(torch.ops.aten.add.Tensor)
    'add'
    """
    return func._schema.name.split("::")[1]


def _binding(func: Any) -> Callable[..., Any]:
    """Returns the method of tensors for an operation in place, which is called faster than the operation itself."""
    name = _name(func)
    return getattr(Tensor, name, func) if name.endswith("_") else func


def _call_into(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: tuple[Tensor, ...]) -> Call:
    """Returns a call that computes the results anew in their own memory; of several results the first."""
    if len(results) == 1:
        for holder in (torch, torch._C._nn):
            function = getattr(holder, _name(func), None)
            if function is not None and _writes_the_same(function, args, kwargs, results[0]):
                return partial(function, *args, **kwargs, out=results[0])
    return partial(_copy_results, getattr(torch, _name(func), func), args, kwargs, results)


def _writes_the_same(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
) -> bool:
    """Whether a function takes these arguments and an `out`, and then computes the same; operations of one name may differ."""
    out = torch.empty_like(result)
    try:
        function(*args, **kwargs, out=out)
    except (TypeError, RuntimeError, ValueError):
        return False
    return out.stride() == result.stride() and torch.equal(out, result)


def _copy_results(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], results: tuple[Tensor, ...]
) -> None:
    found = function(*args, **kwargs)
    for result, new in zip(results, found if isinstance(found, tuple) else (found,), strict=True):
        result.copy_(new)
