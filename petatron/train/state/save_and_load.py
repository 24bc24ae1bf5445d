"""Saves and loads the state of a model and its optimizer, for the training loop and for custom loops.

A checkpoint contains, by logical tensor, the weights in the model's precision (as a Hugging Face folder), the master weights where
they are separate, and the moments: the same for every layout. RNG states and the amax histories of FP8 delayed scaling belong to a
rank, so they are restored only in the layout that saved them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.model_companion_files import is_hf_folder
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.convert.read_hf_folder import folder_manifest
from petatron.checkpoint.files import step_folder, step_list
from petatron.checkpoint.files.step_list import check_steps_not_lost
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.state import MASTER_PREFIX, ROUTER_PREFIX, WEIGHT_PREFIX, Chunk
from petatron.data.tokenizer import Tokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import stable_seed
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.sharding.flat_shard import ParameterGroup, group_tensor_shards
from petatron.sharding.shard_spec import TensorShard
from petatron.train.state.check_model_folder import warn_of_damaged_model_folder
from petatron.train.state.export_hf_folder import CompanionFiles, build_hf_folder

_OPTIMIZER_KEY = "optimizer"
_FROZEN_KEY = "frozen"
"""The logical tensors without optimizer state, since the run did not train them."""
_FP8_HISTORY_PREFIX = "fp8/"
LOOP_FACTS = "loop"
"""Among the facts of a run: those that a loop of one's own gave to `save_checkpoint`."""


def save_with_manager(
    manager: CheckpointManager,
    *,
    step: int,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer | None,
    moments: bool,
    facts: Mapping[str, Any] | None,
    random_states: bool,
    tokenizer: Tokenizer | CompanionFiles | None,
    wait: bool = True,
) -> None:
    """Publishes a checkpoint through a manager, which may save asynchronously; every rank calls it."""
    updates = optimizer.scalar_state() if optimizer is not None and moments else None
    local = model.rng_streams.state() if random_states else {}
    if updates is not None:
        local |= {f"{_FP8_HISTORY_PREFIX}{name}": histories for name, histories in model.fp8_gemms.state().items()}
    frozen = {_FROZEN_KEY: sorted(model.frozen_tensors)} if updates is not None and model.frozen_tensors else {}
    manager.save(
        step,
        list(checkpoint_chunks(model, optimizer, moments=moments)),
        facts={_OPTIMIZER_KEY: updates, "facts": dict(facts or {}), **frozen},
        same_layout_key=model.layout_key,
        local=local,
        model=build_hf_folder(model.spec, _weight_dtype(model), tokenizer),
        wait=wait,
    )


