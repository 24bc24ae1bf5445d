"""Converts tensors under Hugging Face's names to logical tensors under ours, and back; whole, in memory, for models that fit there.

`folder_entries.py` has the correspondence. A checkpoint is refused as a whole, with all its problems, before anything is
copied. No layout is involved: logical tensors are whole.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petatron.base.errors import CheckpointError
from petatron.base.format_text import abbreviate_names
from petatron.models.hf.families.t5 import tie_missing_head
from petatron.models.hf.family import Family
from petatron.models.hf.find_family import family_name_of_config, get_family
from petatron.models.hf.folder_entries import FolderEntry, family_entries, folder_shapes
from petatron.models.model_spec import ModelSpec
from petatron.sharding.shard_spec import Placement, Shape

_PROJECTION = ("layers.*.projection",)
_EMBEDDING, _OUTPUT_HEAD = "embedding.weight", "head.weight"


def to_logical(family: str, hf_tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Returns logical tensors from those of a Hugging Face checkpoint or of a model in memory.

    Raises `CheckpointError` with all that do not fit.
    """
    table = get_family(family)
    shapes = folder_shapes(spec)
    entries = _matching_entries(table, spec, hf_tensors)
    stored = stored_names_by_full_name(table, hf_tensors, {entry.name for entry in entries})
    tied_heads = [
        stored.pop(name) for name in _output_head_names(table) if name in stored and _OUTPUT_HEAD not in shapes
    ]
    tied_head = tied_heads[0] if tied_heads else None
    problems = _name_problems(entries, stored)
    problems += [
        f"{stored[entry.name]} is {list(hf_tensors[stored[entry.name]].shape)}, "
        f"but the config makes it {list(entry.shape)}"
        for entry in entries
        if entry.name in stored and tuple(hf_tensors[stored[entry.name]].shape) != entry.shape
    ]
    tensors = {full: hf_tensors[name] for full, name in stored.items()}
    logical = {} if problems else _logical_from_entries(entries, tensors, shapes)
    if tied_head is not None and not problems and not torch.equal(hf_tensors[tied_head], logical[_EMBEDDING]):
        problems.append(f"{tied_head} differs from the embedding, but the config ties them")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"The tensors do not fit a {family} model of this config:\n{lines}\n"
            "Take config.json and the weights from the same folder, all files of it."
        )
    return logical


