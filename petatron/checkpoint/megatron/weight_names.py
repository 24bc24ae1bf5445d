"""Canonical names of the weights of a Megatron model, whatever the file format, and the logical tensors fused in each.

Megatron has called the same weight by many names: by its layer on this pipeline rank or by its layer in the model, with a norm
as a module of its own or as a part of the linear that follows it, with one module per expert or one for all of them, and
all of it differently before Megatron-Core existed. Readers translate into these names first:

    decoder.layers.3.self_attention.linear_qkv.weight     layers counted over the whole model
    decoder.layers.3.input_layernorm.weight               norms are always modules of their own; BERT's encoder is called so too
    decoder.layers.3.mlp.experts.5.linear_fc1.weight      experts counted over the whole layer, [out, in]
    mtp.layers.0.transformer_layer.mlp.linear_fc2.weight  depths of multi-token prediction, which are layers after the last in ours
    mtp.layers.0.mtp_model_layer.layers.1.mixer.D         those of a hybrid have several layers each

Such a weight is unsharded, in the order of Megatron's distributed format: q, k and v
interleaved by key/value head, gate before up, z before x, B, C and dt. What the kinds mean for layouts is in `weight_layouts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.multi_token_prediction import layers_per_depth
from petatron.models.model_spec import ModelSpec
from petatron.sharding.shard_spec import Shape

WeightLayout = Literal["whole", "column", "whole_or_column", "row", "qkv", "sections", "vocabulary"]
"""How a weight is sharded over tensor-parallel ranks, and what is fused in it."""
LayerSpec = Literal["te", "local"]
"""Megatron's implementation of layers: by Transformer Engine, or its own."""
_LINEAR = r"\.(?:linear_\w+|fc[12]_latent_proj|eh_proj|in_proj|out_proj)"
_NORM = r"\.(?:\w+_layernorm|final_norm|enorm|hnorm|k_norm)"


@dataclass(frozen=True, slots=True)
class MegatronWeight:
    """One weight of a Megatron model; `logical_names` are the logical tensors fused in it, `expert` which row of them it is.

    `shape` leaves out the padding of a vocabulary. rows: those of each logical tensor. layer: its index among ours, in which depths of
    multi-token prediction follow the last layer; None outside of layers.
    """

    name: str
    layout: WeightLayout
    logical_names: tuple[str, ...]
    shape: Shape
    expert: int | None = None
    rows: tuple[int, ...] = ()
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class _ModuleMapping:
    """Module names: `*` is a layer index, `#` an expert index.

    unless: a logical module without which this row is meant: the same tensor is fused with that one elsewhere.
    """

    megatron_module: str
    logical_modules: tuple[str, ...]
    layout: WeightLayout
    unless: str | None = None
    leaves: tuple[str, ...] = ("weight", "bias", "expert_bias")