def load_checkpoint(
    folder: str,
    *,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer | None = None,
    moments: bool = True,
    step: int | None = None,
    random_states: bool = True,
    fallback: bool = False,
) -> dict[str, Any] | None:
    """Fills the model (and the optimizer) from a folder's checkpoint, whatever layout saved it, and returns its facts.

    They are those that `save_checkpoint` was given, or everything that a training run recorded; None when the folder contains no
    checkpoint. `step` None means the newest. Without `moments` the optimizer loads the
    weights alone; then `folder` may also be a Hugging Face model folder. With `fallback` a damaged step is replaced by the
    newest sound one before it.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> petatron.load_checkpoint(tempfile.mkdtemp(), model=petatron.build_model(run, petatron.launch(run))) is None
    True
    """
    loaded = load_state(
        folder,
        model=model,
        optimizer=optimizer,
        moments=moments,
        step=step,
        random_states=random_states,
        fallback=fallback,
    )
    return None if loaded is None else loaded.facts.get(LOOP_FACTS, loaded.facts)


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The facts of a checkpoint, whether its RNG states were restored, why its FP8 histories were not if the run needs some,
    whether it has optimizer state, and whether it has a signature.
    """

    facts: dict[str, Any]
    random_states_restored: bool
    fp8_history_reset_reason: str | None
    has_optimizer_state: bool
    is_signed: bool


def load_state(
    folder: str,
    *,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer | None,
    moments: bool,
    step: int | None,
    random_states: bool,
    fallback: bool,
    check_facts: Callable[[Mapping[str, Any]], None] | None = None,
) -> LoadedState | None:
    """`load_checkpoint` with details of what was restored. `check_facts` sees the facts before anything is changed, and may raise."""
    path, mesh = Path(folder), model.mesh
    manager = CheckpointManager(path, mesh.control, world_axis=mesh.world, device=mesh.device)
    whole = optimizer is not None and moments
    chunks = [*_weights_to_load(model, optimizer), *(_moment_chunks(optimizer) if moments else ())]
    frozen_then: set[str] = set()

    def check(facts: Mapping[str, Any]) -> None:
        frozen_then.update(facts.get(_FROZEN_KEY, ()))
        if whole and facts[_OPTIMIZER_KEY] is None:
            raise CheckpointError(
                f"The checkpoint in {folder} was saved without optimizer state. Use --finetune to start a new run from its "
                "weights, or --no-load-optim to go on without moments."
            )
        if check_facts is not None:
            check_facts(facts["facts"])

    held = manager.broadcast_from_rank0(lambda: _loadable_kind(path))
    if held is None:
        if step is None:
            return None
        raise CheckpointError(
            f"{folder} holds no checkpoint, so none of step {step}. Give a folder that --save wrote to."
        )
    if held == "model":
        found = manager.load_from(path, partial(folder_manifest, path, model.spec), [*chunks, *_router_chunks(model)])
        updates, facts = None, {}
    else:
        found = manager.load(
            step,
            [*chunks, *_router_chunks(model)],
            same_layout_key=model.layout_key if whole or random_states else None,
            # Moments of what is frozen now are left unread; what was frozen then has none, and starts with zeros.
            may_ignore_key=lambda key: not _is_weight(key) and (not whole or _tensor_name(key) in model.frozen_tensors),
            may_miss_key=lambda key: not _is_weight(key) and _tensor_name(key) in frozen_then,
            check_facts=check,
            check_all_files=whole,
            fallback=fallback,
        )
        if optimizer is not None:
            warn_of_damaged_model_folder(step_list.resolve_step(path, found.step), mesh.control)
        with reading_untrusted(path, step_folder.damaged_error):
            updates, facts = found.facts[_OPTIMIZER_KEY], dict(found.facts["facts"])
    if optimizer is not None:
        optimizer.copy_master_to_model_weights()
    else:
        model.all_gather_params()
    local_tensors = found.local or {}
    streams = {
        name: state
        for name, state in local_tensors.items()
        if not name.startswith(_FP8_HISTORY_PREFIX) and random_states
    }
    histories = {
        name.removeprefix(_FP8_HISTORY_PREFIX): state
        for name, state in local_tensors.items()
        if whole and name.startswith(_FP8_HISTORY_PREFIX)
    }
    assert not whole or updates is not None, "only weights can come from a model's folder"
    with reading_untrusted(path, step_folder.damaged_error):
        if optimizer is not None and updates is not None and moments:
            optimizer.load_scalar_state(updates)
        if streams:
            model.rng_streams.restore(streams)
        went_on = model.fp8_gemms.load_state(histories, model.mesh.device)
    anew = None if went_on else _fp8_history_reset_reason(histories, same_layout=found.local is not None)
    return LoadedState(
        facts,
        random_states_restored=bool(streams),
        fp8_history_reset_reason=anew,
        has_optimizer_state=updates is not None,
        is_signed=found.is_signed,
    )


def has_weights(folder: str, mesh: ParallelMesh) -> bool:
    """Whether a load of this folder would fill a model; every rank calls it, and all return what rank 0 sees.

    A load fills every weight or raises, so a model that is loaded right away needs no initial weights.

    >>> import tempfile
    >>> has_weights(tempfile.mkdtemp(), ParallelMesh.single())
    False
    """
    path = Path(folder)
    manager = CheckpointManager(path, mesh.control, world_axis=mesh.world, device=mesh.device)
    return manager.broadcast_from_rank0(lambda: _loadable_kind(path)) is not None


def _loadable_kind(path: Path) -> Literal["checkpoint", "model"] | None:
    """Returns what a folder contains to load, as this rank sees it."""
    if step_list.containing_step(path) is not None or step_list.list_steps(path):
        return "checkpoint"
    if is_hf_folder(path):
        return "model"
    check_steps_not_lost(path)
    return None


def _fp8_history_reset_reason(histories: Mapping[str, Tensor], *, same_layout: bool) -> str:
    """Tells why a rank cannot continue a checkpoint's FP8 amax histories."""
    if not same_layout:
        return "the checkpoint has none for this layout, where a rank sees other parts of the tensors"
    if not histories:
        return "the checkpoint has none"
    return "those in the checkpoint are of other products, another format or another --fp8-amax-history-len"


