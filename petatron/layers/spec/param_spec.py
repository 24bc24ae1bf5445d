"""`ParamSpec`: shape, shard, initial values and weight decay of one parameter, which estimates, checkpoints and parallelism read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from petatron.sharding.initial_values import ZEROS, InitialValues, NormalValues
from petatron.sharding.shard_spec import Section, Shape, Shard

REPLICATED = Shard(partial_grad="sequence")
"""Every tensor-parallel rank has the whole parameter and applies it to its own tokens of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter, whole, as a single device would have it.

    shard: how it is sharded over the tensor- and expert-parallel ranks.
    init: its initial values.
    role: what update rules distinguish: a matrix from hidden activations to hidden activations, a table of the vocabulary, others.
    weight_decay: whether weight decay applies to it.
    is_gemm: whether it is the weight of a GEMM over tokens, so that it costs FLOPs and may run in FP8.
    active: the share of it that one token uses: less than 1 for experts.
    fresh_if_missing: whether a run that starts from a model without it draws its initial values: the head of a new task.
    former_name: the parameter of such a model that has the same values, if it has one: BERT's pooler reads for another head.
    trainable: whether training changes it; a frozen one has no gradient and no optimizer state (`models/frozen_params.py`).
    fan_in_ratio, fan_out_ratio: by how much more inputs an output sums up, and by how much more outputs an input reaches, than in muP's
    base model; 1 without muP. Initial values have the first in them already; learning rates depend on both (`optimizer_groups.py`).
    """

    shape: Shape
    shard: Shard = REPLICATED
    init: InitialValues = ZEROS
    role: Literal["hidden_matrix", "vocabulary", "other"] = "other"
    weight_decay: bool = False
    is_gemm: bool = False
    active: Fraction = Fraction(1)
    trainable: bool = True
    fresh_if_missing: bool = False
    former_name: str | None = None
    fan_in_ratio: float = 1.0
    fan_out_ratio: float = 1.0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_active_elements(self) -> int:
        return int(self.num_elements * self.active)


def linear_params(
    in_features: int, sections: Mapping[str, int] | int, shard: Shard, *, bias: bool, std: float
) -> dict[str, ParamSpec]:
    """Returns weight and bias of a `Linear`; with several sections they are fused, and sharded one by one.

    >>> params = linear_params(8, {"gate": 16, "up": 16}, Shard(tp=0), bias=False, std=0.02)
    >>> params["weight"].shape, [section.name for section in params["weight"].shard.sections]
    ((32, 8), ['gate', 'up'])
    """
    if isinstance(sections, int):
        rows = sections
    else:
        rows = sum(sections.values())
        if not shard.sections:
            fused = tuple(Section(name, size, size) for name, size in sections.items())
            shard = Shard(tp=shard.tp, ep=shard.ep, sections=fused)
    init = NormalValues(std)
    weight = ParamSpec(
        shape=(rows, in_features), shard=shard, init=init, role="hidden_matrix", weight_decay=True, is_gemm=True
    )
    return {"weight": weight} | ({"bias": ParamSpec(shape=(rows,), shard=shard)} if bias else {})


def widen_layer(params: Mapping[str, ParamSpec], ratio: float) -> dict[str, ParamSpec]:
    """Returns the parameters of a layer that is `ratio` times as wide as muP's base model.

    What has weight decay has more than one dimension, and is a matrix from hidden to hidden activations to muP, as in Megatron-LM, which
    counts a convolution's weight as one too. The weights of GEMMs start smaller, such that their outputs start as large as in the base.

    >>> wide = widen_layer(linear_params(8, 16, Shard(tp=0), bias=True, std=0.02), 4.0)
    >>> wide["weight"].init, wide["weight"].fan_in_ratio, wide["bias"].fan_in_ratio
    (NormalValues(std=0.01), 4.0, 1.0)
    """
    return {name: _widen(param, ratio) for name, param in params.items()} if ratio != 1.0 else dict(params)


def _widen(param: ParamSpec, ratio: float) -> ParamSpec:
    if not param.weight_decay:
        return replace(param, fan_out_ratio=ratio)
    init = param.init
    if param.is_gemm and isinstance(init, NormalValues):
        init = NormalValues(init.std / math.sqrt(ratio))
    return replace(param, init=init, fan_in_ratio=ratio, fan_out_ratio=ratio)


def widen_outer(params: Mapping[str, ParamSpec], ratio: float) -> dict[str, ParamSpec]:
    """Returns the parameters outside of layers: embeddings, norms and heads, which are vectors to muP, as one of their sizes is fixed."""
    return (
        {name: replace(param, fan_out_ratio=ratio) for name, param in params.items()} if ratio != 1.0 else dict(params)
    )


def with_prefix(prefix: str, params: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Returns the parameters of a submodule under their names in the module.

    >>> list(with_prefix("up", {"weight": ParamSpec(shape=(1,))}))
    ['up.weight']
    """
    return {f"{prefix}.{name}": param for name, param in params.items()}