_LAYER = "decoder.layers.*"
_DEPTH = "mtp.layers.*"
_MIXER = f"{_LAYER}.mixer"
_HYBRID_DEPTH = "mtp_model_layer.layers."
_INDEXER = f"{_LAYER}.self_attention.core_attention.indexer"
_MODULE_MAPPINGS = (
    _ModuleMapping("embedding.word_embeddings", ("embedding",), "vocabulary"),
    _ModuleMapping("embedding.position_embeddings", ("position",), "whole"),
    _ModuleMapping("embedding.tokentype_embeddings", ("token_type",), "whole"),
    _ModuleMapping(f"{_LAYER}.input_layernorm", ("layers.*.attention_norm",), "whole"),
    _ModuleMapping(
        f"{_LAYER}.self_attention.linear_qkv",
        ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v"),
        "qkv",
    ),
    _ModuleMapping(f"{_LAYER}.self_attention.q_layernorm", ("layers.*.attention.q_norm",), "whole"),
    _ModuleMapping(f"{_LAYER}.self_attention.k_layernorm", ("layers.*.attention.k_norm",), "whole"),
    _ModuleMapping(
        f"{_LAYER}.self_attention.linear_q_proj",
        ("layers.*.attention.q",),
        "column",
        unless="layers.*.attention.k",
    ),
    _ModuleMapping(f"{_LAYER}.self_attention.linear_q_down_proj", ("layers.*.attention.q_down",), "whole_or_column"),
    _ModuleMapping(f"{_LAYER}.self_attention.linear_q_up_proj", ("layers.*.attention.q_up",), "column"),
    _ModuleMapping(f"{_LAYER}.self_attention.linear_kv_down_proj", ("layers.*.attention.kv_down",), "whole_or_column"),
    _ModuleMapping(f"{_LAYER}.self_attention.kv_layernorm", ("layers.*.attention.kv_norm",), "whole"),
    _ModuleMapping(f"{_LAYER}.self_attention.linear_kv_up_proj", ("layers.*.attention.kv_up",), "column"),
    _ModuleMapping(f"{_INDEXER}.linear_wq_b", ("layers.*.attention.indexer.q_up",), "whole"),
    _ModuleMapping(f"{_INDEXER}.linear_wk", ("layers.*.attention.indexer.k",), "whole"),
    _ModuleMapping(f"{_INDEXER}.k_norm", ("layers.*.attention.indexer.k_norm",), "whole"),
    _ModuleMapping(f"{_INDEXER}.linear_weights_proj", ("layers.*.attention.indexer.head_weights",), "whole"),
    _ModuleMapping(f"{_LAYER}.self_attention.linear_proj", ("layers.*.attention.out",), "row"),
    _ModuleMapping(f"{_LAYER}.pre_mlp_layernorm", ("layers.*.mlp_norm",), "whole"),
    _ModuleMapping(f"{_LAYER}.mlp.linear_fc1", ("layers.*.mlp.gate", "layers.*.mlp.up"), "sections"),
    _ModuleMapping(f"{_LAYER}.mlp.linear_fc1", ("layers.*.mlp.up",), "column", unless="layers.*.mlp.gate"),
    _ModuleMapping(f"{_LAYER}.mlp.linear_fc2", ("layers.*.mlp.down",), "row"),
    _ModuleMapping(f"{_LAYER}.mlp.router", ("layers.*.mlp.router",), "whole"),
    _ModuleMapping(f"{_LAYER}.mlp.fc1_latent_proj", ("layers.*.mlp.latent_down",), "whole"),
    _ModuleMapping(f"{_LAYER}.mlp.fc2_latent_proj", ("layers.*.mlp.latent_up",), "whole"),
    _ModuleMapping(
        f"{_LAYER}.mlp.experts.#.linear_fc1", ("layers.*.mlp.experts.gate", "layers.*.mlp.experts.up"), "sections"
    ),
    _ModuleMapping(
        f"{_LAYER}.mlp.experts.#.linear_fc1",
        ("layers.*.mlp.experts.up",),
        "column",
        unless="layers.*.mlp.experts.gate",
    ),
    _ModuleMapping(f"{_LAYER}.mlp.experts.#.linear_fc2", ("layers.*.mlp.experts.down",), "row"),
    _ModuleMapping(
        f"{_LAYER}.mlp.shared_experts.linear_fc1", ("layers.*.mlp.shared.gate", "layers.*.mlp.shared.up"), "sections"
    ),
    _ModuleMapping(
        f"{_LAYER}.mlp.shared_experts.linear_fc1",
        ("layers.*.mlp.shared.up",),
        "column",
        unless="layers.*.mlp.shared.gate",
    ),
    _ModuleMapping(f"{_LAYER}.mlp.shared_experts.linear_fc2", ("layers.*.mlp.shared.down",), "row"),
    _ModuleMapping(f"{_LAYER}.mlp.shared_experts.gate", ("layers.*.mlp.shared_gate",), "whole"),
    _ModuleMapping(f"{_LAYER}.norm", ("layers.*.mamba_norm",), "whole"),
    _ModuleMapping(_MIXER, ("layers.*.mamba",), "column", leaves=("A_log", "dt_bias", "D")),
    _ModuleMapping(
        f"{_MIXER}.in_proj", tuple(f"layers.*.mamba.in_{part}" for part in ("z", "x", "B", "C", "dt")), "sections"
    ),
    _ModuleMapping(f"{_MIXER}.conv1d", tuple(f"layers.*.mamba.conv_{part}" for part in ("x", "B", "C")), "sections"),
    _ModuleMapping(f"{_MIXER}.norm", ("layers.*.mamba.norm",), "column"),
    _ModuleMapping(f"{_MIXER}.out_proj", ("layers.*.mamba.out_proj",), "row"),
    _ModuleMapping(f"{_DEPTH}.enorm", ("layers.*.embedding_norm",), "whole"),
    _ModuleMapping(f"{_DEPTH}.hnorm", ("layers.*.hidden_norm",), "whole"),
    _ModuleMapping(f"{_DEPTH}.eh_proj", ("layers.*.projection",), "column"),
    _ModuleMapping(f"{_DEPTH}.final_layernorm", ("layers.*.norm",), "whole"),
    _ModuleMapping("decoder.final_layernorm", ("norm",), "whole"),
    _ModuleMapping("lm_head.dense", ("transform.dense",), "whole"),
    _ModuleMapping("lm_head.layer_norm", ("transform.norm",), "whole"),
    _ModuleMapping("output_layer", ("head",), "vocabulary"),
    _ModuleMapping("pooler.dense", ("order_head.pooler",), "whole"),
    _ModuleMapping("binary_head", ("order_head.out",), "whole"),
)
MASKED_HEAD_WEIGHT, ORDER_HEAD_WEIGHT = "lm_head.dense.weight", "binary_head.weight"
"""What tells an encoder of masked tokens, and one that is trained on the order of segments."""
SEGMENTS_WEIGHT, OUTPUT_BIAS = "embedding.tokentype_embeddings.weight", "output_layer.bias"


