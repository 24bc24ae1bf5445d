"""Folders of adapters as PEFT writes them: `adapter_config.json` names their model, `adapter_model.safetensors` has them.

Such a folder is read as a model: that one's weights, and the adapters. A name that is no folder is looked for beside the adapter, here,
and on the hub. Its own tokenizer, if it has one, takes the place of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.model_companion_files import find_companion_files, read_companion_file
from petatron.base.model_folder_file_names import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, CONFIG_FILE
from petatron.base.untrusted_files import read_limited_bytes, read_limited_json, reading_untrusted
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.files.safetensors_file import serialize_tensors
from petatron.checkpoint.huggingface.folder_as_checkpoint import model_folder_error
from petatron.checkpoint.tensor_chunk import Chunk, folder_tensor_key
from petatron.models.hf.peft_tensors import PeftAdapter, from_peft, to_peft
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.pretrained.hf_folder_contents import json_bytes
from petatron.pretrained.hub import local_model
from petatron.pretrained.merge_adapters import read_adapter_tensors
from petatron.pretrained.model_reader_fields import ModelReader
from petatron.pretrained.settings_as_config_file import load_config_sections

_MAX_CONFIG_BYTES, _MAX_WEIGHT_BYTES = 16 << 20, 1 << 36


def open_adapter_folder(path: Path, open_base: Callable[[Path], ModelReader]) -> ModelReader:
    """Opens an adapter with its model, which `open_base` opens, as one model."""
    config = read_adapter_config(path)
    base_folder = _base_folder(path, config)
    base = open_base(base_folder)
    if base.spec.config.adapter is not None:
        raise CheckpointError(
            f"{path} is an adapter of {base_folder}, which has adapters too. Merge those first: petatron checkpoint convert "
            f"{base_folder} NEW_FOLDER --to huggingface."
        )
    model_type = None if base.config_json is None else str(base.config_json.get("model_type"))
    adapter = read_adapter(path, base.spec, config, model_type=model_type)
    settings = {name: list(v) if isinstance(v, tuple) else v for name, v in adapter.settings.items()}
    sections = {**base.config_sections, "model": {**base.config_sections["model"], **settings}}
    spec = model_spec(load_config_sections(sections).config)
    tensors = {folder_tensor_key(name): tensor for name, tensor in adapter.tensors.items()}
    _check_complete(path, spec, adapter)

    def fill(chunks: Sequence[Chunk]) -> None:
        base.fill([chunk for chunk in chunks if chunk.key not in tensors])
        for chunk in chunks:
            if chunk.key in tensors:
                chunk.tensor.copy_(tensors[chunk.key][chunk.box.slices()])

    return replace(
        base,
        format="peft",
        path=path,
        config_sections=sections,
        spec=spec,
        config_json=None,
        companion_files={**base.companion_files, **find_companion_files(path, CheckpointError)},
        shapes={**base.shapes, **{key: tuple(tensor.shape) for key, tensor in tensors.items()}},
        dtypes={**base.dtypes, **{key: tensor.dtype for key, tensor in tensors.items()}},
        fill=fill,
        open_training=None,
    )


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    file = path / ADAPTER_CONFIG_FILE
    with reading_untrusted(file, model_folder_error):
        config = read_limited_json(file, _MAX_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise ValueError("is no table of settings")
    return config


def read_adapter(
    path: Path, base: ModelSpec, config: Mapping[str, Any] | None = None, *, model_type: str | None = None
) -> PeftAdapter:
    """Reads the adapters of a folder, for a model that they are put beside."""
    file = path / ADAPTER_WEIGHTS_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{path} has {ADAPTER_CONFIG_FILE} and no {ADAPTER_WEIGHTS_FILE}. Copy all files of the adapter there; one in pickles "
            "(adapter_model.bin) is saved again with PEFT first."
        )
    with reading_untrusted(file, model_folder_error):
        tensors = safetensors.torch.load(read_limited_bytes(file, _MAX_WEIGHT_BYTES))
        return from_peft(base, config or read_adapter_config(path), tensors, where=str(path), model_type=model_type)


def _base_folder(path: Path, config: Mapping[str, Any]) -> Path:
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG_FILE} names no model that the adapter is beside. Write its folder into base_model_name_or_path."
        )
    beside = path / name
    folder = beside if beside.is_dir() else local_model(name, where=str(path / ADAPTER_CONFIG_FILE))
    if not folder.is_dir():
        raise CheckpointError(
            f"{path} is an adapter of {name}, which is not here. Put that model there, or its folder into base_model_name_or_path of "
            f"{ADAPTER_CONFIG_FILE}."
        )
    return folder


def _check_complete(path: Path, spec: ModelSpec, adapter: PeftAdapter) -> None:
    shapes = spec.logical_shapes()
    wrong = [name for name, tensor in adapter.tensors.items() if shapes.get(name) != tuple(tensor.shape)]
    if wrong:
        raise CheckpointError(
            f"{path} has no such adapters as its {ADAPTER_CONFIG_FILE} describes: {', '.join(wrong[:3])}."
        )


def write_adapter_folder(
    source: ModelReader, folder: Path, *, base: str | None, dtype: torch.dtype | None, disk: Disk
) -> None:
    """Writes the adapters of a model as PEFT does, with the tokenizer beside them; `base` is where the model without them is."""
    logical = read_adapter_tensors(source)
    config, tensors = to_peft(source.spec, logical, base=base, model_type=_model_type_of(base))
    kept = {name: _cast(tensor, dtype) for name, tensor in tensors.items()}
    disk.write(folder / ADAPTER_WEIGHTS_FILE, serialize_tensors(kept))
    disk.write(folder / ADAPTER_CONFIG_FILE, [json_bytes(config)])
    for name, file in source.companion_files.items():
        disk.write(folder / name, [read_companion_file(file, CheckpointError)])


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.contiguous() if dtype is None else tensor.to(dtype).contiguous()


def _model_type_of(base: object) -> str | None:
    """Returns the family of the model that an adapter is beside, if its config.json is here: several may describe the same model."""
    file = None if base is None else Path(str(base)) / CONFIG_FILE
    if file is None or not file.is_file():
        return None
    with reading_untrusted(file, model_folder_error):
        content = read_limited_json(file, _MAX_CONFIG_BYTES)
        return str(content.get("model_type")) if isinstance(content, dict) else None


def family_of_base(config: Mapping[str, Any]) -> str | None:
    """Returns the family of the model that an adapter_config.json names, if that is here."""
    return _model_type_of(config.get("base_model_name_or_path"))
