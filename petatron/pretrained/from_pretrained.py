"""Loads pretrained models: a Hugging Face folder, a checkpoint, or a transformers model in memory, on any mesh.

Settings come from the model's config.json, loaded like a user's config file; flags add the layout and other run settings, and take
precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.base.model_companion_files import find_companion_files, read_companion_file
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files import step_folder, step_list
from petatron.checkpoint.huggingface.folder_as_checkpoint import HuggingFaceFolder, model_folder_error
from petatron.checkpoint.megatron import open_megatron
from petatron.checkpoint.tensor_chunk import folder_tensor_key
from petatron.config import RunConfig
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.hf import family_name_of_config, fit_values_to_tensors, parse_config_json, to_logical
from petatron.models.registry import model_spec, without_adapters
from petatron.pretrained.adapter_magnitudes import set_magnitudes
from petatron.pretrained.detect_model_format import detect_format, refuse_unconverted, weights_kind_problems
from petatron.pretrained.hf_folder_contents import CompanionFiles
from petatron.pretrained.hub import local_model
from petatron.pretrained.launch_and_build_model import build_initial_model, launch
from petatron.pretrained.load_checkpoint import load_checkpoint
from petatron.pretrained.model_reader import open_model_reader
from petatron.pretrained.open_step import open_step
from petatron.pretrained.saveable_model import Model
from petatron.pretrained.settings_as_config_file import config_sections, load_config_sections
from petatron.sharding.flat_shard import group_tensor_shards

_DTYPE_TO_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_EMBEDDING = folder_tensor_key("embedding.weight")
_PRECISION_FLAGS = ("--bf16", "--fp16", "--fp64")
_LAYOUT_AXES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "num_distributed_optimizer_instances": "dp_outer",
}
_EXPERT_LAYOUT_AXES = {"expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp"}


class _TransformersConfig(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


class TransformersModel(Protocol):
    """The methods of a transformers model that are used here."""

    @property
    def config(self) -> _TransformersConfig: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...


def from_pretrained(
    source: str | Path | TransformersModel,
    mesh: ParallelMesh | None = None,
    *,
    flags: Sequence[str] = (),
    dtype: torch.dtype | str | None = None,
    gradients: bool = True,
    weights: str | None = None,
) -> Model:
    """Loads the model of a folder, or a transformers model in memory, on a mesh of any layout; every rank calls it.

    The folder is a Hugging Face model, a run, one of its steps, a Megatron checkpoint, or adapters of PEFT, which name their model. Without
    a mesh one is built for the layout of the flags. `dtype` is a torch dtype or its name (bfloat16, bf16); None means that of the flags,
    else that of the weights. Without `gradients` none are allocated: the model generates and evaluates. `weights="ema"` loads the average
    of a checkpoint's weights. Files next to the weights (tokenizer, token ids) are kept for `save_pretrained`.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> folder = tempfile.mkdtemp()
    >>> model.save_pretrained(folder)
    >>> again = petatron.from_pretrained(folder)
    >>> bool((again.module.norm.weight == model.module.norm.weight).all())
    True
    """
    precision = None if dtype is None else _precision_of(dtype)
    if isinstance(source, str | Path):
        path = local_model(source, where="from_pretrained")
        run, companions = _open_settings(path, mesh, flags, precision)
        model = build_initial_model(run, mesh or launch(run), init_weights=False, gradients=gradients)
        loaded = load_checkpoint(str(path), model=model, random_states=False, weights=weights)
        assert loaded is not None, "a folder without a model was opened as one"
        model.companion_files = companions
        return model
    if problems := weights_kind_problems(weights, "transformers"):
        raise ConfigError(problems)
    content, tensors = source.config.to_dict(), source.state_dict()
    values, experts = parse_config_json(content)
    settings = fit_values_to_tensors(content, values, tensors), experts
    run = _run_config(settings, mesh, flags, precision, stored=next(iter(tensors.values())).dtype)
    model = build_initial_model(run, mesh or launch(run), init_weights=False, gradients=gradients)
    _load_state_dict(model, content, tensors)
    model.companion_files = CompanionFiles.from_config_json(content, {})
    return model


def folder_run_config(path: str | Path, mesh: ParallelMesh, *, flags: Sequence[str] = ()) -> RunConfig:
    """Returns the config of the model that `from_pretrained` would open."""
    return _open_settings(local_model(path, where="from_pretrained"), mesh, flags, None)[0]


def _open_settings(
    path: Path, mesh: ParallelMesh | None, flags: Sequence[str], precision: str | None
) -> tuple[RunConfig, CompanionFiles | None]:
    """Returns the config of a folder's model, and the files beside its weights."""
    if detect_format(path) == "peft":
        opened = open_model_reader(path, model_format="peft")
        settings = opened.config_sections["model"], opened.config_sections.get("moe", {})
        run = _run_config(settings, mesh, flags, precision, stored=opened.dtypes[_EMBEDDING])
        contents = {name: read_companion_file(file, CheckpointError) for name, file in opened.companion_files.items()}
        return run, CompanionFiles({}, contents)
    if detect_format(path) == "megatron":
        saved = open_megatron(path)
        stored = next(tensor.dtype for tensor in saved.tensors.values())
        return _run_config((saved.model, saved.moe), mesh, flags, precision, stored=stored), None
    folder = open_model_folder(path)
    files = find_companion_files(folder.path, CheckpointError)
    contents = {name: read_companion_file(file, CheckpointError) for name, file in files.items()}
    run = _folder_run_config(folder, mesh, flags, precision)
    return run, CompanionFiles.from_config_json(folder.config, contents)


