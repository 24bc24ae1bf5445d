"""Maps the tensors of a Hugging Face model folder to the regions of logical tensors that they consist of.

A folder holds *entries*: tensors under the names of a Hugging Face family, or, for a model that no family can express,
under our own. An entry is completely covered by its regions, and the regions of all entries cover every logical tensor once.
An entry differs from a logical tensor in four ways: several may be fused into one (GPT-2's q, k and v), maybe row by row (gate and up
of gpt-oss), a matrix may be stored transposed (GPT-2), and an expert may be an entry of its own although a logical tensor holds all of a
layer's experts.

The model's spec determines which tensors it has; a family's mappings only name them. So a bias that a
model lacks is no entry, and one that it has must be named by the family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.format_text import abbreviate_names
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.vision_language import num_vision_layers
from petatron.models.hf.config_json import matching_family
from petatron.models.hf.family import OWN_MODEL_TYPE, Family, ModuleMapping
from petatron.models.hf.find_family import get_family
from petatron.models.model_spec import ModelSpec
from petatron.sharding.shard_spec import Shape


@dataclass(frozen=True, slots=True)
class EntryRegion:
    """The region (`start`, `shape`) of the logical tensor `name`, at `start_in_entry` of an entry.

    `start_in_entry` is in the entry's own dimensions: leading dimensions of size 1 that the entry does not have are dropped (an
    expert), trailing ones that it has besides are one with the last (a convolution), and with `transposed` the last two dimensions are
    swapped in the entry. `interleaved` is (dimension, count) where `count` tensors alternate along a dimension of the entry: it then
    counts as two, of which the second one tells them apart.
    """

    name: str
    start: Shape
    shape: Shape
    start_in_entry: Shape
    transposed: bool = False
    interleaved: Shape = ()

    @property
    def shape_in_entry(self) -> Shape:
        """The size of the region in the entry's dimensions."""
        sizes = self.shape[len(self.shape) - len(self.start_in_entry) + bool(self.interleaved) :]
        sizes = (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else sizes
        if not self.interleaved:
            return sizes
        second = self.interleaved[0] + 1
        return (*sizes[:second], 1, *sizes[second:])

    def logical_slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape))

    def entry_slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start_in_entry, self.shape_in_entry))

    def view_in(self, entry: Tensor) -> Tensor:
        """Returns the region of an entry's tensor, in the dimensions of the logical tensor; it shares the entry's memory."""
        if not self.interleaved:
            part = entry.flatten(len(self.start_in_entry) - 1)[self.entry_slices()]
        else:
            dim, count = self.interleaved
            part = entry.unflatten(dim, (-1, count))[self.entry_slices()].squeeze(dim + 1)
        part = part.transpose(-2, -1) if self.transposed else part
        return part[(None,) * (len(self.shape) - part.dim())]


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One tensor of a model folder, completely covered by its regions."""

    name: str
    shape: Shape
    regions: tuple[EntryRegion, ...]


def folder_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Returns the shapes of all logical tensors that a folder holds: the weights, and the expert biases of routers that have some."""
    shapes, moe = dict(spec.logical_shapes()), spec.moe
    if moe is not None and moe.moe_router_enable_expert_bias:
        shapes |= {
            name.removesuffix("weight") + "expert_bias": shape[:1]
            for name, shape in shapes.items()
            if name.endswith(".mlp.router.weight")
        }
    return shapes


def folder_entries(spec: ModelSpec, model_type: str | None = None) -> tuple[FolderEntry, ...]:
    """Returns every tensor of a model's folder in the names of the `model_type` that its config.json has.

    None is that of the folder which is written: a family that can express the model, else our own. Several families may: a Phi-3
    without a window is a Llama whose matrices are fused.
    """
    shapes = folder_shapes(spec)
    if model_type is None:
        family = matching_family(spec)
    else:
        family = None if model_type == OWN_MODEL_TYPE else get_family(model_type)
    if family is None:
        return tuple(
            FolderEntry(name, shape, (EntryRegion(name, (0,) * len(shape), shape, (0,) * len(shape)),))
            for name, shape in shapes.items()
        )
    return family_entries(family, family.mappings, spec)


def family_entries(family: Family, mappings: Sequence[ModuleMapping], spec: ModelSpec) -> tuple[FolderEntry, ...]:
    """Returns the entries of a model's tensors; raises `CheckpointError` if one of these has no name in the family."""
    shapes = folder_shapes(spec)
    layers = 1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("layers.")), default=-1)
    entries: list[FolderEntry] = []
    for mapping in mappings:
        for layer in _layers_of(mapping, spec, layers):
            for leaf in (mapping.leaf,) if mapping.no_weight_suffix else ("weight", "bias"):
                hf_layer = layer // max(family.branches, 1) - _first_layer(mapping, spec)
                entries += _mapping_entries(mapping, (layer, hf_layer), leaf, shapes, spec.config)
    unnamed = shapes.keys() - {region.name for entry in entries for region in entry.regions}
    if unnamed:
        raise CheckpointError(
            f"This model has tensors for which the Hugging Face family {family.name} has no name: {abbreviate_names(unnamed)}. "
            "Ask petatron.models.hf.to_hf_config which setting does not fit."
        )
    return tuple(entries)