def to_hf(family: str, logical: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Returns the tensors of a Hugging Face checkpoint from logical ones; a tied head is left out, as transformers saves it."""
    table = get_family(family)
    shapes = folder_shapes(spec)
    entries = family_entries(table, table.mappings, spec)
    problems = [f"{name} is missing" for name in shapes if name not in logical]
    problems += [f"{name} is not a tensor of this model" for name in logical if name not in shapes]
    problems += [
        f"{name} is {list(logical[name].shape)}, but the config makes it {list(shape)}"
        for name, shape in shapes.items()
        if name in logical and tuple(logical[name].shape) != shape
    ]
    if problems:
        raise CheckpointError(
            f"These tensors are not those of the model: {abbreviate_names(problems)}. Check the model's config."
        )
    return {entry.name: _entry_from_logical(entry, logical) for entry in entries}


def _matching_entries(family: Family, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> tuple[FolderEntry, ...]:
    """Returns the entries of the family's files, or those of a model in memory where more of the names match."""
    tables = [family_entries(family, rows, spec) for rows in (family.mappings, family.in_memory_mappings) if rows]
    return max(tables, key=lambda entries: sum(entry.name in tensors for entry in entries))


def _logical_from_entries(
    entries: Sequence[FolderEntry], tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Returns logical tensors; one that is a tensor of the checkpoint, or rows of it, shares its memory."""
    logical: dict[str, Tensor] = {}
    for entry in entries:
        for region in entry.regions:
            part = region.view_in(tensors[entry.name])
            if region.shape == shapes[region.name]:
                logical[region.name] = part.contiguous()
                continue
            if region.name not in logical:
                logical[region.name] = part.new_empty(shapes[region.name])
            logical[region.name][region.logical_slices()] = part
    return logical


def _entry_from_logical(entry: FolderEntry, logical: Mapping[str, Tensor]) -> Tensor:
    if len(entry.regions) == 1:
        region = entry.regions[0]
        part = logical[region.name][region.logical_slices()]
        return (part.transpose(-2, -1) if region.transposed else part).reshape(entry.shape).contiguous()
    tensor = logical[entry.regions[0].name].new_empty(entry.shape)
    for region in entry.regions:
        region.view_in(tensor).copy_(logical[region.name][region.logical_slices()])
    return tensor


def output_head_name(family: Family) -> str:
    """Returns the family's name of the output head's weight; a checkpoint of a tied model may hold it as a copy of the embedding."""
    return _output_head_names(family)[0]


def _output_head_names(family: Family) -> list[str]:
    """Returns its name in files, and that in memory if it is another."""
    rows = (*family.mappings, *family.in_memory_mappings)
    return list(dict.fromkeys(f"{row.hf_module}.weight" for row in rows if row.logical_modules == ("head",)))


def stored_names_by_full_name(family: Family, names: Iterable[str], expected: Container[str]) -> dict[str, str]:
    """Maps full names to stored names, without ignored tensors that are not expected; a bare model's names lack the prefix."""
    full_names = {_full_name(family, name, expected): name for name in names}
    return {
        full: name
        for full, name in full_names.items()
        if full in expected or not any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored_tensors)
    }


def _full_name(family: Family, name: str, expected: Container[str]) -> str:
    """Returns the expected name that a stored one stands for, or itself."""
    names = [name, *(name.replace(part, written) for part, written in family.tensor_aliases.items() if part in name)]
    return next((full for alias in names for full in (alias, family.prefix + alias) if full in expected), name)


def fit_values_to_tensors(
    content: Mapping[str, Any], values: Mapping[str, Any], names: Container[str]
) -> dict[str, Any]:
    """Returns ModelConfig values of a config.json as they are with tensors of these names, which do not always have what it says."""
    return _drop_missing_predictions(content, tie_missing_head(values, names), names)


def _drop_missing_predictions(
    content: Mapping[str, Any], values: Mapping[str, Any], names: Container[str]
) -> dict[str, Any]:
    """Returns ModelConfig values without the depths of multi-token prediction that a config.json counts and the tensors lack.

    transformers saves a model without them, and does not say so.
    """
    if not values.get("mtp_num_layers"):
        return dict(values)
    mapping = next(
        (row for row in get_family(family_name_of_config(content)).mappings if row.logical_modules == _PROJECTION), None
    )
    first = None if mapping is None else mapping.hf_module.replace("*", str(values["num_layers"])) + ".weight"
    return {**values, "mtp_num_layers": values["mtp_num_layers"] if first is None or first in names else None}


def _name_problems(entries: Sequence[FolderEntry], stored: Mapping[str, str]) -> list[str]:
    expected = {entry.name for entry in entries}
    missing = [entry.name for entry in entries if entry.name not in stored]
    unknown = [name for full, name in stored.items() if full not in expected]
    problems = [f"missing: {abbreviate_names(missing)}"] if missing else []
    return problems + ([f"not in this model: {abbreviate_names(unknown)}"] if unknown else [])


@torch.no_grad()
def fill_model(module: nn.Module, placements: Mapping[str, Placement], logical: Mapping[str, Tensor]) -> None:
    """Overwrites this rank's weights, and its routers' expert biases; rows of vocabulary padding become zero.

    Tensors of `logical` without a shard on this rank are ignored. An optimizer with master weights must be built after this,
    since it copies the weights.
    """
    shards = [shard for name, _ in module.named_parameters() for shard in placements[name].tensor_shards]
    biases = {name: buffer for name, buffer in module.named_buffers() if name.endswith(".router.expert_bias")}
    needed = {shard.name for shard in shards} | biases.keys()
    problems = sorted(f"{name} is missing" for name in needed if name not in logical)
    problems += sorted(
        {
            f"{shard.name} is {list(logical[shard.name].shape)} instead of {list(shard.logical_shape)}"
            for shard in shards
            if shard.name in logical and tuple(logical[shard.name].shape) != shard.logical_shape
        }
    )
    if problems:
        raise CheckpointError(
            f"The weights do not fit the model: {'; '.join(problems[:12])}. Build the model from the weights' own config."
        )
    for name, parameter in module.named_parameters():
        parameter.zero_()
        for shard in placements[name].tensor_shards:
            parameter[shard.local_slices()].copy_(logical[shard.name][shard.logical_slices()])
    for name, bias in biases.items():
        bias.copy_(logical[name])
