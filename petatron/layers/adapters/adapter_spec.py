"""`AdapterSpec`: the adapters of one layer. It adds their parameters to the layer's, with shards derived from the weights'.

With r the rank, a weight [O, D] gets `lora_a` [r, D] and `lora_b` [O, r]. Of sections that are fused into one weight (q, k and v) each
has an A and a B of its own, which are fused in the same way: the logical tensors are `attention.q.lora_a`, `attention.q.lora_b`, and so on.

    weight                     A, the input side                     B, magnitudes, scales: the output side
    sharded along outputs      on every rank, gradients are summed   sharded along outputs, section by section
    sharded along inputs       sharded along inputs                  on every rank, gradients are summed
    on every rank              as the weight                         as the weight
    of experts [E, O, D]       [E, r, D]                             [E, O, r], both sharded over ep, and likewise over etp
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from petatron.layers.adapters.adapter import LORA_A, LORA_B, MAGNITUDE, SCALE, Adapter
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import ParamSpec
from petatron.sharding.initial_values import ONES, ZEROS, UniformValues
from petatron.sharding.shard_spec import Section, Shard, section_name

AdapterKind = Literal["lora", "rslora", "dora", "ia3"]


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear with an adapter: its name in the layer, and the sections of its weight that have one; none: the whole weight."""

    linear: str
    sections: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapters of a layer; `targets` are its linears that have one."""

    kind: AdapterKind
    rank: int
    alpha: float
    dropout: float
    targets: tuple[AdapterTarget, ...]

    @property
    def scale(self) -> float:
        """The factor s on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    def extend(self, params: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
        """Returns the parameters of a layer with those of its adapters, each after the others of its module."""
        targets, extended = {target.linear: target for target in self.targets}, dict[str, ParamSpec]()
        names = list(params)
        for name, following in zip(names, [*names[1:], ""]):
            extended[name] = params[name]
            module = name.rpartition(".")[0]
            if module in targets and following.rpartition(".")[0] != module:
                weight = params[f"{module}.weight"]
                extended |= {f"{module}.{leaf}": p for leaf, p in self.params_of(weight, targets[module]).items()}
        return extended

    def params_of(self, weight: ParamSpec, target: AdapterTarget) -> dict[str, ParamSpec]:
        """Returns the parameters beside a weight, by their names in its module."""
        return _Derivation(weight, target.sections, self.rank).params(self.kind)

    def saved_bytes(self, params: Mapping[str, ParamSpec], shape: ActivationShape) -> int:
        """Returns the bytes that the adapters beside some of a layer's parameters save of one micro-batch.

        Low-rank ones save what A gives; magnitudes and scales of outputs save these, scales of inputs nothing. Of experts each row is one
        of a token's choices, for an even load.
        """
        total = 0
        for target in self.targets:
            weight = params.get(f"{target.linear}.weight")
            if weight is None or (self.kind == "ia3" and scales_input(weight)):
                continue
            width = 0 if self.kind == "ia3" else self.rank * max(len(target.sections), 1)
            outputs = weight.shape[-2] // (shape.tp if weight.shard.tp == 0 else 1)
            if self.kind in ("dora", "ia3"):  # the outputs before they are scaled, and the factors
                width += outputs
                total += shape.activation_bytes(1, outputs)
            total += outputs * shape.compute_bytes if self.kind == "dora" else 0
            rows = shape.gathered_tokens
            if weight.shard.ep is not None:
                rows = int(shape.tokens * weight.active * weight.shape[0]) * shape.etp
            total += shape.activation_bytes(rows, width)
            if self.dropout and self.kind != "ia3":
                total += shape.activation_bytes(rows, weight.shape[-1] // (shape.tp if weight.shard.tp == 1 else 1))
        return total

    def install(self, layer: nn.Module, params: Mapping[str, ParamSpec]) -> None:
        """Adds the parameters and fills the slots of the layer's linears; `params` are those of the layer without adapters."""
        for target in self.targets:
            module: Any = layer.get_submodule(target.linear)
            weight = params[f"{target.linear}.weight"]
            adapter_params = self.params_of(weight, target)
            for name, param in adapter_params.items():
                setattr(module, name, nn.Parameter(torch.empty(param.shape)))
            module.adapter = Adapter(
                tuple(adapter_params),
                _section_indices(weight, target.sections),
                rank=self.rank,
                scale=self.scale,
                dropout=self.dropout,
                scales_input=self.kind == "ia3" and scales_input(weight),
            )


def scales_input(weight: ParamSpec) -> bool:
    """Whether IA3 scales the input of a weight's GEMM: where tensor parallelism shards it, which then shards the scale too."""
    return weight.shard.tp == len(weight.shape) - 1


def section_weight_names(linear: str, weight: ParamSpec, target: AdapterTarget) -> tuple[str, ...]:
    """Returns the logical tensors of a linear's weight that have an adapter, given the linear's name in the model."""
    name = f"{linear}.weight"
    if target.sections and weight.shard.ep is None:
        return tuple(section_name(name, section) for section in target.sections)
    return (name,)


def _section_indices(weight: ParamSpec, sections: Sequence[str]) -> tuple[int, ...] | None:
    if weight.shard.ep is not None:
        return None
    names = [section.name for section in weight.shard.sections]
    return tuple(names.index(name) for name in sections) if sections else (0,)


@dataclass(frozen=True, slots=True)
class _Derivation:
    """Derives the specs of an adapter's parameters from that of the weight."""

    weight: ParamSpec
    names: tuple[str, ...]
    rank: int

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections with an adapter, in the order of `names`."""
        by_name = {section.name: section for section in self.weight.shard.sections}
        return tuple(by_name[name] for name in self.names) or self.weight.shard.sections

    @property
    def num_outputs(self) -> int:
        return sum(section.rows for section in self.sections) if self.names else self.weight.shape[-2]

    def params(self, kind: AdapterKind) -> dict[str, ParamSpec]:
        vector = ParamSpec(shape=(self.num_outputs,), shard=self._output_shard, fresh_if_missing=True)
        if kind == "ia3" and scales_input(self.weight):
            shard = Shard(tp=0)
            return {SCALE: replace(vector, shape=self.weight.shape[-1:], shard=shard, init=ONES)}
        if kind == "ia3":
            return {SCALE: replace(vector, init=ONES)}
        low_rank = {LORA_A: self._a(), LORA_B: self._b()}
        return low_rank | ({MAGNITUDE: replace(vector, init=ONES)} if kind == "dora" else {})

    def _a(self) -> ParamSpec:
        """Initial values are uniform within 1 / sqrt(inputs), which PEFT draws as Kaiming's for a leaky slope of sqrt(5)."""
        *experts, _, inputs = self.weight.shape
        bound = 1.0 / math.sqrt(inputs)
        rows = self.rank * max(len(self.names), 1)
        return self._matrix((*experts, rows, inputs), self._input_shard, UniformValues(-bound, bound))

    def _b(self) -> ParamSpec:
        experts = self.weight.shape[:-2]
        return self._matrix((*experts, self.num_outputs, self.rank), self._output_shard, ZEROS)

    def _matrix(self, shape: tuple[int, ...], shard: Shard, init: Any) -> ParamSpec:
        return ParamSpec(
            shape=shape,
            shard=shard,
            init=init,
            role="hidden_matrix",
            weight_decay=True,
            is_gemm=True,
            active=self.weight.active,
            fresh_if_missing=True,
        )

    @property
    def _input_shard(self) -> Shard:
        weight = self.weight.shard
        if weight.ep is not None:
            return Shard(ep=0, tp=2 if weight.tp == 2 else None)
        if weight.tp == 1:
            return Shard(tp=1)
        sections = tuple(Section(name, self.rank, 1) for name in self.names)
        return Shard(partial_grad="always" if weight.tp == 0 else weight.partial_grad, sections=sections)

    @property
    def _output_shard(self) -> Shard:
        weight = self.weight.shard
        if weight.ep is not None:
            return Shard(ep=0, tp=1 if weight.tp == 1 else None, sections=self.sections if weight.tp == 1 else ())
        if weight.tp == 0:
            return Shard(tp=0, sections=self.sections)
        return Shard(partial_grad="always" if weight.tp == 1 else weight.partial_grad)