def _layers_of(mapping: ModuleMapping, spec: ModelSpec, layers: int) -> range:
    if "*" not in mapping.hf_module:
        return range(1)
    return range(_first_layer(mapping, spec), _encoder_layers(spec.config) if mapping.stack == "encoder" else layers)


def _first_layer(mapping: ModuleMapping, spec: ModelSpec) -> int:
    return _encoder_layers(spec.config) if mapping.stack == "decoder" else 0


def _encoder_layers(config: ModelConfig) -> int:
    """Returns the layers of an encoder, of text or of images, before those of the decoder."""
    return num_vision_layers(config) or config.encoder_num_layers or 0


def _mapping_entries(
    mapping: ModuleMapping, layers: tuple[int, int], leaf: str, shapes: Mapping[str, Shape], config: ModelConfig
) -> list[FolderEntry]:
    """Returns the entries of one layer, by its index here and there."""
    layer, hf_layer = map(str, layers)
    names = [f"{module.replace('*', layer)}.{leaf}" for module in mapping.logical_modules]

    def has(module: str) -> bool:
        return f"{module.replace('*', layer)}.weight" in shapes

    lacks = mapping.beside is not None and not has(mapping.beside)
    if names[0] not in shapes or lacks or (mapping.not_beside is not None and has(mapping.not_beside)):
        return []
    hf = mapping.hf_module.replace("*", hf_layer) + ("" if mapping.no_weight_suffix else f".{leaf}")
    parts = {name: shapes[name] for name in names}
    transposed = mapping.transposed and leaf == "weight"
    if mapping.fused_by_head:
        return [_entry_fused_by_head(hf, parts, getattr(config, mapping.heads))]
    if mapping.shape_there is not None and leaf == mapping.leaf:
        return [_reshaped_entry(hf, names[0], shapes[names[0]], mapping.shape_there(config))]
    if mapping.interleaved:
        return [_interleaved_entry(hf, parts, fused_dim=int(".experts." in names[0]), transposed=transposed)]
    if "#" not in mapping.hf_module:
        return [_fused_entry(hf, parts, fused_dim=int(".experts." in names[0]), expert=None, transposed=transposed)]
    return [
        _fused_entry(hf.replace("#", str(expert)), parts, fused_dim=1, expert=expert, transposed=transposed)
        for expert in range(shapes[names[0]][0])
    ]


def _reshaped_entry(name: str, logical: str, shape: Shape, shape_there: Shape) -> FolderEntry:
    """Returns an entry with a logical tensor that has another shape there: no leading dimension of 1, or more trailing ones."""
    start = (0,) * min(len(shape), len(shape_there))
    return FolderEntry(name, shape_there, (EntryRegion(logical, (0,) * len(shape), shape, start),))


def _fused_entry(
    name: str, parts: Mapping[str, Shape], *, fused_dim: int, expert: int | None, transposed: bool
) -> FolderEntry:
    """Fuses logical tensors, or one expert of each, along the logical dimension `fused_dim`."""
    regions, offset, size = [], 0, ()
    for logical, shape in parts.items():
        start = (expert or 0, *(0 for _ in shape[1:]))
        box = shape if expert is None else (1, *shape[1:])
        size = tuple(offset + rows if dim == fused_dim else rows for dim, rows in enumerate(box))
        at = tuple(offset if dim == fused_dim else 0 for dim in range(len(box)))
        at, size = (at, size) if expert is None else (at[1:], size[1:])
        at, size = (_swap_last_dims(at), _swap_last_dims(size)) if transposed else (at, size)
        regions.append(EntryRegion(logical, start, box, at, transposed))
        offset += shape[fused_dim]
    return FolderEntry(name, size, tuple(regions))


def _entry_fused_by_head(name: str, parts: Mapping[str, Shape], num_heads: int) -> FolderEntry:
    """Fuses the rows of one head of each logical tensor, then those of the next head."""
    regions, offset, width = [], 0, next(iter(parts.values()))[1:]
    zeros = (0,) * len(width)
    for head in range(num_heads):
        for logical, shape in parts.items():
            rows = shape[0] // num_heads
            regions.append(EntryRegion(logical, (head * rows, *zeros), (rows, *width), (offset, *zeros)))
            offset += rows
    return FolderEntry(name, (offset, *width), tuple(regions))


def _interleaved_entry(name: str, parts: Mapping[str, Shape], *, fused_dim: int, transposed: bool) -> FolderEntry:
    """Fuses logical tensors of one shape by rows that alternate along the logical dimension `fused_dim`."""
    shape, count = next(iter(parts.values())), len(parts)
    fused = tuple(size * count if dim == fused_dim else size for dim, size in enumerate(shape))
    swaps = transposed and fused_dim >= len(shape) - 2
    dim = 2 * len(shape) - 3 - fused_dim if swaps else fused_dim
    regions = tuple(
        EntryRegion(
            logical,
            (0,) * len(shape),
            shape,
            tuple(number if at == dim + 1 else 0 for at in range(len(shape) + 1)),
            transposed,
            (dim, count),
        )
        for number, logical in enumerate(parts)
    )
    return FolderEntry(name, _swap_last_dims(fused) if transposed else fused, regions)


def _swap_last_dims(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])
