"""Reads Hugging Face model folders, and as checkpoints too: builds a manifest for a folder that has none.

Names come from the model to fill (`models/hf`), offsets from the files' own headers. So reading one is the same as reading a
checkpoint of ours: any layout, only the bytes that are needed, and everything must fit.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.base.format_text import abbreviate_names
from petatron.base.model_folder_file_names import CONFIG_FILE
from petatron.base.safe_files import symlink_target_outside
from petatron.base.untrusted_files import open_regular_file, read_limited_json, reading_untrusted
from petatron.checkpoint.files.digested_file_io import BLOCK_BYTES
from petatron.checkpoint.files.manifest import BlockScale, Manifest, StoredBox, StoredTensor
from petatron.checkpoint.files.safetensors_file import MAX_HEADER_BYTES, TensorInfo
from petatron.checkpoint.huggingface.mxfp4_weights import TensorInfos, num_stored_elements, split_packed_tensors
from petatron.checkpoint.load.dequantize import scale_shape
from petatron.checkpoint.load.reshard_reads import read_checked_header
from petatron.checkpoint.tensor_chunk import folder_tensor_key
from petatron.config.schema.model_identity import identity_differences
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.models import hf
from petatron.models.hf.check_claimed_counts import check_counts
from petatron.models.model_spec import ModelSpec
from petatron.sharding.shard_spec import Shape

_INDEX_FILE = "model.safetensors.index.json"
_MAX_CONFIG_BYTES = 16 << 20
_SCALE_SUFFIX, _FP8 = "_scale_inv", "F8_E4M3"
_DEQUANTISED_DTYPE = "BF16"
"""Of weights that a folder holds in FP8 or MXFP4, where they are kept as they are."""


def model_folder_error(path: Path, why: str) -> CheckpointError:
    """Returns the error for a file of a model folder."""
    return CheckpointError(f"{path} {why}. Take it from the model's own folder.")


def check_own_files(path: Path) -> None:
    """Raises if config.json, or a file of weights, is a link to a file elsewhere: what is made of the folder would have a copy of it.

    Links inside of the folder are fine, and so are those of the Hugging Face hub's cache.
    """
    files = [path / CONFIG_FILE, path / _INDEX_FILE, *sorted(path.glob("*.safetensors"))]
    strange = [f"{file.name} -> {to}" for file in files if (to := symlink_target_outside(file, path)) is not None]
    if strange:
        raise CheckpointError(
            f"{path} has links to files elsewhere: {abbreviate_names(strange)}. Put the files themselves there if they belong to the "
            "model; the folder itself may be a link."
        )


class HuggingFaceFolder:
    """A folder with its config.json, which is read here, and its weights, whose headers are read once they are needed."""

    def __init__(self, path: Path) -> None:
        self.path, self.config_file = path, path / CONFIG_FILE
        check_own_files(path)
        with self._reading():
            try:
                content = read_limited_json(self.config_file, _MAX_CONFIG_BYTES)
            except ValueError as error:
                raise model_folder_error(self.config_file, f"cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise model_folder_error(self.config_file, "is no table of settings")
        self.config: dict[str, Any] = content

    @cached_property
    def tensors(self) -> TensorInfos:
        """Every tensor of the folder's files, and its file."""
        return _tensor_infos(self.path)

    @property
    def is_own(self) -> bool:
        """Whether it has our own names: no family describes the model."""
        return self.config.get("model_type") == hf.OWN_MODEL_TYPE

    def settings(self, *, without_weights: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns ModelConfig and MoEConfig values; the second are empty for a dense model. `without_weights`: from config.json alone."""
        with self._reading(), self.naming_config():
            model, moe = hf.parse_config_json(self.config)
            depends = model.get("mtp_num_layers") or model.get("model_type") == ENCODER_DECODER_MODEL
            if not without_weights and depends and not self.is_own:
                model = hf.fit_values_to_tensors(self.config, model, self.tensors)
            return model, moe

    def checked_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the settings; raises if they claim more than the files contain, before a model is built from them."""
        model, moe = self.settings()
        with self._reading():
            apart = not self.is_own and hf.has_separate_experts(self.config)
            tensors = len(self.tensors)
            check_counts(self.config_file, model_folder_error, model, moe, num_tensors=tensors, separate_experts=apart)
        return model, moe

    def check_size(self, spec: ModelSpec) -> None:
        """Raises if a model is larger than the folder's files, before memory is allocated for it."""
        with self._reading():
            needed = sum(math.prod(shape) for shape in spec.logical_shapes().values())
            stored = num_stored_elements(self.tensors)
        if needed > stored:
            raise model_folder_error(
                self.config_file, f"describes {needed:,} parameters, and the files beside it have {stored:,} bytes"
            )

    @contextmanager
    def naming_config(self) -> Iterator[None]:
        """Puts the path of config.json before the key of every problem raised inside: several models may be open.

        A problem names the file's own keys, where these are known, instead of the flags that stand for them.
        """
        try:
            yield
        except ConfigError as error:
            keys = hf.keys_of_flags(self.config)
            told = (
                Problem(
                    f"{self.config_file}: {_with_keys(problem.where, keys)}",
                    problem.value,
                    _with_keys(problem.rule, keys),
                    _with_keys(problem.fix, keys),
                )
                for problem in error.problems
            )
            raise ConfigError(list(told)) from error

    def _reading(self) -> AbstractContextManager[None]:
        return reading_untrusted(self.config_file, model_folder_error)


def _with_keys(text: str, keys: Mapping[str, str]) -> str:
    return re.sub(r"--[a-z][a-z0-9-]*", lambda match: keys.get(match[0], match[0]), text)


def folder_manifest(
    folder: HuggingFaceFolder, spec: ModelSpec, *, may_lack: Callable[[str], bool] | None = None
) -> Manifest:
    """Locates every logical tensor of a model in a folder, which may lack some; everything that does not fit is one error."""
    _check_same_model(folder, spec)
    shapes, slots = hf.folder_shapes(spec), folder.tensors
    entries = hf.folder_entries(spec, str(folder.config.get("model_type")))
    known = {entry.name: entry for entry in entries}
    slots, packed = split_packed_tensors(slots) if hf.has_mxfp4_weights(folder.config) else (slots, {})
    block = hf.fp8_block_size(folder.config)
    scales = {} if block is None else {n: n + _SCALE_SUFFIX for n in slots if n + _SCALE_SUFFIX in slots}
    apart = set(scales.values())
    weights = {name: slot for name, slot in slots.items() if name not in apart}  # in order: errors name the first ones
    weights |= {name: (tensor.file, tensor.info) for name, tensor in packed.items()}
    stored = _stored_names(folder, weights, known)
    absent = [entry for entry in entries if entry.name not in stored]
    problems = [
        f"{entry.name} is missing"
        for entry in absent
        if may_lack is None or not all(may_lack(region.name) for region in entry.regions)
    ]
    problems += [f"{name} is not a tensor of this model" for full, name in stored.items() if full not in known]
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
        if entry.name not in stored:
            continue
        tensor = packed.get(stored[entry.name])
        if tensor is not None:
            wrong = tensor.problems(entry)
            problems += wrong
            for region in entry.regions if not wrong else ():
                key, box = folder_tensor_key(region.name), tensor.stored_box(region)
                _add(tensors, key, shapes[region.name], _DEQUANTISED_DTYPE, box)
            continue
        file, slot = slots[stored[entry.name]]
        if slot.shape != entry.shape:
            problems.append(f"{stored[entry.name]} is {list(slot.shape)} there, and should be {list(entry.shape)}")
            continue
        scale, wrong = _block_scale(stored[entry.name], slots, scales, block)
        problems += wrong
        dtype = slot.dtype if scale is None else _DEQUANTISED_DTYPE
        for region in entry.regions:
            box = StoredBox.of_region(file, stored[entry.name], region, scale)
            _add(tensors, folder_tensor_key(region.name), shapes[region.name], dtype, box)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems[:8])
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{folder.path} does not hold the tensors that the model should have:\n{lines}{more}\nCopy all files of the model there, "
            f"and use the settings of its {CONFIG_FILE}."
        )
    return Manifest(step=0, layout="", metadata={}, tensors=tensors, local={}, files={})


