"""Loads the components of a run's state (`checkpoint_components.py`) from a checkpoint, a Hugging Face folder or Megatron's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from petatron.base.errors import CheckpointError, ConfigError
from petatron.base.format_text import abbreviate_names
from petatron.base.log import get_logger
from petatron.base.model_folder_file_names import is_adapter_folder, is_hf_folder
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.manifest import METADATA_KEY, Manifest
from petatron.checkpoint.files.step_list import check_steps_not_lost
from petatron.checkpoint.huggingface.folder_as_checkpoint import HuggingFaceFolder, folder_manifest
from petatron.checkpoint.load.weights_from_average import read_manifest_with_weights
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.run_on_all_ranks import AllRanks
from petatron.checkpoint.stateful_components import EMPTY_DOCUMENT, ComponentLoad, Stateful
from petatron.checkpoint.tensor_chunk import Chunk, folder_tensor_name
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.adapter_magnitudes import quantize_frozen, set_magnitudes
from petatron.pretrained.checkpoint_components import model_components, optimizer_of
from petatron.pretrained.detect_model_format import has_steps, is_megatron_folder, weights_kind_problems
from petatron.pretrained.model_reader import open_model_reader
from petatron.pretrained.new_head import NewHead

_log = get_logger(__name__)
LOOP_METADATA = "loop"
"""In the metadata of a run: what a custom loop gave to `save_checkpoint`."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


def load_checkpoint(
    folder: str,
    *,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer | None = None,
    moments: bool = True,
    step: int | None = None,
    random_states: bool = True,
    fallback: bool = False,
    components: Sequence[Stateful] = (),
    weights: str | None = None,
) -> dict[str, Any] | None:
    """Fills the model (and the optimizer) from a folder's checkpoint, whatever layout saved it, and returns its metadata.

    The metadata is what `save_checkpoint` got, or what a training run recorded; None if the folder has no checkpoint. `step` None means
    the newest. Without `moments` the optimizer loads only the weights, and `folder` may also be a Hugging Face model folder. With
    `fallback` a damaged step is replaced by the newest sound step before it. `components` are custom state to restore
    (`petatron.Stateful`). `weights="ema"` loads the average of the weights.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> petatron.load_checkpoint(tempfile.mkdtemp(), model=petatron.build_model(run, petatron.launch(run))) is None
    True
    """
    restored = [*model_components(model, optimizer, moments=moments, random_states=random_states), *components]
    strict = optimizer is not None and moments
    loaded = load_state(folder, restored, model=model, step=step, fallback=fallback, strict=strict, weights=weights)
    return None if loaded is None else loaded.metadata.get(LOOP_METADATA, loaded.metadata)


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The result of a load: the manifest's document, notes about components that were changed or not restored, and whether the checkpoint
    is signed.
    """

    document: Mapping[str, Any]
    notes: tuple[str, ...]
    is_signed: bool

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the run or program that saved the checkpoint."""
        return dict(self.document[METADATA_KEY])

    @property
    def has_optimizer_state(self) -> bool:
        return self.document["optimizer"] is not None


def load_state(
    folder: str,
    components: Sequence[Stateful],
    *,
    model: ParallelModel,
    step: int | None,
    fallback: bool,
    strict: bool,
    skipped: Mapping[str, str] = _NOTHING,
    check_metadata: Callable[[Mapping[str, Any]], None] | None = None,
    weights: str | None = None,
    starts_run: bool = False,
) -> LoadedState | None:
    """Restores components from a folder's checkpoint; returns None if it contains none.

    strict: raises if the checkpoint has state that no component uses, unless it is optional. skipped: components that a flag excludes, by
    name, with the flag. check_metadata: is called before anything is changed, and may raise. weights: the kind of state to load in place
    of the weights. starts_run: a new run takes the weights, and its model may have a head that they lack.
    """
    path, mesh = Path(folder), model.mesh
    manager = CheckpointManager(path, mesh.control, world_axis=mesh.world, device=mesh.device)
    load = ComponentLoad(components, skipped, strict, model.frozen_tensors)
    head = NewHead.of(model.spec) if starts_run else None
    held = manager.broadcast_from_rank0(lambda: _loadable_kind(path))
    if held is None:
        if step is None:
            return None
        raise CheckpointError(
            f"{folder} holds no checkpoint, so none of step {step}. Give a folder that --save wrote to."
        )
    is_model = held == "model"
    kind = {"model": "huggingface", "megatron": "megatron", "peft": "peft"}.get(held, "petatron")
    if problems := weights_kind_problems(weights, kind):
        raise ConfigError(problems)
    if held in ("megatron", "peft"):
        loaded_state = _load_with_reader(path, held, load, mesh, head)
        quantize_frozen(model)
        return loaded_state

    def read_manifest(source: Path) -> Manifest:
        if is_model and head is not None:
            return head.folder_manifest(source)
        if is_model:
            return folder_manifest(HuggingFaceFolder(source), model.spec)
        if weights is not None:
            return read_manifest_with_weights(source, weights)
        return step_folder.read_manifest_head_to_load(source)

    def select(document: Mapping[str, Any]) -> list[Chunk]:
        with reading_untrusted(path, step_folder.damaged_error):
            document = EMPTY_DOCUMENT if is_model else document
            chunks, metadata = load.select(document, folder), document[METADATA_KEY]
            if not isinstance(metadata, dict) or "optimizer" not in document:
                raise ValueError("it does not say what saved it")
            if check_metadata is not None:
                check_metadata(metadata)
            return chunks if head is None else head.with_former_tensors(chunks)

    may_ignore = None if is_model else load.may_ignore_key
    if head is not None:
        may_ignore = partial(_any_holds, (load.may_ignore_key, head.may_ignore))
    loaded = manager.load(
        step,
        select,
        read_manifest=read_manifest,
        has_steps=not is_model,
        same_layout_key=model.layout_key if load.reads_local and not is_model else None,
        may_ignore_key=may_ignore,
        may_lack_key=None if head is None else head.may_lack,
        check_all_files=strict,
        fallback=fallback,
    )
    _log_new_head(head, loaded.missing_keys, mesh)
    lacks_magnitudes = head is not None and head.lacks_magnitudes(loaded.missing_keys)
    document = EMPTY_DOCUMENT if is_model else loaded.metadata
    parsing = partial(reading_untrusted, path, step_folder.damaged_error)
    notes = load.restore(document, loaded.local, None if is_model else loaded.source, parsing)
    if any(all_gather_json(lacks_magnitudes, mesh.control)):
        set_magnitudes(model, optimizer_of(components))
    quantize_frozen(model)
    return LoadedState(document, tuple(notes), loaded.is_signed)


