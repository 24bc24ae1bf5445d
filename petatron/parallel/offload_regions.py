"""Maps a saved tensor to the module (offload region) that saved it, for offload by module.

Layers declare their regions (`offload_regions`). A tensor that is saved while a region's module runs belongs to the innermost such region.
The function of a norm or activation may be applied outside its module, often in one autograd node with the GEMM of its output. So the
function reports the tensors that it saves (`SavedTensorsHook`), just before autograd's saved-tensor hook receives them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from petatron.layers.ops.recompute_output import SavedTensorsHook, Tensors
from petatron.layers.transformer_layer import TransformerLayer


class OffloadRegions:
    """The offload regions of a stage's layers, and which region runs now.

    Declare after recompute is applied: recompute regions run inside offload regions.
    """

    def __init__(self) -> None:
        self._running: list[str] = []
        self._region_by_storage: dict[int, str] = {}

    def declare(self, layer: TransformerLayer) -> None:
        """Wraps the layer's modules to track which one runs."""
        for name, module in layer.offload_regions():
            if isinstance(module, SavedTensorsHook):
                module.on_saved = partial(self._record_saved, name)
            else:
                module.forward = self._region(name, module.forward)

    def enter_layer(self) -> None:
        """Clears the previous layer's entries."""
        self._region_by_storage.clear()

    def region_of(self, saved: Tensor) -> str | None:
        """Returns the region that saves a tensor; None outside all regions."""
        recorded = self._region_by_storage.get(saved.untyped_storage()._cdata)
        return recorded or (self._running[-1] if self._running else None)

    def _record_saved(self, name: str, saved: Tensors) -> None:
        # The graph or the copies to the host keep these storages alive: no other storage has their addresses while the layer runs.
        self._region_by_storage.update((tensor.untyped_storage()._cdata, name) for tensor in saved)

    def _region(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **options: Any) -> Any:
            self._running.append(name)
            try:
                return run(*args, **options)
            finally:
                self._running.pop()

        return forward
