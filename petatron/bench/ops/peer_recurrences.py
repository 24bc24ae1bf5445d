"""Recurrent kernels of other libraries that `petatron bench kernels --peer-path DIR` times beside ours: the field's own, in Triton.

- state-spaces' mamba_ssm: the selective scan of Mamba-2, `mamba_chunk_scan_combined`. Its package imports extensions in CUDA that its
  scan does not need, so it is imported from a copy whose `__init__.py` is empty; the kernels are as published.
- flash-linear-attention: the gated delta rule, `chunk_gated_delta_rule`, and that with decays of channels, `chunk_kda`.

They take the batch before the sequence. Inputs are copied into that order once, before anything is timed, and gradients are
timed by themselves, over a graph that is kept. Where a library refuses or fails, the row says why.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import Problem
from petatron.bench.peers.peer_source import PeerSource, folder_problems, peer_sources

_Grads = tuple[Tensor | None, ...]


def peer_recurrences(operation: str, paths: Sequence[Path]) -> dict[str, Any]:
    """Returns the implementations of an operation that are in the folders, by name and version."""
    package, build = _PEERS[operation]
    return {str(source): build(source) for source in peer_sources(package, paths)[:1]}


def peer_path_problems(paths: Sequence[Path]) -> Iterator[Problem]:
    """Yields which folders hold no library that is known here."""
    packages = sorted({package for package, _ in _PEERS.values()})
    fix = f"Give a folder that holds {' or '.join(f'{package}/' for package in packages)}, for instance an unpacked wheel."
    for path in paths:
        known = any(peer_sources(package, [path]) for package in packages)
        unknown = [] if known else [Problem("--peer-path", str(path), "has no kernels to compare with", fix)]
        yield from folder_problems([path], fix) or unknown


class _Recurrence:
    """A function of another library as ours are called: forward, and backward over a graph that is kept.

    Copies of inputs with the batch before the sequence are made once.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.Size], Tensor] = {}
        self._graphs: dict[tuple[int, torch.Size], tuple[Tensor, list[Tensor]]] = {}

    def _batch_first(self, tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        key = (tensor.data_ptr(), tensor.shape)
        if key not in self._copies:
            self._copies[key] = tensor.transpose(0, 1).contiguous()
        return self._copies[key]

    def _outputs(self, inputs: Sequence[Tensor], *, chunk_size: int, final_state: bool) -> tuple[Tensor, Tensor | None]:
        """Runs the library's function on inputs with the batch first."""
        raise NotImplementedError

    def forward(self, *inputs: Tensor, chunk_size: int) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            out, state = self._outputs(list(map(self._batch_first, inputs)), chunk_size=chunk_size, final_state=True)
        return out.transpose(0, 1), state

    def backward(self, grad: Tensor, grad_state: None, *inputs: Tensor, chunk_size: int) -> _Grads:
        key = (inputs[0].data_ptr(), inputs[0].shape)
        if key not in self._graphs:
            leaves = [self._batch_first(tensor).detach().requires_grad_() for tensor in inputs]
            self._graphs[key] = self._outputs(leaves, chunk_size=chunk_size, final_state=False)[0], leaves
        out, leaves = self._graphs[key]
        grads = torch.autograd.grad(out, leaves, self._batch_first(grad), retain_graph=True)
        return (*(grad.transpose(0, 1) if grad.dim() > 1 else grad for grad in grads), None)


class MambaSsmScan(_Recurrence):
    """The scan of mamba_ssm; its copy lives as long as this object."""

    def __init__(self, source: PeerSource) -> None:
        super().__init__()
        self._source, self._copy = source, tempfile.TemporaryDirectory(prefix="mamba_ssm-")

    def _outputs(self, inputs: Sequence[Tensor], *, chunk_size: int, final_state: bool) -> tuple[Tensor, Tensor | None]:
        self._source.make_importable()  # for what it needs
        self._source.copy_importable(Path(self._copy.name), {"__init__.py": ""})
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        x, dt, A, B, C, D = inputs
        out = scan(x, dt, A, B, C, chunk_size, D=D, return_final_states=final_state)
        return out if final_state else (out, None)

    chunk_scan, chunk_scan_backward = _Recurrence.forward, _Recurrence.backward


class FlaDeltaRule(_Recurrence):
    """A gated delta rule of flash-linear-attention, which normalizes queries and keys itself and chooses its chunks."""

    def __init__(self, source: PeerSource, *, module: str, function: str) -> None:
        super().__init__()
        self._source, self._module, self._function = source, module, function

    def _outputs(self, inputs: Sequence[Tensor], *, chunk_size: int, final_state: bool) -> tuple[Tensor, Tensor | None]:
        self._source.make_importable()
        rule = getattr(importlib.import_module(self._module), self._function)
        return rule(*inputs, output_final_state=final_state, use_qk_l2norm_in_kernel=True)

    chunk_delta_rule, chunk_delta_rule_backward = _Recurrence.forward, _Recurrence.backward


_PEERS: Mapping[str, tuple[str, Callable[[PeerSource], Any]]] = {
    "selective scan": ("mamba_ssm", MambaSsmScan),
    "gated delta rule": (
        "fla",
        partial(FlaDeltaRule, module="fla.ops.gated_delta_rule", function="chunk_gated_delta_rule"),
    ),
    "gated delta rule by channel": ("fla", partial(FlaDeltaRule, module="fla.ops.kda", function="chunk_kda")),
}
"""By our name of the operation: the package, and how its function is called."""
