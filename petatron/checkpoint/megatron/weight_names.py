"""Canonical names of the weights of a Megatron model, whatever the file format, and the logical tensors fused in each.

Megatron has called the same weight by many names: by its layer on this pipeline rank or by its layer in the model, with a norm
as a module of its own or as a part of the linear that follows it, with one module per expert or one for all of them, and
all of it differently before Megatron-Core existed. Readers translate into these names first:

    decoder.layers.3.self_attention.linear_qkv.weight     layers counted over the whole model
    decoder.layers.3.input_layernorm.weight               norms are always modules of their own
    decoder.layers.3.mlp.experts.5.linear_fc1.weight      experts counted over the whole layer, [out, in]

Such a weight is unsharded, in the order of Megatron's distributed format: q, k and v
interleaved by key/value head, gate before up. What the kinds mean for layouts is in `weight_layouts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from petatron.models.model_spec import ModelSpec
from petatron.sharding.shard_spec import Shape

WeightLayout = Literal["whole", "column", "row", "qkv", "gated", "vocabulary"]
"""How a weight is sharded over tensor-parallel ranks, and what is fused in it."""


@dataclass(frozen=True, slots=True)
class MegatronWeight:
    """One weight of a Megatron model; `logical_names` are the logical tensors fused in it, `expert` which row of them it is.

    `shape` leaves out the padding of a vocabulary.
    """

    name: str
    layout: WeightLayout
    logical_names: tuple[str, ...]
    shape: Shape
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class _ModuleMapping:
    """Module names: `*` is a layer index, `#` an expert index."""

    megatron_module: str
    logical_modules: tuple[str, ...]
    layout: WeightLayout


_LAYER = "decoder.layers.*"
_MODULE_MAPPINGS = (
    _ModuleMapping("embedding.word_embeddings", ("embedding",), "vocabulary"),
    _ModuleMapping("embedding.position_embeddings", ("position",), "whole"),
    _ModuleMapping(f"{_LAYER}.input_layernorm", ("layers.*.attention_norm",), "whole"),
    _ModuleMapping(
        f"{_LAYER}.self_attention.linear_qkv",
        ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v"),
        "qkv",
    ),
    _ModuleMapping(f"{_LAYER}.self_attention.q_layernorm", ("layers.*.attention.q_norm",), "whole"),
    _ModuleMapping(f"{_LAYER}.self_attention.k_layernorm", ("layers.*.attention.k_norm",), "whole"),
    _ModuleMapping(f"{_LAYER}.self_attention.linear_proj", ("layers.*.attention.out",), "row"),
    _ModuleMapping(f"{_LAYER}.pre_mlp_layernorm", ("layers.*.mlp_norm",), "whole"),
    _ModuleMapping(f"{_LAYER}.mlp.linear_fc1", ("layers.*.mlp.gate", "layers.*.mlp.up"), "gated"),
    _ModuleMapping(f"{_LAYER}.mlp.linear_fc1", ("layers.*.mlp.up",), "column"),
    _ModuleMapping(f"{_LAYER}.mlp.linear_fc2", ("layers.*.mlp.down",), "row"),
    _ModuleMapping(f"{_LAYER}.mlp.router", ("layers.*.mlp.router",), "whole"),
    _ModuleMapping(f"{_LAYER}.mlp.fc1_latent_proj", ("layers.*.mlp.latent_down",), "whole"),
    _ModuleMapping(f"{_LAYER}.mlp.fc2_latent_proj", ("layers.*.mlp.latent_up",), "whole"),
    _ModuleMapping(
        f"{_LAYER}.mlp.experts.#.linear_fc1", ("layers.*.mlp.experts.gate", "layers.*.mlp.experts.up"), "gated"
    ),
    _ModuleMapping(f"{_LAYER}.mlp.experts.#.linear_fc1", ("layers.*.mlp.experts.up",), "column"),
    _ModuleMapping(f"{_LAYER}.mlp.experts.#.linear_fc2", ("layers.*.mlp.experts.down",), "row"),
    _ModuleMapping(
        f"{_LAYER}.mlp.shared_experts.linear_fc1", ("layers.*.mlp.shared.gate", "layers.*.mlp.shared.up"), "gated"
    ),
    _ModuleMapping(f"{_LAYER}.mlp.shared_experts.linear_fc1", ("layers.*.mlp.shared.up",), "column"),
    _ModuleMapping(f"{_LAYER}.mlp.shared_experts.linear_fc2", ("layers.*.mlp.shared.down",), "row"),
    _ModuleMapping(f"{_LAYER}.mlp.shared_experts.gate", ("layers.*.mlp.shared_gate",), "whole"),
    _ModuleMapping("decoder.final_layernorm", ("norm",), "whole"),
    _ModuleMapping("output_layer", ("head",), "vocabulary"),
)


def logical_shapes_with_router_bias(spec: ModelSpec) -> dict[str, Shape]:
    """Returns every logical tensor's shape, including the expert bias of routers, which is state and not a parameter."""
    shapes, moe = spec.logical_shapes(), spec.moe
    if moe is not None and moe.num_experts is not None and moe.moe_router_enable_expert_bias:
        shapes |= {f"layers.{layer}.mlp.router.expert_bias": (moe.num_experts,) for layer in spec.moe_layers}
    return shapes


