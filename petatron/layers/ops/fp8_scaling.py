"""Quantisers of activations and gradients: the scale comes from the tensor itself, or from the amax of past steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import Fp8Kernels, Fp8Matrix


class Quantiser(Protocol):
    """Quantises a tensor, with state or without."""

    def __call__(self, x_RC: Tensor) -> Fp8Matrix: ...

    def new_step(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CurrentScaling:
    """Scales come from the tensor itself."""

    cast: Callable[[Tensor], Fp8Matrix]

    def __call__(self, x_RC: Tensor) -> Fp8Matrix:
        return self.cast(x_RC)

    def new_step(self) -> None:
        pass


class DelayedScaling:
    """The scale comes from the amax of past steps, so that a cast is one pass.

    Between `pause` and the next step amax is not recorded: an evaluation does not change what is trained.
    """

    def __init__(self, kernels: Fp8Kernels, dtype: torch.dtype, *, length: int, most_recent: bool) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._length, self._most_recent = length, most_recent
        self._history: Tensor | None = None
        self._scale: Tensor | None = None
        self._position = 0
        self._used = False
        self._paused = False

    def __call__(self, x_RC: Tensor) -> Fp8Matrix:
        amax = self._current_amax(x_RC.device)
        if self._scale is not None:
            return self._kernels.cast_delayed(x_RC, self._dtype, scale=self._scale, amax=amax)
        self._kernels.update_amax(x_RC, amax)
        return self._kernels.cast_tensor(x_RC, self._dtype, amax=amax)

    def _current_amax(self, device: torch.device) -> Tensor:
        """Returns the history entry of this step's amax."""
        if self._paused:
            return torch.zeros(1, dtype=torch.float32, device=device)
        history = self._history
        if history is None:
            history = self._history = torch.zeros(self._length, dtype=torch.float32, device=device)
        self._used = True
        return history[self._position : self._position + 1]

    def pause(self) -> None:
        self._paused = True

    def new_step(self) -> None:
        self._paused = False
        if not self._used:
            return
        assert self._history is not None
        # A new tensor: what was quantised in the last step still refers to its scale.
        self._scale = torch.empty(1, dtype=torch.float32, device=self._history.device)
        following = (self._position + 1) % self._length
        self._kernels.update_scale(
            self._history,
            self._scale,
            self._dtype,
            latest=self._position,
            cleared=following,
            most_recent=self._most_recent,
        )
        self._position, self._used = following, False

    @property
    def kind(self) -> str:
        """Identifies the state's format: only a state of the same kind can be loaded."""
        return f"{self._dtype} over {self._length} steps"

    def state(self) -> Tensor:
        """Returns [2 + length] on the host: the scale (0: none yet), whether the history was updated in this step (1 or 0), and
        the history from its current entry on."""
        history = torch.zeros(self._length) if self._history is None else self._history.cpu().roll(-self._position)
        scale = torch.zeros(1) if self._scale is None else self._scale.cpu()
        return torch.cat([scale, torch.tensor([float(self._used)]), history])

    def load_state(self, state: Tensor, device: torch.device) -> None:
        scale, used = state[:2].tolist()
        self._scale = state[:1].to(device, copy=True) if scale else None
        self._history = state[2:].to(device, copy=True)
        self._position, self._used = 0, bool(used)