def _block_scale(
    name: str, infos: TensorInfos, scales: Mapping[str, str], block: Shape | None
) -> tuple[BlockScale | None, list[str]]:
    """Returns where the scales of a stored tensor are, and what is wrong with them; `scales` names those of all tensors."""
    info = infos[name][1]
    if block is None or (name not in scales and info.dtype != _FP8):
        return None, [f"{name} is in FP8, of which config.json says nothing"] if info.dtype == _FP8 else []
    if name not in scales:
        return None, [f"{name} is in FP8 and has no {name}{_SCALE_SUFFIX}"]
    if info.dtype != _FP8 or len(info.shape) != 2:
        return None, [f"{name} has scales and is no matrix in FP8"]
    file, scale = infos[scales[name]]
    wanted = scale_shape(info.shape, block)
    if scale.shape != wanted or scale.dtype != "F32":
        return None, [f"{scales[name]} is {scale.dtype} {list(scale.shape)} there, and should be F32 {list(wanted)}"]
    return BlockScale(file, scales[name], block), []


def _stored_names(
    folder: HuggingFaceFolder, infos: TensorInfos, expected: Mapping[str, hf.FolderEntry]
) -> dict[str, str]:
    """Maps full names to stored names, without entries that are not weights of their own."""
    if folder.is_own:
        return {name: name for name in infos}
    family, path = hf.get_family(hf.family_name_of_config(folder.config)), folder.path
    stored = hf.stored_names_by_full_name(family, infos, expected)
    head = hf.output_head_name(family)
    if head in stored and head not in expected:
        embedding = next(entry for entry in expected.values() if entry.regions[0].name == "embedding.weight")
        twin = stored.pop(head)
        if embedding.name in stored and not _same_bytes(path, infos[twin], infos[stored[embedding.name]]):
            raise CheckpointError(
                f"{path}: {twin} differs from the embedding, but its {CONFIG_FILE} ties them. Correct {CONFIG_FILE}."
            )
    return stored


