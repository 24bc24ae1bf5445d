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
from torch.utils._pytree import tree_leaves

Call = Callable[[], Any]
_MODULES = (torch, torch._C._nn)
"""Where functions have the names of operations."""


class Unrecordable(Exception):
    """An operation gives a value to Python, which may decide by it what comes next."""


class RecordedCalls:
    """Runs a function, and repeats its tensor operations."""

    def __init__(self, function: Callable[[], Any]) -> None:
        recorder = _Recorder()
        # Outside inference mode operations that are made of others arrive here as those.
        with torch.inference_mode(False), torch.no_grad(), recorder:
            self.outputs = function()
        self._calls = recorder.calls_to_repeat()

    def __len__(self) -> int:
        return len(self._calls)

    def repeat(self) -> Any:
        """Computes the outputs anew, in the same tensors, and returns them."""
        for call in self._calls:
            call()
        return self.outputs


class _Recorder(TorchDispatchMode):
    """Runs operations, and keeps those that compute as calls.

    What is made of no tensor (a range, a constant) is made once, unless an operation writes to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Call, int | None]] = []  # with the memory of what is made of no tensor
        self._written: set[int] = set()
        self._functions: dict[tuple[Any, int, tuple[str, ...]], Callable[..., Any] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks this of a mode; True would import its compiler, which takes longer than most generations."""
        return False

    def calls_to_repeat(self) -> list[Call]:
        return [call for call, memory in self._calls if memory is None or memory in self._written]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result_of_call = func(*args, **kwargs)
        results = tuple(result_of_call) if isinstance(result_of_call, (tuple, list)) else (result_of_call,)
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        if not all(isinstance(result, Tensor) for result in results):
            if inputs:
                raise Unrecordable(f"{func} gives a value to Python")
            return result_of_call  # of dtypes or sizes
        if func._schema.is_mutable:
            self._written.update(_memory(tensor) for tensor in _written(func, args, kwargs))
            self._calls.append((self._call_in_place(func, args, kwargs), None))
        elif not {_memory(result) for result in results} <= {_memory(tensor) for tensor in inputs}:  # else views
            constant = None if inputs else _memory(results[0])
            self._calls.append((self._call_into(func, args, kwargs, results), constant))
        return result_of_call

    def _call_in_place(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Returns the call of an operation that writes to its arguments."""
        name = _name(func)
        if name.endswith("_"):
            return partial(getattr(Tensor, name, func), *args, **kwargs)
        others = {key: value for key, value in kwargs.items() if key != "out"}
        function = self._function_with_out(func, args, others, kwargs["out"]) if "out" in kwargs else None
        return partial(function or func, *args, **kwargs)

    def _call_into(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: tuple[Tensor, ...]
    ) -> Call:
        """Returns a call that computes the results anew in their own memory."""
        if _name(func) in ("clone", "_to_copy"):
            return partial(results[0].copy_, args[0])
        if _name(func) == "embedding":  # which has no `out`, but is the selection of rows
            rows = results[0].view(-1, results[0].shape[-1])
            return partial(torch.index_select, args[0], 0, args[1].reshape(-1), out=rows)
        function = self._function_with_out(func, args, kwargs, results[0]) if len(results) == 1 else None
        if function is not None:
            return partial(function, *args, **kwargs, out=results[0])
        return partial(_copy_results, getattr(torch, _name(func), func), args, kwargs, results)

    def _function_with_out(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> Callable[..., Any] | None:
        """Returns the function with an operation's name that takes its arguments and an `out`, and writes the same result, if there is one.

        It is called faster than the operation itself.
        """
        key = func, len(args), tuple(kwargs)
        if key not in self._functions:
            candidates = (getattr(module, _name(func), None) for module in _MODULES)
            same = (call for call in candidates if call is not None and _writes(call, args, kwargs, result))
            self._functions[key] = next(same, None)
        return self._functions[key]


def _memory(x: Tensor) -> int:
    """Returns the address of a tensor's memory; an opaque tensor (a packed weight) shares it with no other."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else -id(x)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the arguments that an operation writes to."""
    named = {**kwargs} | {argument.name: value for argument, value in zip(func._schema.arguments, args)}
    described = [argument for argument in func._schema.arguments if argument.alias_info is not None]
    changed = [named.get(argument.name) for argument in described if argument.alias_info.is_write]
    return [value for value in tree_leaves(changed) if isinstance(value, Tensor)]


def _name(func: Any) -> str:
    """
    >>> _name(torch.ops.aten.add.Tensor)
    'add'
    """
    return func._schema.name.split("::")[1]


def _writes(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> bool:
    out = torch.empty_like(result)
    try:
        return function(*args, **kwargs, out=out) is out and torch.equal(out, result)
    except (TypeError, RuntimeError, ValueError):  # it takes other arguments
        return False


def _copy_results(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], results: tuple[Tensor, ...]
) -> None:
    computed = function(*args, **kwargs)
    for result, new in zip(results, computed if isinstance(computed, (tuple, list)) else (computed,), strict=True):
        result.copy_(new)