def open_model_folder(path: Path) -> HuggingFaceFolder:
    """Opens the Hugging Face folder of a model: the path itself, or the folder inside a step (of a run: the newest)."""
    if detect_format(path) != "petatron":
        refuse_unconverted(path)
        return HuggingFaceFolder(path)
    step = step_list.resolve_step(path, None)
    return open_step(step, step_folder.read_manifest_head(step))


def _folder_run_config(
    folder: HuggingFaceFolder, mesh: ParallelMesh | None, flags: Sequence[str], precision: str | None
) -> RunConfig:
    """Returns the config that the files of a model folder contain."""
    stored = folder.config.get("dtype") or folder.config.get("torch_dtype")
    with reading_untrusted(folder.config_file, model_folder_error):
        settings = folder.checked_settings()
        with nullcontext() if flags else folder.naming_config():  # with flags, the problem may be theirs
            run = _run_config(settings, mesh, flags, precision, stored=stored)
        folder.check_size(model_spec(run))
    return run


def _precision_of(dtype: torch.dtype | str) -> str:
    """Returns the name of a dtype in flags."""
    name = str(dtype).removeprefix("torch.")
    precision = name if name in _DTYPE_TO_PRECISION.values() else _DTYPE_TO_PRECISION.get(name)
    if precision is None:
        rule = "is not a dtype that a model can be computed in"
        raise ConfigError([Problem("dtype", str(dtype), rule, f"Use one of torch's {', '.join(_DTYPE_TO_PRECISION)}.")])
    return precision


def _run_config(
    settings: tuple[Mapping[str, Any], Mapping[str, Any]],
    mesh: ParallelMesh | None,
    flags: Sequence[str],
    precision: str | None,
    *,
    stored: torch.dtype | str | None,
) -> RunConfig:
    """Combines the settings of a config.json, the layout of the mesh, and the flags; later sources win."""
    sections = config_sections(*settings)
    has_precision_flag = any(flag.partition("=")[0] in _PRECISION_FLAGS for flag in flags)
    if precision is not None or not has_precision_flag:
        name = precision or _DTYPE_TO_PRECISION.get(str(stored).removeprefix("torch."), "fp32")
        sections["precision"] = {name: True} if name != "fp32" else {}
    if mesh is None:
        return load_config_sections(sections, flags, world_size=read_environment().world_size).config
    sizes = {**_LAYOUT_AXES, **_EXPERT_LAYOUT_AXES} if "moe" in sections else _LAYOUT_AXES
    sections["parallel"] = {name: getattr(mesh.layout, axis) for name, axis in sizes.items()}
    run = load_config_sections(sections, flags, world_size=mesh.layout.world_size).config
    asked = Layout.from_config(run.parallel)
    if any(getattr(asked, axis) != getattr(mesh.layout, axis) for axis in sizes.values()):
        rule = f"say another layout than the mesh has, which is {mesh.describe()}"
        raise ConfigError([Problem("flags", " ".join(flags), rule, "Leave the sizes out of the flags, or the mesh.")])
    return run


@torch.no_grad()
def _load_state_dict(model: Model, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copies this rank's shards out of whole tensors."""
    logical = to_logical(family_name_of_config(content), tensors, without_adapters(model.spec))
    for group in model.param_groups:
        for piece, view in group_tensor_shards(group, group.weights(), wanted=lambda piece: piece.name in logical):
            view.copy_(logical[piece.name][piece.logical_slices()])
    for name, bias in model.router_statistics.expert_biases():
        bias.copy_(logical[name])
    model.all_gather_params()
    set_magnitudes(model)
