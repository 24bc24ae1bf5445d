"""Quantizers of activations and gradients: the scale comes from the tensor itself, or from the amax of past steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petatron.kernels.fp8.amax import attached_amax, new_amax
from petatron.kernels.fp8.cast_and_gemm import CastKernel, Fp8Kernels, Fp8Matrix, Orientation


class Quantizer(Protocol):
    """Quantizes a tensor, with state or without."""

    def __call__(self, x_RC: Tensor, *, orientation: Orientation = "both") -> Fp8Matrix: ...

    def new_step(self) -> None: ...


class CurrentTensorwiseScaling:
    """One scale from the tensor itself: from its attached amax if it has one, else by a speculative cast with the previous scale.

    That is checked, and repeated where the scale differs. Bits never depend on the previous scale, so a checkpoint need not have it.
    """

    def __init__(self, kernels: Fp8Kernels, dtype: torch.dtype) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._previous_scale: Tensor | None = None

    def __call__(self, x_RC: Tensor, *, orientation: Orientation = "both") -> Fp8Matrix:
        amax = attached_amax(x_RC)
        if amax is not None:
            return self._kernels.cast_tensor(x_RC, self._dtype, amax=amax, orientation=orientation)
        if self._previous_scale is None:
            self._previous_scale = _new_state(1, 1.0, x_RC.device)
        return self._kernels.cast_speculative(
            x_RC, self._dtype, previous_scale=self._previous_scale, orientation=orientation
        )

    def new_step(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StatelessScaling:
    """A scale for each row or block, from the tensor itself."""

    cast: CastKernel
    dtype: torch.dtype

    def __call__(self, x_RC: Tensor, *, orientation: Orientation = "both") -> Fp8Matrix:
        return self.cast(x_RC, self.dtype, orientation=orientation)

    def new_step(self) -> None:
        pass


class DelayedScaling:
    """The scale comes from the amax of past steps, so that a cast is one pass.

    Between `pause` and the next step amax is not recorded: an evaluation does not change what is trained. The scale holds for one step:
    what was quantized in a step is used before the next begins.
    """

    def __init__(self, kernels: Fp8Kernels, dtype: torch.dtype, *, length: int, most_recent: bool) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._length, self._most_recent = length, most_recent
        self._history: Tensor | None = None
        self._scale: Tensor | None = None
        self._used = False
        self._paused = False

    def __call__(self, x_RC: Tensor, *, orientation: Orientation = "both") -> Fp8Matrix:
        amax, kernels = self._current_amax(x_RC.device), self._kernels
        if self._scale is not None:
            return kernels.cast_with_scale(x_RC, self._dtype, scale=self._scale, amax=amax, orientation=orientation)
        # Its own amax, not that of all micro-batches so far: one that is recomputed after others is cast to the same bits.
        current = new_amax(x_RC)
        kernels.update_amax(x_RC, current)
        torch.maximum(amax, current, out=amax)
        return kernels.cast_tensor(x_RC, self._dtype, amax=current, orientation=orientation)

    def _current_amax(self, device: torch.device) -> Tensor:
        """Returns the history entry of this step's amax."""
        if self._paused:
            return torch.zeros(1, dtype=torch.float32, device=device)
        history = self._history
        if history is None:
            history = self._history = _new_state(self._length, 0.0, device)
        self._used = True
        return history[:1]

    def pause(self) -> None:
        self._paused = True

    def new_step(self) -> None:
        self._paused = False
        if not self._used:
            return
        assert self._history is not None
        if self._scale is None:
            self._scale = torch.empty(1, dtype=torch.float32, device=self._history.device)
        # In place, and always at the same entry: a CUDA graph that captured a step finds them where they were.
        self._kernels.update_scale(self._history, self._scale, self._dtype, most_recent=self._most_recent)
        self._used = False

    @property
    def kind(self) -> str:
        """Identifies the state's format: only a state of the same kind can be loaded."""
        return f"{self._dtype} over {self._length} steps"

    def state(self) -> Tensor:
        """Returns [2 + length] on the host: the scale (0: none yet), whether the history was updated in this step (1 or 0), and
        the history, its current entry first."""
        history = torch.zeros(self._length) if self._history is None else self._history.cpu()
        scale = torch.zeros(1) if self._scale is None else self._scale.cpu()
        return torch.cat([scale, torch.tensor([float(self._used)]), history])

    def load_state(self, state: Tensor, device: torch.device) -> None:
        scale, used = state[:2].tolist()
        if self._scale is not None and self._history is not None and scale:
            self._scale.copy_(state[:1])
            self._history.copy_(state[2:])
        else:
            self._scale = state[:1].to(device, copy=True) if scale else None
            self._history = state[2:].to(device, copy=True)
        self._used = bool(used)

    def undo_point(self) -> Callable[[], None]:
        """Returns a function that undoes what the host has noted since, of casts that the device has not run."""
        scale, used, paused = self._scale, self._used, self._paused

        def undo() -> None:
            self._scale, self._used, self._paused = scale, used, paused

        return undo


@torch.inference_mode(False)
def _new_state(length: int, value: float, device: torch.device) -> Tensor:
    """Returns state of a quantizer; what an evaluation in inference mode creates, a training step has to be able to change."""
    return torch.full((length,), value, dtype=torch.float32, device=device)
