"""The tensors that a step's forward passes save for backward, by the module that saves them.

A hook sees every tensor that autograd saves; the module is the innermost one whose method is on the Python stack then. Each storage
counts once, for the first that saves it. Parts of a model that are recomputed or offloaded have hooks of their own, and what they
save is not seen here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_OUTSIDE = "outside modules"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A storage that is saved for backward: its address, bytes, dtype, and the module that saved it."""

    address: int
    size: int
    dtype: torch.dtype
    module: str


class SavedTensorLog:
    """What forward passes saved: the last storage of each address, and those alive when most bytes were."""

    def __init__(self, modules: Mapping[nn.Module, str], parameters: Iterable[Tensor]) -> None:
        """`modules` are names; what shares the memory of `parameters` does not count."""
        self._modules = modules
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._alive: dict[int, tuple[Any, SavedTensor]] = {}
        self.by_address: dict[int, SavedTensor] = {}
        self.at_peak: list[SavedTensor] = []

    def recording(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._parameters:
            for freed in [at for at, (ref, _) in self._alive.items() if torch.UntypedStorage._expired(ref)]:
                torch.UntypedStorage._free_weak_ref(self._alive.pop(freed)[0])
            if address not in self._alive:
                saved = SavedTensor(address, storage.nbytes(), tensor.dtype, self._saving_module())
                self._alive[address] = (storage._weak_ref(), saved)
                self.by_address[address] = saved
                now = [saved for _, saved in self._alive.values()]
                if sum(saved.size for saved in now) >= sum(saved.size for saved in self.at_peak):
                    self.at_peak = now
        return tensor.detach()  # the tensor itself may be an output of the node that saves it: a cycle

    def _saving_module(self) -> str:
        frame = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._modules:
                return self._modules[owner]
            frame = frame.f_back
        return _OUTSIDE

    def close(self) -> None:
        for ref, _ in self._alive.values():
            torch.UntypedStorage._free_weak_ref(ref)
        self._alive.clear()