def _same_bytes(path: Path, a: tuple[str, TensorInfo], b: tuple[str, TensorInfo]) -> bool:
    """Whether two tensors of a folder have the same bytes, read block by block."""
    if a[1].end - a[1].begin != b[1].end - b[1].begin:
        return False
    with open_regular_file(path / a[0]) as first, open_regular_file(path / b[0]) as second:
        first.seek(a[1].begin)
        second.seek(b[1].begin)
        left = a[1].end - a[1].begin
        while left:
            size = min(left, BLOCK_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _add(tensors: dict[str, StoredTensor], key: str, shape: Shape, dtype: str, box: StoredBox) -> None:
    known = tensors.get(key, StoredTensor(shape, dtype, ()))
    tensors[key] = StoredTensor(shape, known.dtype, (*known.boxes, box))


def _check_same_model(folder: HuggingFaceFolder, spec: ModelSpec) -> None:
    """Checks that the settings that change the function of the weights equal the run's."""
    model_values, moe_values = folder.settings()
    ours = asdict(spec.config) | (dict.fromkeys(moe_values) if spec.moe is None else asdict(spec.moe))
    theirs = model_values | moe_values
    differing = [
        f"{name}: {theirs[name]} there, {ours[name]} in this run" for name in identity_differences(theirs, ours)
    ]
    if differing:
        raise CheckpointError(
            f"{folder.config_file} is of another model ({'; '.join(differing)}). Leave these settings out and say --from {folder.path}, "
            "which takes those of the folder."
        )


def _check_shards(path: Path) -> None:
    """Checks that every file that the index names exists; next to a single-file model, an index is a leftover."""
    if not (path / _INDEX_FILE).is_file() or (path / "model.safetensors").is_file():
        return
    with reading_untrusted(path / _INDEX_FILE, model_folder_error):
        files = set(read_limited_json(path / _INDEX_FILE, MAX_HEADER_BYTES)["weight_map"].values())
        missing = sorted(str(name) for name in files if not (path / str(name)).is_file())
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise CheckpointError(
            f"{path} lacks {', '.join(missing[:4])}{more}, which {_INDEX_FILE} names. Copy all files of the model there."
        )


def _tensor_infos(path: Path) -> dict[str, tuple[str, TensorInfo]]:
    """Returns every tensor of the folder's files, and its file."""
    _check_shards(path)
    infos: dict[str, tuple[str, TensorInfo]] = {}
    for file in sorted(path.glob("*.safetensors")):
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in ("consolidated*", "adapter*")):
            continue  # the same weights again under other names, or a part that is no model
        for name, slot in read_checked_header(file, None).items():
            if name in infos:
                raise CheckpointError(
                    f"{path} holds {name} in {infos[name][0]} and in {file.name}. Remove one of them."
                )
            infos[name] = (file.name, slot)
    return infos