def logical_shapes_with_router_bias(spec: ModelSpec) -> dict[str, Shape]:
    """Returns every logical tensor's shape, including the expert bias of routers, which is state and not a parameter."""
    shapes, moe = spec.logical_shapes(), spec.moe
    if moe is not None and moe.num_experts is not None and moe.moe_router_enable_expert_bias:
        shapes |= {f"layers.{layer}.mlp.router.expert_bias": (moe.num_experts,) for layer in spec.moe_layers}
    return shapes


def megatron_weights(spec: ModelSpec) -> tuple[MegatronWeight, ...]:
    """Returns every weight of the model, in layer order; together they are all its logical tensors, each once."""
    shapes = logical_shapes_with_router_bias(spec)
    weights = [
        weight
        for row in _MODULE_MAPPINGS
        if "*" not in row.megatron_module
        for weight in _expand_mapping(row, None, row.megatron_module, shapes)
    ]
    for layer in range(len(spec.layers)):
        weights += [
            weight
            for row in _MODULE_MAPPINGS
            if "*" in row.megatron_module
            for weight in _expand_mapping(row, layer, _module_in_layer(row.megatron_module, layer, spec.config), shapes)
        ]
    left = shapes.keys() - {name for weight in weights for name in weight.logical_names}
    assert not left, f"no row names {sorted(left)}"
    return tuple(weights)


def _module_in_layer(module: str, layer: int, config: ModelConfig) -> str:
    """Returns the module of one of our layers; those after the last are depths of multi-token prediction."""
    num_layers = config.num_layers
    if layer < num_layers:
        return module.replace("*", str(layer))
    number, place = divmod(layer - num_layers, layers_per_depth(config))
    depth = f"mtp.layers.{number}"
    inner = "transformer_layer" if config.hybrid_layer_pattern is None else f"{_HYBRID_DEPTH}{place}"
    return module.replace(_LAYER, f"{depth}.{inner}").replace(_DEPTH, depth)


def _expand_mapping(
    mapping: _ModuleMapping, layer: int | None, megatron_module: str, shapes: Mapping[str, Shape]
) -> Iterator[MegatronWeight]:
    modules = [module.replace("*", str(layer)) for module in mapping.logical_modules]
    if mapping.unless is not None and f"{mapping.unless.replace('*', str(layer))}.weight" in shapes:
        return
    for leaf in mapping.leaves:
        names = tuple(f"{module}.{leaf}" for module in modules)
        if not all(name in shapes for name in names):
            continue
        kind: WeightLayout = "whole" if mapping.layout == "row" and leaf == "bias" else mapping.layout
        name = f"{megatron_module}.{leaf}"
        if "#" not in name:
            parts = [shapes[part] for part in names]
            yield MegatronWeight(name, kind, names, _fused_shape(parts), None, _rows(parts), layer)
            continue
        parts = [shapes[part][1:] for part in names]
        for expert in range(shapes[names[0]][0]):
            weight = name.replace("#", str(expert))
            yield MegatronWeight(weight, kind, names, _fused_shape(parts), expert, _rows(parts), layer)


def _rows(shapes: list[Shape]) -> tuple[int, ...]:
    return tuple(shape[0] for shape in shapes)


def _fused_shape(shapes: list[Shape]) -> Shape:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


