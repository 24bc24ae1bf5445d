"""The parts of a model in the order in which a token passes them: modules before the layers, groups of equal layers, what comes after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from petatron.config.pipeline_stages import PipelineStage
from petatron.estimate.flops import model_flops_per_token, outer_module_flops, parameter_count
from petatron.layers.moe.moe_layer import MoESpec
from petatron.layers.spec.branch_spec import BranchSpec
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.transformer_layer import LayerSpec
from petatron.models.model_spec import ModelSpec

_LONGEST_UNIT = 12
"""Layers of the longest pattern that is looked for."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A module, or a residual branch of a layer.

    gemms: its GEMMs as `name 1024 -> 4096`. flops: forward and backward, per token of a full sequence. norms: where it has some, such as
    "norm before".
    """

    title: str
    parameters: int
    flops: float
    gemms: tuple[str, ...] = ()
    norms: str = ""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`repeats` times the same one or several layers; `first` is the index of the first."""

    first: int
    repeats: int
    layers: tuple[tuple[ModelPart, ...], ...]

    @property
    def last(self) -> int:
        return self.first + self.repeats * len(self.layers) - 1


@dataclass(frozen=True, slots=True)
class ModelParts:
    """All parts, the parameters and the FLOPs per token of the whole model.

    between: modules whose output a later layer takes first, with its index: what ends an encoder.
    """

    before: tuple[ModelPart, ...]
    between: tuple[tuple[int, ModelPart], ...]
    groups: tuple[LayerGroup, ...]
    after: tuple[ModelPart, ...]
    parameters: int
    flops: float


def model_parts(spec: ModelSpec) -> ModelParts:
    """Describes a model.

    >>> from petatron.models.registry import model_spec
    >>> from petatron.validate import load_config
    >>> run = load_config([], preset="bert-base", require_training=False).config
    >>> parts = model_parts(model_spec(run))
    >>> [part.title for part in parts.before], [(group.repeats, len(group.layers)) for group in parts.groups]
    (['embedding', 'position', 'token_type', 'embedding_norm'], [(12, 1)])
    >>> [part.title for part in parts.groups[0].layers[0]], parts.parameters
    (['attention', 'mlp'], 110106428)
    """
    modules = _by_module(spec.outer_params(spec.whole_model))
    # A head that is tied to the embedding multiplies too.
    ends = _by_module(spec.outer_params(PipelineStage((), has_embedding=False, has_loss=True)))
    predicted = spec.num_predictions * spec.predicted_length / spec.config.seq_length
    before = [name for name in modules if name in spec.modules_before_layers]
    between = {name: spec.layer_after(name) for name in modules if name not in before}
    between = {name: index for name, index in between.items() if index < len(spec.layers)}
    parts = {name: _module_part(name, params) for name, params in modules.items()}
    for name, params in ends.items():
        of_end = _module_part(name, params)
        counted = parts[name].parameters if name in parts else 0
        parts[name] = replace(of_end, parameters=counted, flops=of_end.flops * predicted)
    for name in spec.tokens_of_modules:
        parts[name] = replace(parts[name], flops=outer_module_flops(spec, name))
    return ModelParts(
        tuple(parts[name] for name in before),
        tuple((index, parts[name]) for name, index in between.items()),
        tuple(_groups(spec, sorted({0, *between.values(), len(spec.layers)}))),
        tuple(part for name, part in parts.items() if name not in before and name not in between),
        parameter_count(spec),
        model_flops_per_token(spec),
    )


def repeated_units(layers: Sequence[LayerSpec]) -> Iterator[tuple[int, tuple[LayerSpec, ...], int]]:
    """Yields the index of the first layer of each group, the layers that repeat in it, and how often they do."""
    first = 0
    while first < len(layers):
        best = max(
            range(1, min(_LONGEST_UNIT, len(layers) - first) + 1),
            key=lambda size: (_covered(layers, first, size) if _repeats(layers, first, size) > 1 else 0, -size),
        )
        repeats = _repeats(layers, first, best)
        yield first, tuple(layers[first : first + best]), repeats
        first += best * repeats


def _covered(layers: Sequence[LayerSpec], first: int, size: int) -> int:
    return size * _repeats(layers, first, size)


def _repeats(layers: Sequence[LayerSpec], first: int, size: int) -> int:
    unit, count = layers[first : first + size], 1
    while layers[first + count * size :][:size] == unit:
        count += 1
    return count


def _groups(spec: ModelSpec, bounds: Sequence[int]) -> Iterator[LayerGroup]:
    """Yields the groups of layers, none of which crosses a bound."""
    for begin, end in pairwise(bounds):
        for first, unit, repeats in repeated_units(spec.layers[begin:end]):
            yield _group(spec, begin + first, unit, repeats)


def _group(spec: ModelSpec, first: int, unit: Sequence[LayerSpec], repeats: int) -> LayerGroup:
    return LayerGroup(first, repeats, tuple(tuple(_layer_parts(spec, layer)) for layer in unit))


def _layer_parts(spec: ModelSpec, layer: LayerSpec) -> Iterator[ModelPart]:
    modules = _by_module(layer.params())
    length = layer.seq_length or spec.config.seq_length
    share = length / spec.config.seq_length
    for branch in layer.branches:
        params = modules.pop(branch.name, {})
        flops = 6.0 * sum(param.num_active_elements for param in params.values() if param.is_gemm) * share
        flops += branch.mixing_flops(length, causal=True) / spec.config.seq_length
        norms = {name: p for name, p in modules.items() if name.startswith(branch.name)}
        for name in norms:
            del modules[name]
        counted = _count(params) + sum(map(_count, norms.values()))
        yield ModelPart(_branch_title(branch), counted, flops, _gemms(params), _norms_of(layer, branch))
    for name, params in modules.items():
        yield _module_part(name, params)


def _branch_title(branch: BranchSpec) -> str:
    if isinstance(branch, MoESpec):
        return "experts"
    return (branch.title or branch.name).replace("_", " ")


def _norms_of(layer: LayerSpec, branch: BranchSpec) -> str:
    after = "after the sum" if layer.norm_placement == "post" else "before"
    places = [after] * (branch.name in layer.input_norms) + ["on the output"] * (branch.name in layer.output_norms)
    return f"norm {' and '.join(places)}" if places else "no norm"


def _by_module(params: Mapping[str, ParamSpec]) -> dict[str, dict[str, ParamSpec]]:
    modules: dict[str, dict[str, ParamSpec]] = {}
    for name, param in params.items():
        module, _, rest = name.partition(".")
        modules.setdefault(module, {})[rest] = param
    return modules


def _module_part(name: str, params: Mapping[str, ParamSpec]) -> ModelPart:
    flops = 6.0 * sum(param.num_active_elements for param in params.values() if param.is_gemm)
    return ModelPart(name, _count(params), flops, _gemms(params))


def _gemms(params: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """Names the matrices; those of experts with their number."""
    matrices = []
    for name, param in params.items():
        if not param.is_gemm or len(param.shape) < 2:
            continue
        *stacked, rows, columns = param.shape
        many = "".join(f"{count} x " for count in stacked)
        matrices.append(f"{name.removesuffix('.weight').removesuffix('weight') or 'weight'} {many}{columns} -> {rows}")
    return tuple(matrices)


def _count(params: Mapping[str, ParamSpec]) -> int:
    return sum(param.num_elements for param in params.values())
