"""Tensors under Hugging Face's names to logical tensors under ours, and back.

The rows of a family say which name is which; the decoder, built without memory, says which tensors exist and how large they
are. So a bias that a model does not have is unknown, one that it has is required, and a checkpoint is refused as a whole,
with everything that is wrong with it, before anything is copied. No layout is involved: logical tensors are whole.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.config.schema import ModelConfig
from petatron.mesh.spec import Shape, TensorSplit, find, place
from petatron.models.decoder import Decoder, shards
from petatron.models.hf.families import family_named
from petatron.models.hf.family import Family, Row

_EMBEDDING, _HEAD = "embedding.weight", "head.weight"
_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A row of a family's table for one tensor of one layer."""

    logical: tuple[str, ...]
    hf: str
    transposed: bool


def logical_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every logical tensor of a decoder.

    >>> shapes = logical_shapes(ModelConfig(
    ...     num_layers=1, hidden_size=8, ffn_hidden_size=32, num_attention_heads=2, num_query_groups=2, kv_channels=4,
    ...     vocab_size=50, max_position_embeddings=16))
    >>> shapes["embedding.weight"], shapes["layers.0.attention.q.bias"]
    ((50, 8), (8,))
    """
    with torch.device("meta"):
        decoder = Decoder(model)
    table = shards(model)
    return {
        piece.name: piece.logical_shape
        for name, parameter in decoder.named_parameters()
        for piece in place(name, tuple(parameter.shape), find(table, name), TensorSplit()).pieces
    }


def tensor_rows(family: Family, model: ModelConfig, shapes: Mapping[str, Shape]) -> list[TensorRow]:
    """The family's table written out for a model: one row per Hugging Face tensor that it has."""
    rows = []
    for row in family.rows:
        layers = range(model.num_layers) if "*" in row.hf else range(1)
        for layer in layers:
            rows += [_tensor_row(row, layer, leaf) for leaf in ("weight", "bias")]
    rows = [row for row in rows if row.logical[0] in shapes]
    unnamed = shapes.keys() - {name for row in rows for name in row.logical}
    if unnamed:
        raise CheckpointError(
            f"This model has tensors for which the Hugging Face family {family.name} has no name: {_some(unnamed)}. "
            "Ask petatron.models.hf.to_hf_config which setting does not fit."
        )
    return rows


def _tensor_row(row: Row, layer: int, leaf: str) -> TensorRow:
    logical = tuple(f"{name.replace('*', str(layer))}.{leaf}" for name in row.logical)
    return TensorRow(logical, f"{row.hf.replace('*', str(layer))}.{leaf}", row.transposed and leaf == "weight")


def to_logical(family: str, hf_tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Logical tensors from those of a Hugging Face checkpoint; `CheckpointError` names all that do not fit."""
    table = family_named(family)
    shapes = logical_shapes(model)
    rows = tensor_rows(table, model, shapes)
    stored = _canonical(table, hf_tensors, {row.hf for row in rows})
    tied_head = stored.pop(_hf_head(table), None) if _HEAD not in shapes else None
    problems = _differences(rows, stored)
    logical: dict[str, Tensor] = {}
    for row in rows:
        if row.hf not in stored:
            continue
        tensor = hf_tensors[stored[row.hf]]
        wanted = _hf_shape(row, shapes)
        if tuple(tensor.shape) != wanted:
            problems.append(f"{stored[row.hf]} is {list(tensor.shape)}, but the config makes it {list(wanted)}")
            continue
        tensor = tensor.t().contiguous() if row.transposed else tensor
        parts = tensor.split([shapes[name][0] for name in row.logical]) if len(row.logical) > 1 else [tensor]
        logical.update(zip(row.logical, parts))
    if tied_head is not None and not problems and not torch.equal(hf_tensors[tied_head], logical[_EMBEDDING]):
        problems.append(f"{tied_head} differs from the embedding, but the config ties them")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"The tensors do not fit a {family} model of this config:\n{lines}\n"
            "Take config.json and the weights from the same folder, all files of it."
        )
    return logical


def to_hf(family: str, logical: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a Hugging Face checkpoint from logical ones; a tied head is left out, as transformers saves it."""
    table = family_named(family)
    shapes = logical_shapes(model)
    rows = tensor_rows(table, model, shapes)
    problems = [f"{name} is missing" for name in shapes if name not in logical]
    problems += [f"{name} is not a tensor of this model" for name in logical if name not in shapes]
    problems += [
        f"{name} is {list(logical[name].shape)}, but the config makes it {list(shape)}"
        for name, shape in shapes.items()
        if name in logical and tuple(logical[name].shape) != shape
    ]
    if problems:
        raise CheckpointError(f"These tensors are not those of the model: {_some(problems)}. Check the model's config.")
    return {row.hf: _joined(row, logical) for row in rows}


def _joined(row: TensorRow, logical: Mapping[str, Tensor]) -> Tensor:
    parts = [logical[name] for name in row.logical]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (whole.t() if row.transposed else whole).contiguous()


def _hf_shape(row: TensorRow, shapes: Mapping[str, Shape]) -> Shape:
    parts = [shapes[name] for name in row.logical]
    whole = (sum(part[0] for part in parts), *parts[0][1:])
    return whole[::-1] if row.transposed else whole


def _hf_head(family: Family) -> str:
    return next(row.hf for row in family.rows if row.logical == ("head",)) + ".weight"


def _canonical(family: Family, names: Mapping[str, Tensor], expected: set[str]) -> dict[str, str]:
    """Full name to the name as stored, without what is no weight; a bare model's names lack the prefix."""
    kept = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored)]
    full = [name if name in expected else family.prefix + name for name in kept]
    return {whole if whole in expected else name: name for whole, name in zip(full, kept)}


def _differences(rows: Sequence[TensorRow], stored: Mapping[str, str]) -> list[str]:
    expected = {row.hf for row in rows}
    missing = [row.hf for row in rows if row.hf not in stored]
    unknown = [name for full, name in stored.items() if full not in expected]
    problems = [f"missing: {_some(missing)}"] if missing else []
    return problems + ([f"not in this model: {_some(unknown)}"] if unknown else [])


def _some(names: Sequence[str] | set[str]) -> str:
    names = sorted(names) if isinstance(names, set) else list(names)
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more