# Module names before Megatron-Core, after `language_model.` or without it.
_LEGACY_MODULES = {
    "input_layernorm": "input_layernorm",
    "input_norm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense_attention": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_LEGACY_LAYER = re.compile(r"(?:language_model\.)?(?:encoder|transformer)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_LEGACY_NON_LAYER = (
    (
        re.compile(r"language_model\.embedding\.(word|position|tokentype)_embeddings\.weight"),
        r"embedding.\1_embeddings.weight",
    ),
    (re.compile(r"language_model\.pooler\."), "pooler."),
    (re.compile(r"^lm_head\.(?:layernorm|norm)\."), "lm_head.layer_norm."),
    (re.compile(r"^lm_head\.bias$"), "output_layer.bias"),
    (re.compile(r"language_model\.(?:encoder|transformer)\.final_(?:layer)?norm\."), "decoder.final_layernorm."),
    (re.compile(r"language_model\.output_layer\.weight"), "output_layer.weight"),
    (re.compile(r"word_embeddings_for_head\.weight"), "output_layer.weight"),
)
_TE_ALIASES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"mlp\.shared_experts\.gate_weight$"), "mlp.shared_experts.gate.weight"),
    (
        re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"),
        r"self_attention.\1_layernorm.\2",
    ),
    (re.compile(r"mixer\.in_proj\.layer_norm_(weight|bias)$"), r"norm.\1"),
)
# What some versions call otherwise.
_OTHER_NAMES = (
    (re.compile(r"mixer\.conv1d_(weight|bias)$"), r"mixer.conv1d.\1"),
    (re.compile(r"^encoder\."), "decoder."),  # of BERT; an encoder-decoder is none of the models here
    (re.compile(r"^decoder\.final_norm\."), "decoder.final_layernorm."),
    (re.compile(r"^(mtp\.layers\.\d+)\.mtp_model_layer\.(?!layers\.\d)"), r"\1.transformer_layer."),
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
    for pattern, new in (*_LEGACY_NON_LAYER, *_TE_ALIASES, *_OTHER_NAMES):
        name = pattern.sub(new, name)
    return name


def local_name(weight: MegatronWeight, spec: ModelSpec, *, stacked: bool) -> str:
    """Returns the name in Megatron's local implementation, whose norms are modules of their own.

    stacked: the name in the distributed format, where this implementation borrows names of the other: except in latent attention, norms
    are parts of the linear after them, also in MoE layers, in which no linear follows the second.
    """
    name = weight.name.replace(".shared_experts.gate.weight", ".shared_experts.gate_weight")
    if not stacked or spec.config.multi_latent_attention:
        return name
    name = re.sub(r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1", name)
    return re.sub(r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1", name)


def extra_state_modules(name: str, layer_spec: LayerSpec) -> tuple[str, ...]:
    """Returns the modules beside a stored weight that have an `_extra_state`, which Megatron's loader asks for with and without FP8.

    >>> extra_state_modules("decoder.layers.self_attention.linear_proj.weight", "te")
    ('decoder.layers.self_attention.linear_proj', 'decoder.layers.self_attention.core_attention')
    """
    module = re.sub(r"\.(weight|bias)(\.\w+)?$", "", name)
    kinds = f"{_LINEAR}|{_NORM}" if layer_spec == "te" else _LINEAR
    if re.fullmatch(rf"(?:mtp|decoder)\b.*(?:{kinds})", module) is None:
        return ()
    attention = module.removesuffix(".linear_proj")
    return (module, f"{attention}.core_attention") if layer_spec == "te" and attention != module else (module,)


def transformer_engine_name(weight: MegatronWeight, spec: ModelSpec) -> str:
    """Returns the name in Megatron's Transformer Engine implementation: norms are parts of the linear after them.

    In an MoE layer no linear follows the second norm, and in latent attention none the first, so these are modules of their own. The
    last norm of a hybrid is called otherwise.
    """
    name = weight.name
    if spec.config.multi_latent_attention:
        name = re.sub(
            r"\.self_attention\.(q|kv)_layernorm\.(weight|bias)$",
            r".self_attention.linear_\1_up_proj.layer_norm_\2",
            name,
        )
    else:
        name = re.sub(r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1", name)
    if weight.layer not in spec.moe_layers:
        name = re.sub(r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1", name)
    if spec.config.hybrid_layer_pattern is not None:
        name = re.sub(r"(\.layers\.\d+)\.norm\.(weight|bias)$", r"\1.mixer.in_proj.layer_norm_\2", name)
        name = name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    return name.replace(".shared_experts.gate.weight", ".shared_experts.gate_weight")


def separate_parts(weight: MegatronWeight) -> tuple[str, ...]:
    """Returns what the distributed format appends to the name of a weight that it stores in parts, one for each logical tensor.

    Those of a Mamba-2 mixer are: `in_proj.weight.z`. Empty: the weight is one tensor.
    """
    if ".mixer." not in weight.name or weight.layout != "sections":
        return ()
    return tuple(name.split(".")[-2].rpartition("_")[2] for name in weight.logical_names)


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