def _is_weight(key: str) -> bool:
    """Whether a key is of what the model needs, and not of the optimizer's state alone."""
    return key.startswith((WEIGHT_PREFIX, MASTER_PREFIX, ROUTER_PREFIX))


def _tensor_name(key: str) -> str:
    return key.partition("/")[2]


def _weight_dtype(model: ParallelModel) -> torch.dtype:
    """Returns the storage dtype of the weights; fully sharded ones are fp32, since they are the master weights, unless frozen."""
    groups = sorted(model.param_groups, key=lambda group: not group.spec.trainable)
    return next((weight.dtype for group in groups for weight in group.weights()), model.dtype)


def checkpoint_chunks(
    model: ParallelModel, optimizer: MixedPrecisionOptimizer | None, *, moments: bool = True
) -> Iterator[Chunk]:
    """Yields everything this rank saves in a checkpoint, as boxes of logical tensors."""
    yield from _weight_chunks(model)
    yield from _optimizer_chunks(optimizer, moments=moments)
    yield from _router_chunks(model)


def _weight_chunks(model: ParallelModel, *, trainable: bool = True) -> Iterator[Chunk]:
    """Yields every box of the weights that this rank owns, in the model's precision; without `trainable` of frozen ones alone."""
    for group in model.param_groups:
        if group.spec.trainable and not trainable:
            continue
        for shard, view in group_tensor_shards(group, group.weights()):
            yield _chunk(WEIGHT_PREFIX, group, shard, view)


def _optimizer_chunks(optimizer: MixedPrecisionOptimizer | None, *, moments: bool) -> Iterator[Chunk]:
    """Yields the optimizer's separate state: master weights and, with `moments`, the moments."""
    if optimizer is None or not moments:
        return
    if optimizer.has_master_weights:
        for group, shard, view in optimizer.master_weights():
            yield _chunk(MASTER_PREFIX, group, shard, view)
    yield from _moment_chunks(optimizer)


def _moment_chunks(optimizer: MixedPrecisionOptimizer | None) -> Iterator[Chunk]:
    if optimizer is not None:
        for kind, group, shard, view in optimizer.moments():
            yield _chunk(f"{kind}/", group, shard, view)


def _weights_to_load(model: ParallelModel, optimizer: MixedPrecisionOptimizer | None) -> Iterator[Chunk]:
    """Yields the weights to load: the master weights, from which the model's are cast, or the model's own; and frozen ones."""
    if optimizer is None:
        yield from _weight_chunks(model)
        return
    for group, shard, view in optimizer.master_weights():
        yield _chunk(MASTER_PREFIX if optimizer.has_master_weights else WEIGHT_PREFIX, group, shard, view)
    yield from _weight_chunks(model, trainable=False)


def _router_chunks(model: ParallelModel) -> Iterator[Chunk]:
    """Yields router state that is not a parameter."""
    for name, state in model.router_statistics.expert_biases():
        yield Chunk(
            f"{ROUTER_PREFIX}{name}", tuple(state.shape), (0,) * state.dim(), state, model.mesh["stage"].rank == 0
        )


def _chunk(kind: str, group: ParameterGroup, shard: TensorShard, view: Tensor) -> Chunk:
    """Replicas share the writing: which of them is primary for a box follows from its name."""
    replicas = group.replica_axis
    primary = shard.primary and replicas.rank == stable_seed(kind, shard.name, shard.start) % replicas.size
    return Chunk(f"{kind}{shard.name}", shard.logical_shape, shard.start, view, primary)
