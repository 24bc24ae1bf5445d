"""Launches kernels that are called again and again with arguments of the same kind.

`kernel[grid](...)` finds out at every call which compiled kernel it needs: Triton compiles one for each combination of constants,
dtypes, and of what it specialises for (16-byte aligned addresses, integers that are 1 or multiples of 16, their width). That takes the
host longer than most kernels of a small model take the device. `KernelLauncher` remembers the compiled kernel instead, by

    device, constants, launch options, dtypes of tensors, types and values of numbers, if all addresses are aligned

Numbers count by value, which tells apart more than Triton does, so nothing that Triton would tell apart is mixed up. Whatever is
new, not aligned, or watched by hooks takes Triton's own way; so does everything under Triton's interpreter.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from functools import reduce
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction, knobs
from triton.runtime.driver import driver

_ALIGNMENT = 16
_MAX_REMEMBERED = 512
"""Sizes may change with every call, as those of generation do: then as many are remembered."""
_dtype, _runtime = attrgetter("dtype"), knobs.runtime


class KernelLauncher:
    """Launches one kernel, whose parameters are tensors, then numbers, then constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._remembers = isinstance(kernel, JITFunction)
        self._remembered: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        *,
        num_warps: int,
        launch_pdl: bool = False,
        **constants: Any,
    ) -> None:
        """Launches so many programs."""
        device, addresses = tensors[0].get_device(), [*map(Tensor.data_ptr, tensors)]
        aligned = reduce(or_, addresses) % _ALIGNMENT == 0
        key = (
            device,
            num_warps,
            launch_pdl,
            numbers,
            *map(type, numbers),
            *map(_dtype, tensors),
            *constants,
            *constants.values(),
        )
        found = self._remembered.get(key) if aligned else None
        if found is None or _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls:
            compiled = self._launch(programs, tensors, numbers, constants, num_warps, launch_pdl)
            if self._remembers and aligned and device == torch.cuda.current_device():
                self._remember(key, compiled, numbers, constants)
            return
        run, function, metadata, stream_of, others = found
        # An address is as good as a tensor, which Triton would only ask for it.
        run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *addresses, *others)

    def _launch(
        self,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        num_warps: int,
        launch_pdl: bool,
    ) -> Any:
        options = {"launch_pdl": True} if launch_pdl else {}
        return self._kernel[(programs,)](*tensors, *numbers, **constants, num_warps=num_warps, **options)

    def _remember(
        self, key: tuple[Any, ...], compiled: Any, numbers: tuple[int | float, ...], constants: dict[str, Any]
    ) -> None:
        """Remembers a compiled kernel, and its arguments after the tensors in the order of its parameters."""
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        ordered = (constants[name] for name in self._kernel.arg_names if name in constants)
        stream_of = driver.active.get_current_stream
        run = compiled.run  # loads the binary, without which there is no function
        self._remembered[key] = (run, compiled.function, compiled.packed_metadata, stream_of, (*numbers, *ordered))
