"""Activation offload: tensors that some layers, or some modules of all layers, save for backward are moved to host memory until backward
needs them.

Saved-tensor hooks run around a stage's layers. While an offloaded layer runs, the hook copies the tensor's storage to the host
and saves a reference to it. In backward the first access to one of a layer's tensors waits for all of them, and starts the
reload of the preceding offloaded layer.

    forward     layer i   | layers between       | layer j   | ...       j: the next offloaded layer
    to the host           [ saved by layer i ............]               must be complete when the one after j starts
    backward    ...       | layer j              | layers between | layer i
    to the device         [ saved by layer i, started with j's backward ]

- A tensor is moved with its whole storage, each storage once: views are restored with their strides, so backward runs the same
  kernels, and its bits are those of a run without offload.
- Weights, tensors that are held anyway (rope, a stage's input, what another module saves first), and small storages stay.
- Copies run on two streams of their own, one per direction. A layer's memory is freed in the order of the compute stream, which
  waits for the copies of the layer *before* that: without this a host that runs ahead of the device would fill the device with
  tensors that are about to be freed. If the link is too slow, the compute stream waits there.
- Reloaded memory is allocated on the compute stream, and after an event only that stream uses it, so no `record_stream` is needed.
  Host buffers are pinned, and reused in the next step.
- On a CPU the same code copies synchronously.

Recompute comes first: its regions are inside these hooks, which see only the regions' arguments. The input of a layer that is
recomputed as a whole is saved before the layer starts, and belongs to the layer before.

When it pays: a layer is free while bytes / bandwidth of the link is less than the forward time of the layers up to the next
offloaded one. See docs/memory.md.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from petatron.estimate.offload_plan import OffloadPlan
from petatron.layers.forward_context import ForwardContext
from petatron.layers.spec.branch_spec import FULL
from petatron.models.stage_interface import LayerRunner, StageModule
from petatron.parallel.activation_recompute import inputs_discarded
from petatron.parallel.offload_regions import OffloadRegions

MIN_OFFLOAD_BYTES = 1 << 20
_SLAB_BYTES = 1 << 28


class _CopyStream:
    """Copies in one direction, asynchronous to the compute stream and in the order they are started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies once all work queued on the current stream is done."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record_event(self) -> torch.cuda.Event | None:
        """Records an event after all copies started so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)


class HostBufferPool:
    """A pool of host buffers in few sizes, reused when free.

    torch's own cache of pinned memory rounds every tensor up to a power of two. Here only slabs are so large; buffers are cut from
    them, at most an eighth larger than asked. `slabs` are all host memory of the pool.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self.slabs: list[Tensor] = []
        self._used: list[int] = []
        self._free: dict[int, list[Tensor]] = {}

    def allocate(self, size: int) -> Tensor:
        step = 1 << max((size - 1).bit_length() - 4, 9)
        size = -(-size // step) * step
        free = self._free.get(size)
        return free.pop() if free else self._allocate_from_slab(size)

    def release(self, buffer: Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def _allocate_from_slab(self, size: int) -> Tensor:
        for index, (slab, used) in enumerate(zip(self.slabs, self._used)):
            if slab.numel() - used >= size:
                self._used[index] += size
                return slab[used : used + size]
        length = max(_SLAB_BYTES, 1 << (size - 1).bit_length()) if self._pinned else size
        self.slabs.append(torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned))
        self._used.append(size)
        return self.slabs[-1][:size]


class HostLink:
    """The copy streams and host buffers of one device; the stages of a rank share them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = HostBufferPool(pinned=device.type == "cuda")
        self.to_host, self.to_device = _CopyStream(device), _CopyStream(device)
        self.offloaded_bytes = 0

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        """Makes the compute stream wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class _OffloadedStorage:
    """One storage in a host buffer, and on the device once it has been reloaded."""

    __slots__ = ("__weakref__", "on_device", "on_host")

    def __init__(self, host: Tensor, memory: HostBufferPool, buffer: Tensor) -> None:
        self.on_host = host
        self.on_device: Tensor | None = None
        weakref.finalize(self, memory.release, buffer).atexit = False


class _OffloadGroup:
    """The tensors that one offloaded layer saves in one forward pass: offloaded and reloaded as a group.

    Only the graph holds offloaded storages: memory on either side is freed with the last node that needs it.
    """

    def __init__(self, link: HostLink, previous: _OffloadGroup | None) -> None:
        self._link, self._previous = link, previous
        self._offloaded: list[weakref.ref[_OffloadedStorage]] = []
        self._offloading: dict[int, tuple[torch.UntypedStorage, _OffloadedStorage]] = {}
        self._offload_event: torch.cuda.Event | None = None
        self._reload_event: torch.cuda.Event | None = None
        self._reload_started = self._reloaded = False

    def is_offloading(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is among those that are copied to the host."""
        return storage._cdata in self._offloading

    def offload(self, storage: torch.UntypedStorage) -> _OffloadedStorage:
        """Copies a storage to the host, unless it is copied already."""
        known = self._offloading.get(storage._cdata)
        if known is not None:
            return known[1]
        link, size = self._link, storage.nbytes()
        buffer = link.buffers.allocate(size)
        offloaded = _OffloadedStorage(buffer[:size], link.buffers, buffer)
        # The buffer's previous content may still be being reloaded, if nothing has waited for it.
        link.to_host.wait_event(link.to_device.record_event())
        as_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
        link.to_host.copy(offloaded.on_host, as_bytes)
        link.offloaded_bytes += size
        self._offloading[storage._cdata] = storage, offloaded
        self._offloaded.append(weakref.ref(offloaded))
        return offloaded

    def close(self) -> None:
        """Marks the end of the group's copies to the host."""
        self._offload_event = self._link.to_host.record_event()

    def free_device_memory(self) -> None:
        """Frees the group's device memory once the copies are done."""
        self._link.wait_event(self._offload_event)
        self._offloading.clear()

    def start_reload(self) -> None:
        """Starts to reload all storages that are still needed; a second call does nothing."""
        if self._reload_started:
            return
        self._reload_started = True
        link = self._link
        link.to_device.wait_event(self._offload_event)
        for reference in self._offloaded:
            offloaded = reference()
            if offloaded is not None:
                offloaded.on_device = torch.empty(offloaded.on_host.shape, dtype=torch.uint8, device=link.device)
                link.to_device.copy(offloaded.on_device, offloaded.on_host)
        self._reload_event = link.to_device.record_event()

    def wait_reload(self) -> None:
        """Makes the compute stream wait for the reload, and starts that of the group before."""
        self.start_reload()
        if not self._reloaded:
            self._reloaded = True
            self._link.wait_event(self._reload_event)
            if self._previous is not None:
                self._previous.start_reload()


@dataclass(frozen=True, slots=True)
class _OffloadedTensor:
    """Replaces a tensor that autograd saves."""

    group: _OffloadGroup
    storage: _OffloadedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def reload(self) -> Tensor:
        self.group.wait_reload()
        data = self.storage.on_device
        assert data is not None
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _OffloadCriteria:
    """Which saved tensors are offloaded: those of at least this size, in the offloaded regions of the layer."""

    min_bytes: int
    min_elements: int
    layers_on_device: int
    regions: OffloadRegions


class _OffloadForward:
    """One forward pass through a stage's layers."""

    def __init__(self, link: HostLink, criteria: _OffloadCriteria, not_offloaded: Iterable[Tensor]) -> None:
        self._link, self._criteria = link, criteria
        self._not_offloaded = {tensor.untyped_storage()._cdata for tensor in not_offloaded}
        self._current_layer: nn.Module | None = None
        self._modules: Collection[str] = ()
        self._current_group: _OffloadGroup | None = None
        self._last_group: _OffloadGroup | None = None
        self._on_device: deque[_OffloadGroup] = deque()

    def enter_layer(self, layer: nn.Module, modules: Collection[str]) -> None:
        """Starts the group of a layer, if modules of it are offloaded; idempotent."""
        if layer is self._current_layer:
            return
        self._current_layer, self._modules = layer, modules
        self._criteria.regions.enter_layer()
        self._close_group()
        if not modules:
            return
        # Sharded weights have no storage of their own; gathered ones are recognized as parameters.
        self._not_offloaded.update(p.untyped_storage()._cdata for p in layer.parameters() if type(p) is nn.Parameter)
        self._current_group = self._last_group = _OffloadGroup(self._link, self._last_group)
        self._on_device.append(self._current_group)
        if len(self._on_device) > self._criteria.layers_on_device:
            self._on_device.popleft().free_device_memory()

    def finish(self) -> None:
        self._close_group()
        while self._on_device:
            self._on_device.popleft().free_device_memory()

    def _close_group(self) -> None:
        if self._current_group is not None:
            self._current_group.close()
            self._current_group = None

    @torch.no_grad()
    def pack(self, saved: Tensor) -> Tensor | _OffloadedTensor:
        group = self._current_group
        if group is None or not self._should_offload(saved, group):
            return saved.detach()  # a saved output with its graph would be a cycle
        storage = group.offload(saved.untyped_storage())
        return _OffloadedTensor(group, storage, saved.dtype, saved.shape, saved.stride(), saved.storage_offset())

    @staticmethod
    @torch.no_grad()
    def unpack(stored: Tensor | _OffloadedTensor) -> Tensor:
        return stored if isinstance(stored, Tensor) else stored.reload()

    def _should_offload(self, saved: Tensor, group: _OffloadGroup) -> bool:
        if type(saved) is not Tensor or saved.layout is not torch.strided or isinstance(saved._base, nn.Parameter):
            return False
        storage, criteria = saved.untyped_storage(), self._criteria
        on_device = saved.device.type == self._link.device.type
        small = storage.nbytes() < max(criteria.min_bytes, criteria.min_elements * saved.element_size())
        if not on_device or small or storage._cdata in self._not_offloaded:
            return False
        if FULL in self._modules or group.is_offloading(storage) or criteria.regions.region_of(saved) in self._modules:
            return True
        self._not_offloaded.add(storage._cdata)  # a module that keeps it needs it on the device, whoever saves it too
        return False


class _OffloadLayerRunner:
    """Runs a stage's layers inside the hooks; a pre-hook on every layer marks where its saved tensors begin."""

    def __init__(
        self,
        run_layers: LayerRunner,
        offloaded: Mapping[nn.Module, Collection[str]],
        link: HostLink,
        criteria: _OffloadCriteria,
    ) -> None:
        self._run_layers, self._offloaded, self._link, self._criteria = run_layers, offloaded, link, criteria
        self._forward: _OffloadForward | None = None

    def enter_layer(self, layer: nn.Module, _: Any) -> None:
        # A layer recomputed in backward is not part of an offloaded forward pass.
        if self._forward is not None:
            self._forward.enter_layer(layer, self._offloaded[layer])

    def pack(self, saved: Tensor) -> Any:
        """Packs what a module saves inside hooks of its own."""
        return saved.detach() if self._forward is None else self._forward.pack(saved)

    def unpack(self, stored: Any) -> Tensor:
        return _OffloadForward.unpack(stored)

    def __call__(self, layers: Sequence[nn.Module], x_SBD: Tensor, context: ForwardContext) -> Tensor:
        if not torch.is_grad_enabled():
            return self._run_layers(layers, x_SBD, context)
        not_offloaded = [tensor for cos_sin in context.rope_cos_sin.values() for tensor in cos_sin]
        not_offloaded += [*context.tensors.values(), *([x_SBD] if x_SBD.is_leaf else [])]
        if context.documents is not None:
            not_offloaded += context.documents.tensors
        if context.key_spans is not None:
            not_offloaded += context.key_spans.tensors
        self._forward = forward = _OffloadForward(self._link, self._criteria, not_offloaded)
        try:
            self.enter_layer(layers[0], None)  # its input may be saved before it is called
            with saved_tensors_hooks(forward.pack, forward.unpack):
                return self._run_layers(layers, x_SBD, context)
        finally:
            self._forward = None
            forward.finish()


def apply_activation_offload(
    stage: StageModule, plan: OffloadPlan, link: HostLink, *, min_bytes: int = MIN_OFFLOAD_BYTES
) -> str | None:
    """Applies the offload plan of a stage; returns a line for the log, None if the plan offloads nothing.

    Called once, after recompute, whose regions must be inside the hooks. `min_bytes`: the smallest tensor offloaded in by-layer mode.
    """
    line = plan.describe()
    if not any(plan.modules):
        return line
    min_bytes, min_elements = (min_bytes, 0) if plan.min_elements is None else (0, plan.min_elements)
    criteria = _OffloadCriteria(min_bytes, min_elements, plan.layers_on_device, OffloadRegions())
    offloaded = dict(zip(stage.layers.values(), plan.modules, strict=True))
    offload = _OffloadLayerRunner(stage.run_layers, offloaded, link, criteria)
    for layer in stage.layers.values():
        layer.register_forward_pre_hook(offload.enter_layer)
    for layer in stage.transformer_layers():
        for discard in inputs_discarded(layer):
            discard.pack_others, discard.unpack_others = offload.pack, offload.unpack
        if plan.min_elements is not None:
            criteria.regions.declare(layer)
    stage.run_layers = offload
    return line
