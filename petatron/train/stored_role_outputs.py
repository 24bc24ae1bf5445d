"""Gives the loaders of a run what its objective reads of models that are not in memory, and fills the cache of it before training.

A cache is beside the data, in a folder that is named by what its values depend on besides the texts: the weights of the frozen model, and
the precision. The model is opened when a text is missing there, and closed again before the first step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError, DataError, PetatronError, Problem
from petatron.base.log import get_logger
from petatron.checkpoint.files import step_list
from petatron.checkpoint.files.step_folder import MODEL_FOLDER
from petatron.config.required_settings import required
from petatron.config.schema.data_blend import read_blend_file
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import BatchLoader
from petatron.data.blended_dataset import parse_weighted_prefixes
from petatron.data.index_cache import cached_digest, fingerprint
from petatron.data.sample_index_folder import sample_index_folder
from petatron.data.stored_outputs import StoredOutputs, StoredOutputsWriter, batch_extension, unit_keys
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.objective import StoredRole
from petatron.parallel.model_beneath_adapters import RoleModel
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.detect_model_format import detect_format
from petatron.pretrained.hub import local_model
from petatron.train.build_run import DataLoaders, evaluation_batch_size
from petatron.train.state.open_frozen_models import open_frozen_model, role_folder

_log = get_logger(__name__)
_FORMAT = 1


def attach_stored_outputs(run: RunConfig, model: ParallelModel, loaders: DataLoaders, *, train_samples: int) -> None:
    """Gives every loader the stored arrays that the objective of a model reads; every rank calls it, once weights are loaded.

    train_samples: the number of training samples of the run, from its start.
    """
    for role, stored in model.objective.stored_roles.items():
        if not isinstance(loaders.train, BatchLoader):
            rule = f"is of files, and this run has other data: what is stored of the {role} is found by their texts"
            raise ConfigError([Problem("--objective-settings", f"{role}", rule, "Leave it out.")])
        if stored.folder is not None:
            store = StoredOutputs.open(Path(stored.folder))
            check_description(store, run, model)
        else:
            store = StoredOutputs(*_cache_place(run, model, role, stored))
            folder = required("folder", required("model", stored.model).folder)
            open_model = partial(open_frozen_model, run, model, role, folder)
            fill_store(store, stored, model, dataset_sizes(run, loaders, train_samples), open_model, role=role)
        extension = batch_extension(store, stored.per, stored.arrays)
        for loader in dataset_sizes(run, loaders, train_samples):
            loader.extend_batches(extension)


def describe_rows(run: RunConfig, model: ParallelModel) -> dict[str, object]:
    """Returns what the outputs of a row depend on besides its tokens."""
    return {
        "vocabulary": model.spec.vocab_size,
        "reset_position_ids": run.data.reset_position_ids,
        "reset_attention_mask": run.data.reset_attention_mask,
    }


def check_description(store: StoredOutputs, run: RunConfig, model: ParallelModel) -> None:
    """Raises `DataError` where outputs were stored for other rows than those of a run."""
    for name, value in describe_rows(run, model).items():
        if (there := store.description.get(name)) != value:
            raise DataError(
                f"{store.folder} was stored with {name.replace('_', '-')} {there}, and this run has {value}. Store the outputs again with "
                "the settings of this run."
            )


def dataset_sizes(run: RunConfig, loaders: DataLoaders, train_samples: int) -> dict[BatchLoader, int]:
    """Returns the loaders of files, and how many samples of each the run reads."""
    sizes = {loader: count for loader, count in _evaluated(run, loaders) if isinstance(loader, BatchLoader)}
    assert isinstance(loaders.train, BatchLoader)
    return {loaders.train: train_samples} | sizes


def _evaluated(run: RunConfig, loaders: DataLoaders) -> Iterator[tuple[object, int]]:
    """Yields the loaders of evaluations, and how many of their first samples these read."""
    count = run.train.eval_iters * evaluation_batch_size(run)
    for loader in (*loaders.valid.values(), loaders.test):
        if isinstance(loader, BatchLoader):
            size = len(loader.dataset)
            reads_all = run.train.full_validation and loader is not loaders.test
            yield loader, size if reads_all else min(size, count)


def fill_store(
    store: StoredOutputs,
    stored: StoredRole,
    model: ParallelModel,
    sizes: Mapping[BatchLoader, int],
    open_model: Callable[[], RoleModel],
    *,
    role: str,
) -> int:
    """Computes and stores what is missing, and returns how much that was; the frozen model is open only meanwhile. Every rank calls it."""
    if model.mesh.rank == 0:
        store.create()
    all_gather_json(None, model.mesh.control)
    store.read_parts()
    frozen, writer, num_stored = None, StoredOutputsWriter(store), len(store)
    for loader, size in sizes.items():
        for batches in _missing_batches(loader, size, stored, store, model.mesh):
            if frozen is None:
                frozen = open_model()
                text = f"{role}: outputs for the texts of this run are computed once, and stored in {store.folder}"
                _log_once(model.mesh, text)
            compute_outputs(frozen, model, stored, writer, batches)
    writer.flush()
    all_gather_json(None, model.mesh.control)
    store.read_parts()
    _log_once(model.mesh, f"{role}: {num_stored:,} stored outputs were there, {len(store) - num_stored:,} are computed")
    return len(store) - num_stored


def _missing_batches(
    loader: BatchLoader, size: int, stored: StoredRole, store: StoredOutputs, mesh: ParallelMesh
) -> Iterator[list[Batch]]:
    """Yields this rank's micro-batches that have a text without outputs, on any rank, for one forward pass each."""
    micro, count = loader.options.micro_batch_size, mesh.pp.size
    per_pass, seen = micro * count * mesh.dp.size, set[bytes]()
    size = min(size, getattr(loader.dataset, "samples_per_epoch", size))  # others have the same texts
    for first in range(0, size, per_pass):
        begin = first + mesh.dp.rank * micro * count
        numbers: NDArray[np.int64] = np.arange(begin, begin + micro * count).reshape(count, micro) % size
        batches = [loader.batch(row) for row in loader.places(numbers)]
        keys = {key for batch in batches for key in unit_keys(batch, stored.per)}
        missing = any(key not in store and key not in seen for key in keys)
        if any(all_gather_json(missing, mesh.control)):
            yield batches
        seen |= keys