def _any_holds(conditions: Sequence[Callable[[str], bool]], key: str) -> bool:
    return any(condition(key) for condition in conditions)


def _log_new_head(head: NewHead | None, missing_keys: Sequence[str], mesh: ParallelMesh) -> None:
    """Says what a source lacked on any rank."""
    if head is None:
        return
    missing = {key for of_rank in all_gather_json(list(missing_keys), mesh.control) for key in of_rank}
    for note in head.notes(missing) if mesh.rank == 0 else ():
        _log.info("%s", note)


def _load_with_reader(
    path: Path, kind: Literal["megatron", "peft"], load: ComponentLoad, mesh: ParallelMesh, head: NewHead | None
) -> LoadedState:
    """Fills the weights from a Megatron checkpoint, or from adapters and their model; every rank reads its shards tensor by tensor."""
    ranks = AllRanks(mesh.control, default_failure=f"the weights in {path} could not be read")
    missing: list[str] = []

    def fill() -> None:
        source = open_model_reader(path, model_format=kind)
        chunks = load.select(EMPTY_DOCUMENT, str(path))
        shapes = {folder_tensor_name(key): shape for key, shape in source.shapes.items()}
        if head is not None:
            chunks = head.with_former_tensors(chunks)
            missing.extend(chunk.key for chunk in chunks if chunk.name not in shapes and head.may_lack(chunk.key))
            chunks = [chunk for chunk in chunks if chunk.key not in missing]
        if unlike := sorted(chunk.name for chunk in chunks if shapes.get(chunk.name) != chunk.logical_shape):
            raise CheckpointError(
                f"{path} is of another model: it has no {abbreviate_names(unlike)} of the shape that this run's model has. Leave the "
                "settings of the model out, which it says itself, or give those that it was trained with."
            )
        source.fill(chunks)

    ranks.run(fill)
    _log_new_head(head, missing, mesh)
    notes = load.restore(EMPTY_DOCUMENT, None, None, partial(reading_untrusted, path, step_folder.damaged_error))
    return LoadedState(EMPTY_DOCUMENT, tuple(notes), is_signed=False)


def has_weights(folder: str, mesh: ParallelMesh) -> bool:
    """Whether this folder has weights to load; every rank calls it and returns what rank 0 finds.

    A load fills every weight or raises, so a model that is loaded right away needs no initial weights.

    >>> import tempfile
    >>> has_weights(tempfile.mkdtemp(), ParallelMesh.single())
    False
    """
    path = Path(folder)
    manager = CheckpointManager(path, mesh.control, world_axis=mesh.world, device=mesh.device)
    return manager.broadcast_from_rank0(lambda: _loadable_kind(path)) is not None


def _loadable_kind(path: Path) -> Literal["checkpoint", "model", "megatron", "peft"] | None:
    """Returns what this rank can load from a folder."""
    if has_steps(path):
        return "checkpoint"
    if is_hf_folder(path):
        return "model"
    if is_megatron_folder(path):
        return "megatron"
    if is_adapter_folder(path):
        return "peft"
    check_steps_not_lost(path)
    return None
