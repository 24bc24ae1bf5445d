"""Launches of kernels: the compiled kernel of arguments seen before is launched at once, and never that of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton import kernel_launch
from petatron.kernels.triton.kernel_launch import KernelLauncher, kernel_launcher, specialization


def _scale(x, y, rows, factor, WIDTH: tl.constexpr, ADD: tl.constexpr):  # compiled by nobody here
    pass


class Device:
    """Stands for Triton and the driver: what was compiled, and what was launched how."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow: list[tuple[Any, ...]] = []
        self.fast: list[tuple[Any, ...]] = []
        self.hooks = SimpleNamespace(calls=[])
        monkeypatch.setattr(triton.JITFunction, "run", self._run)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # that of tensors on a CPU
        monkeypatch.setattr(kernel_launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=str)))
        runtime = SimpleNamespace(launch_enter_hook=self.hooks, launch_exit_hook=SimpleNamespace(calls=[]))
        monkeypatch.setattr(kernel_launch, "_runtime", runtime)

    def _run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> Any:
        self.slow.append((grid, args, kwargs))
        number = len(self.slow)
        return SimpleNamespace(
            run=lambda *launch: self.fast.append(launch), function=f"function {number}", packed_metadata=number
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def tensors(count: int = 2, *, dtype: torch.dtype = torch.float32, skipped: int = 0) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(64, dtype=dtype)[skipped:] for _ in range(count))


CONSTANTS = {"WIDTH": 8, "ADD": False, "num_warps": 4}


def launcher(**different: Any) -> KernelLauncher:
    return KernelLauncher(triton.JITFunction(_scale), **CONSTANTS | different)


def test_a_second_launch_goes_to_the_kernel_that_the_first_compiled(device: Device):
    launch = KernelLauncher(triton.JITFunction(_scale), ADD=True, WIDTH=8, num_warps=2, launch_pdl=True)
    x, y = tensors()
    launch(5, (x, y), (7, 0.5))
    assert device.slow == [((5, 1), (x, y, 7, 0.5), {"ADD": True, "WIDTH": 8, "num_warps": 2, "launch_pdl": True})]
    others = tensors()
    launch(6, others, (7, 0.5), grid_y=3)
    addresses = [tensor.data_ptr() for tensor in others]
    # The arguments of `CompiledKernel.run`: grid, stream, function, metadata, hooks, then every parameter in its order.
    assert device.fast == [(6, 3, 1, "-1", "function 1", 1, None, None, None, *addresses, 7, 0.5, 8, True)]
    assert len(device.slow) == 1


