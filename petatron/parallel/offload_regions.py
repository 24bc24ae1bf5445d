"""Which module of a layer a tensor is saved in, as its saved-tensor hook runs: for offload by module.

Layers declare their regions (`offload_regions`). While a module runs, what is saved belongs to it, or to a module inside it that is a
region too. The function of a norm or activation is applied elsewhere, often in one autograd node with the GEMM of its output: it tells
which tensors it saves (`SavedListenerSlot`), just before the hook sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from petatron.layers.ops.recompute_output import SavedListenerSlot, Tensors
from petatron.layers.transformer_layer import TransformerLayer


class OffloadRegions:
    """The regions of a stage's layers, and the one that runs. Called last: recompute regions run inside those of offload."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._told: dict[int, str] = {}

    def declare(self, layer: TransformerLayer) -> None:
        """Makes the modules of a layer tell when they run."""
        for name, module in layer.offload_regions():
            if isinstance(module, SavedListenerSlot):
                module.on_saved = partial(self._tell, name)
            else:
                module.forward = self._region(name, module.forward)

    def enter_layer(self) -> None:
        """Forgets what another layer saved."""
        self._told.clear()

    def region_of(self, saved: Tensor) -> str | None:
        """Returns the region that saves a tensor, if it is in any."""
        told = self._told.get(saved.untyped_storage()._cdata)
        return told or (self._running[-1] if self._running else None)

    def _tell(self, name: str, saved: Tensors) -> None:
        # The graph holds them, or the copies to the host do: no other storage has these addresses while the layer runs.
        self._told.update((tensor.untyped_storage()._cdata, name) for tensor in saved)

    def _region(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **options: Any) -> Any:
            self._running.append(name)
            try:
                return run(*args, **options)
            finally:
                self._running.pop()

        return forward
