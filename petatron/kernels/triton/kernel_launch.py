"""Caches the launch of Triton kernels that are called again and again with arguments of the same kind.

`kernel[grid](...)` finds out at every call which compiled kernel it needs: Triton compiles one for each combination of constants,
dtypes, and of what it specializes for (16-byte aligned addresses, integers that are 1 or multiples of 16, their width). That takes the
host longer than most kernels of a small model take the device. A `KernelLauncher` has a kernel with its constants and launch options,
which its module builds once for each width or kind; if all addresses are aligned, it caches the compiled kernel by

    device, dtypes of tensors, types and values of scalars                 the same call as before: one look-up
    device, dtypes of tensors, what Triton specializes scalars for         scalars that change, as rows of experts do

Whatever is new, not aligned, or watched by hooks takes Triton's own way; so does everything under Triton's interpreter.
"""

from __future__ import annotations

from functools import cache, reduce
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction, knobs
from triton.runtime.driver import driver

_ALIGNMENT = 16
_MAX_CALLS = 512
"""Sizes may change with every call, as those of generation do: then as many calls are cached."""
_INT32 = range(-(2**31), 2**31)
_address, _dtype, _runtime = Tensor.data_ptr, attrgetter("dtype"), knobs.runtime


class KernelLauncher:
    """Launches one kernel with some constants; its parameters are tensors, then scalars, then constants.

    constants: also compile options of Triton, such as `maxnreg`.
    """

    def __init__(self, kernel: Any, *, num_warps: int, launch_pdl: bool = False, **constants: Any) -> None:
        self._kernel, self._constants = kernel, constants
        self._options = {"num_warps": num_warps} | ({"launch_pdl": True} if launch_pdl else {})
        self._is_compiled = isinstance(kernel, JITFunction)
        self._calls: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._by_specialization: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self, grid_x: int, tensors: tuple[Tensor, ...], scalars: tuple[int | float, ...] = (), grid_y: int = 1
    ) -> None:
        """Launches a grid of programs."""
        device, addresses = tensors[0].get_device(), [*map(_address, tensors)]
        aligned = reduce(or_, addresses) % _ALIGNMENT == 0
        key = (device, scalars, *map(type, scalars), *map(_dtype, tensors))
        call = self._calls.get(key) if aligned else None
        if call is None and aligned:
            call = self._find_by_specialization(key, tensors, scalars)
        if call is None or _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls:
            compiled = self._kernel[(grid_x, grid_y)](*tensors, *scalars, **self._constants, **self._options)
            if self._is_compiled and aligned and device == torch.cuda.current_device():
                self._cache_compiled(key, compiled, tensors, scalars)
            return
        run, function, metadata, stream_of, others = call
        # An address is as good as a tensor, which Triton would only ask for it.
        run(grid_x, grid_y, 1, stream_of(device), function, metadata, None, None, None, *addresses, *others)

    def _find_by_specialization(
        self, key: tuple[Any, ...], tensors: tuple[Tensor, ...], scalars: tuple[int | float, ...]
    ) -> tuple[Any, ...] | None:
        """Returns the call of a kernel compiled for scalars of the same specialization, with these scalars."""
        compiled = self._by_specialization.get((key[0], *map(specialization, scalars), *map(_dtype, tensors)))
        if compiled is None:
            return None
        *call, constants = compiled
        return self._cache_call(key, (*call, (*scalars, *constants)))

    def _cache_compiled(
        self, key: tuple[Any, ...], compiled: Any, tensors: tuple[Tensor, ...], scalars: tuple[int | float, ...]
    ) -> None:
        """Caches a compiled kernel, with its arguments after the tensors in the order of its parameters."""
        constants = tuple(self._constants[name] for name in self._kernel.arg_names if name in self._constants)
        run = compiled.run  # loads the binary, without which there is no function
        call = (run, compiled.function, compiled.packed_metadata, driver.active.get_current_stream)
        self._by_specialization[key[0], *map(specialization, scalars), *map(_dtype, tensors)] = (*call, constants)
        self._cache_call(key, (*call, (*scalars, *constants)))

    def _cache_call(self, key: tuple[Any, ...], call: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(self._calls) >= _MAX_CALLS:
            self._calls.clear()
        self._calls[key] = call
        return call


def specialization(number: int | float) -> tuple[bool, ...] | None:
    """Returns what Triton compiles a kernel of its own for: an integer that is 1, a multiple of 16, or wider than 32 bits."""
    return None if isinstance(number, float) else (number == 1, number % 16 == 0, number in _INT32)


kernel_launcher = cache(KernelLauncher)
"""Returns the launcher of a kernel with these constants, the same one at every call."""