DIFFERENT = {
    "a number that is 1": {"scalars": (1, 0.5)},
    "a multiple of 16": {"scalars": (48, 0.5)},
    "a wide number": {"scalars": (7 + 2**32, 0.5)},
    "the type of a number": {"scalars": (7.0, 0.5)},
    "a dtype": {"tensors": tensors(dtype=torch.bfloat16)},
    "the dtype of one": {"tensors": (tensors()[0], tensors(dtype=torch.bfloat16)[0])},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_whatever_is_different_is_compiled_for_itself(device: Device, what: str):
    launch = launcher()
    usual = {"tensors": tensors(), "scalars": (7, 0.5)}
    for arguments in (usual, usual | DIFFERENT[what]):
        for _ in range(2):
            launch(3, **arguments)
    assert len(device.slow) == 2
    assert [launched[4] for launched in device.fast] == ["function 1", "function 2"]


def test_other_numbers_of_a_kind_are_launched_at_once(device: Device):
    """With their own values; as the rows of experts, which no two micro-batches have in common."""
    launch = launcher()
    for numbers in ((7, 0.5), (8, 0.5), (8, 0.25), (2**31 - 1, -1.0), (32, 0.5), (64, 1.0), (7, 0.5)):
        launch(3, tensors(), numbers)
    assert [args[2:] for _, args, _ in device.slow] == [(7, 0.5), (32, 0.5)]
    launched = [(call[4], *call[-4:-2]) for call in device.fast]
    first = [("function 1", *numbers) for numbers in ((8, 0.5), (8, 0.25), (2**31 - 1, -1.0))]
    assert launched == [*first, ("function 2", 64, 1.0), ("function 1", 7, 0.5)]


def test_kinds_of_numbers_are_those_that_triton_tells_apart():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    found: dict[object, object] = {}
    wide = [sign * 2**power + more for sign in (1, -1) for power in (31, 32, 40) for more in (-16, -1, 0, 1, 8, 16)]
    for number in (*range(-40, 130), *wide, -1.0, 0.0, 0.5, 1.0, 16.0):
        triton_s = native_specialize_impl(BaseBackend, number, False, True, True)
        assert found.setdefault(specialization(number), triton_s) == triton_s, number
    assert len(set(found.values())) == len(found) == 6


def test_constants_and_options_are_those_of_the_launcher(device: Device):
    for different in ({}, {"WIDTH": 16}, {"ADD": True}, {"num_warps": 8}, {"launch_pdl": True}):
        launch = launcher(**different)
        for _ in range(2):
            launch(3, tensors(), (7, 0.5))
        assert device.slow[-1][2] == CONSTANTS | different
        constants = [device.slow[-1][2][name] for name in ("WIDTH", "ADD")]
        assert device.fast[-1][4] == f"function {len(device.slow)}" and list(device.fast[-1][-2:]) == constants
    assert len(device.slow) == len(device.fast) == 5


def test_the_launcher_of_a_kernel_is_found_again(device: Device):
    kernel = triton.JITFunction(_scale)
    launch = kernel_launcher(kernel, **CONSTANTS)
    assert kernel_launcher(kernel, **CONSTANTS) is launch
    assert kernel_launcher(kernel, **CONSTANTS | {"WIDTH": 16}) is not launch
    assert kernel_launcher(triton.JITFunction(_scale), **CONSTANTS) is not launch


def test_an_option_of_the_compiler_is_no_argument_of_the_kernel(device: Device):
    launch = launcher(maxnreg=80)
    for _ in range(2):
        launch(3, tensors(), (7, 0.5))
    assert device.slow[0][2] == CONSTANTS | {"maxnreg": 80} and device.fast[0][-4:] == (7, 0.5, 8, False)


def test_unaligned_tensors_and_watched_launches_are_left_to_triton(device: Device):
    launch = launcher()
    launch(1, tensors(), (7, 0.5))
    for skipped in (1, 1):
        launch(1, tensors(skipped=skipped), (7, 0.5))
    device.hooks.calls.append("somebody")
    launch(1, tensors(), (7, 0.5))
    assert len(device.slow) == 4 and not device.fast
    device.hooks.calls.clear()
    launch(1, tensors(), (7, 0.5))
    assert len(device.slow) == 4 and len(device.fast) == 1


def test_not_more_than_some_are_cached(device: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_launch, "_MAX_CALLS", 3)
    launch = launcher()
    for rows in (2, 3, 4, 5, 2):
        launch(1, tensors(), (rows, 0.5))
    assert len(device.slow) == 1 and len(launch._calls) == 2


def test_another_device_than_the_current_one_is_not_cached(device: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch = launcher()
    for _ in range(2):
        launch(1, tensors(), (7, 0.5))
    assert len(device.slow) == 2 and not device.fast


def test_compiled_kernels_have_what_is_cached_of_them():
    """Triton's own names: `run` with grid, stream, function, metadata and hooks before all parameters, constants among them."""
    from triton.compiler import CompiledKernel

    assert isinstance(CompiledKernel.run, property) and callable(CompiledKernel.launch_metadata)
    code = CompiledKernel.__init__.__code__
    assert {"packed_metadata", "function"} <= set(code.co_names)
    assert triton.knobs.runtime.launch_enter_hook.calls == triton.knobs.runtime.launch_exit_hook.calls == []