@torch.no_grad()
def compute_outputs(
    frozen: RoleModel, model: ParallelModel, stored: StoredRole, writer: StoredOutputsWriter, batches: list[Batch]
) -> None:
    """Computes the arrays of micro-batches, and writes them on one of the ranks that have them; `model` says where outputs are."""
    assert stored.model is not None and stored.compute is not None
    mesh = model.mesh
    on_device = [batch.to(mesh.device) for batch in batches]
    outputs = frozen.forward(on_device, collect=stored.model.outputs)
    if model.computes_loss:
        for batch, local, of_batch in zip(batches, model.split(on_device), outputs, strict=True):
            arrays = stored.compute(of_batch, local)
            if mesh.tp.rank == 0 and mesh.cp.rank == 0:
                writer.add(unit_keys(batch, stored.per), {name: _array(x) for name, x in arrays.items()})


def _array(x: Tensor) -> NDArray:
    return x.to("cpu").numpy()


def _cache_place(run: RunConfig, model: ParallelModel, role: str, stored: StoredRole) -> tuple[Path, dict[str, object]]:
    """Returns the folder of a cache, and what its values depend on."""
    folder = required("folder", required("model", stored.model).folder)
    prefixes = _prefixes(run)
    cache = sample_index_folder(run.data, prefixes[0]) if prefixes else None
    if cache is None:
        raise DataError(
            f"What is stored of the {role} is kept beside the data, and there is no folder for it. Give --data-cache-path FOLDER and the "
            "data by --data-path."
        )
    path = local_model(role_folder(run, role, folder), where=f"the {role}")
    description: dict[str, object] = {
        "format": _FORMAT,
        "role": role,
        "weights": _weights_digest(path, cache, model.mesh),
        "precision": json.loads(json.dumps(asdict(run.precision), default=str)),
        "base_format": run.model.adapter_base_format,
        "arrays": list(stored.arrays),
    }
    return cache / f"{role}-{fingerprint(description)}", description


def _prefixes(run: RunConfig) -> tuple[str, ...]:
    data = run.data
    paths = data.train_data_path or data.data_path
    if data.data_args_path is not None:
        paths = tuple(read_blend_file(data.data_args_path))
    return tuple(parse_weighted_prefixes(paths, flag="--data-path")[1]) if paths else ()


def _weights_digest(path: Path, cache: Path, mesh: ParallelMesh) -> str:
    """Returns a digest of the content of a model's files, which rank 0 reads."""
    answer: dict[str, str] = {}
    if mesh.control.rank == 0:
        try:
            answer["digest"] = fingerprint({"files": [_file_digest(file, cache) for file in _weight_files(path)]})
        except (PetatronError, OSError) as error:
            answer["failure"] = f"{path} cannot be read: {error}"
    answer = all_gather_json(answer, mesh.control)[0]
    if "failure" in answer:
        raise CheckpointError(answer["failure"])
    return answer["digest"]


def _weight_files(path: Path) -> list[Path]:
    """Returns the files that decide what a model computes: of a run those of its newest step, without the optimizer's."""
    if detect_format(path) == "petatron":
        step = step_list.resolve_step(path, None, warn=False)
        path = step / MODEL_FOLDER if (step / MODEL_FOLDER).is_dir() else step
    return sorted(file for file in path.rglob("*") if file.is_file())


def _file_digest(file: Path, cache: Path) -> str:
    def compute() -> str:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "blake2b").hexdigest()[:32]

    return f"{file.name} {cached_digest(cache, file, 'weights', compute)}"


def _log_once(mesh: ParallelMesh, text: str) -> None:
    if mesh.rank == 0:
        _log.info("%s", text)