def megatron_weights(spec: ModelSpec) -> tuple[MegatronWeight, ...]:
    """Returns every weight of the model, in layer order; together they are all its logical tensors, each once."""
    shapes = logical_shapes_with_router_bias(spec)
    found = [
        weight
        for row in _MODULE_MAPPINGS
        if "*" not in row.megatron_module
        for weight in _expand_mapping(row, 0, shapes)
    ]
    for layer in range(len(spec.layers)):
        found += [
            weight
            for row in _MODULE_MAPPINGS
            if "*" in row.megatron_module
            for weight in _expand_mapping(row, layer, shapes)
        ]
    left = shapes.keys() - {name for weight in found for name in weight.logical_names}
    assert not left, f"no row names {sorted(left)}"
    return tuple(found)


def _expand_mapping(mapping: _ModuleMapping, layer: int, shapes: Mapping[str, Shape]) -> Iterator[MegatronWeight]:
    modules = [module.replace("*", str(layer)) for module in mapping.logical_modules]
    # `up` alone is a plain MLP only if there is no gate.
    if len(modules) == 1 and modules[0].endswith(".up") and f"{modules[0][:-3]}.gate.weight" in shapes:
        return
    for leaf in ("weight", "bias", "expert_bias"):
        names = tuple(f"{module}.{leaf}" for module in modules)
        if not all(name in shapes for name in names):
            continue
        kind: WeightLayout = "whole" if mapping.layout == "row" and leaf == "bias" else mapping.layout
        name = f"{mapping.megatron_module.replace('*', str(layer))}.{leaf}"
        if "#" not in name:
            yield MegatronWeight(name, kind, names, _fused_shape([shapes[part] for part in names]))
            continue
        for expert in range(shapes[names[0]][0]):
            shape = _fused_shape([shapes[part][1:] for part in names])
            yield MegatronWeight(name.replace("#", str(expert)), kind, names, shape, expert)


def _fused_shape(shapes: list[Shape]) -> Shape:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


# Module names before Megatron-Core, after `language_model.` or without it.
_LEGACY_MODULES = {
    "input_layernorm": "input_layernorm",
    "input_norm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_LEGACY_LAYER = re.compile(r"(?:language_model\.)?(?:encoder|transformer)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_LEGACY_NON_LAYER = (
    (re.compile(r"language_model\.embedding\.(word|position)_embeddings\.weight"), r"embedding.\1_embeddings.weight"),
    (re.compile(r"language_model\.(?:encoder|transformer)\.final_(?:layer)?norm\."), "decoder.final_layernorm."),
    (re.compile(r"language_model\.output_layer\.weight"), "output_layer.weight"),
    (re.compile(r"word_embeddings_for_head\.weight"), "output_layer.weight"),
)
_TE_ALIASES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"mlp\.shared_experts\.gate_weight$"), "mlp.shared_experts.gate.weight"),
)
_NOT_WEIGHTS = re.compile(
    r"_extra_state|rotary_pos_emb\.inv_freq|\.local_tokens_per_expert$|\.global_tokens_per_expert$"
)


def is_weight(name: str) -> bool:
    """False for what Megatron stores among the weights although it can be recomputed: FP8 scales, tables, counters."""
    return _NOT_WEIGHTS.search(name) is None


def mcore_name(name: str) -> str:
    """Returns Megatron-Core's name, with norms as modules of their own.

    >>> mcore_name("language_model.encoder.layers.0.mlp.dense_4h_to_h.bias")
    'decoder.layers.0.mlp.linear_fc2.bias'
    >>> mcore_name("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight")
    'decoder.layers.0.input_layernorm.weight'
    """
    old = _LEGACY_LAYER.fullmatch(name)
    if old is not None and old[2] in _LEGACY_MODULES:
        return f"decoder.layers.{old[1]}.{_LEGACY_MODULES[old[2]]}.{old[3]}"
    for pattern, new in (*_LEGACY_NON_LAYER, *_TE_ALIASES):
        name = pattern.sub(new, name)
    return name


def transformer_engine_name(name: str, *, is_moe: bool) -> str:
    """Returns the name in Megatron's Transformer Engine implementation: norms are parts of the linear after them.

    In an MoE layer (`is_moe`) no linear follows the second norm, so it is a module of its own.
    """
    name = re.sub(r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1", name)
    if not is_moe:
        name = re.sub(r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1", name)
    return name.replace(".shared_experts.gate.weight", ".shared_experts.gate_weight")


def layer_index(name: str) -> int | None:
    """Returns the layer in a weight's name; None outside the layers.

    >>> layer_index("decoder.layers.12.input_layernorm.weight"), layer_index("output_layer.weight")
    (12, None)
    """
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    return None if match is None else int(match[1])


def with_layer(name: str, layer: int) -> str:
    """Returns the name of the same weight in another layer."""
    return re.sub(r"^decoder\.layers\.\d+\.", f"decoder.layers.{layer}.", name)
