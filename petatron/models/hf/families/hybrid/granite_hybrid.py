"""Granite 4: Granite's factors, layers of Mamba-2 or attention, and in each of them an MLP, with experts beside it or alone.

The MLP of every layer (`shared_mlp`) is an MLP of ours, or with experts the shared one. Positions are rotary or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.hybrid_pattern import ATTENTION, EXPERTS, MAMBA, MLP
from petatron.models.hf.families.granite import GRANITE, GRANITE_MOE
from petatron.models.hf.families.hybrid.mamba_tables import (
    BAMBA_DEFAULTS,
    BAMBA_KEYS,
    BAMBA_SINGLE_VALUES,
    HYBRID_FIXED,
    LAYER_KEYS,
    LAYER_TYPES,
    attention_mappings,
    bamba_expansion,
    mixer_mappings,
    mixer_problems,
    read_layer_count,
    read_layer_kinds,
    time_step_problems,
)
from petatron.models.hf.family import Family, HybridLayers, ModuleMapping
from petatron.models.hf.shared_tables import SILU_ALONE
from petatron.models.model_spec import ModelSpec

_LAYER = "model.layers.*"
_MAPPINGS = (
    ModuleMapping(("embedding",), "model.embed_tokens"),
    ModuleMapping(("layers.*.mamba_norm",), f"{_LAYER}.input_layernorm"),
    ModuleMapping(("layers.*.attention_norm",), f"{_LAYER}.input_layernorm"),
    *mixer_mappings(f"{_LAYER}.mamba"),
    *attention_mappings(f"{_LAYER}.self_attn"),
    ModuleMapping(("layers.*.mlp_norm",), f"{_LAYER}.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp.gate", "layers.*.mlp.up"), f"{_LAYER}.shared_mlp.input_linear"),
    ModuleMapping(("layers.*.mlp.down",), f"{_LAYER}.shared_mlp.output_linear"),
    ModuleMapping(("layers.*.mlp.shared.gate", "layers.*.mlp.shared.up"), f"{_LAYER}.shared_mlp.input_linear"),
    ModuleMapping(("layers.*.mlp.shared.down",), f"{_LAYER}.shared_mlp.output_linear"),
    ModuleMapping(("norm",), "model.norm"),
    ModuleMapping(("head",), "lm_head"),
)
_NO_SCALING: Mapping[str, Any] = {
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "longrope_short_factor": None,
    "longrope_long_factor": None,
    "longrope_attention_factor": None,
}
_EXPERT_PARTS = ("layers.*.mlp.router", "layers.*.mlp.experts")


def _expert_mappings(mappings: tuple[ModuleMapping, ...]) -> tuple[ModuleMapping, ...]:
    return tuple(row for row in mappings if row.logical_modules[0].startswith(_EXPERT_PARTS))


def _read_layers(hf_config: Mapping[str, Any]) -> str | Problem:
    count = hf_config.get("num_hidden_layers")
    if not any(hf_config.get(key) for key in LAYER_KEYS):
        layers = read_layer_count(hf_config)
        return layers if isinstance(layers, Problem) else (MAMBA + _channel_mixer(hf_config)) * layers
    mixers = read_layer_kinds(hf_config, "layer_types", MAMBA + ATTENTION)
    if isinstance(mixers, Problem):
        return mixers
    if is_count(count) and len(mixers) != count:
        return Problem(
            "layer_types", f"{len(mixers)} kinds", f"are not those of {count!r:.20} layers", "Correct config.json."
        )
    return "".join(mixer + _channel_mixer(hf_config) for mixer in mixers)


def _channel_mixer(hf_config: Mapping[str, Any]) -> str:
    return EXPERTS if hf_config.get("num_local_experts", 8) else MLP


def _write_layers(pattern: str) -> Mapping[str, Any]:
    kinds = [LAYER_TYPES[letter] for letter in pattern[::2]]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _read_more(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    rotary = hf_config.get("position_embedding_type") == "rope"
    positions = {} if rotary else {"position_embedding_type": "none", **_NO_SCALING}
    return {"mamba_norm_groups": 1, **positions}, time_step_problems(hf_config)


def _write_more(spec: ModelSpec) -> Mapping[str, Any]:
    """Returns the keys that are not those of experts, which are written after them."""
    model = spec.config
    return {
        **bamba_expansion(spec),
        "position_embedding_type": None if model.position_embedding_type == "none" else "rope",
        "intermediate_size": model.ffn_hidden_size,
        "num_local_experts": 0,
    }


def _unsupported(spec: ModelSpec) -> list[Problem]:
    return mixer_problems(spec, GRANITE_HYBRID)


GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4",
    what_differs="a [hybrid](mamba.md) with Granite's factors; positions or none, an MLP or experts and one shared in every layer",
    prefix="model.",
    mappings=(*_MAPPINGS, *_expert_mappings(GRANITE_MOE.mappings)),
    in_memory_mappings=(*_MAPPINGS, *_expert_mappings(GRANITE_MOE.in_memory_mappings)),
    ignored_tensors=GRANITE.ignored_tensors,
    keys={
        **{ours: key for ours, key in GRANITE.keys.items() if ours != "num_layers"},
        **BAMBA_KEYS,
        "ffn_hidden_size": "shared_intermediate_size",
    },
    activation_key="hidden_act",
    activations=SILU_ALONE,  # of the convolution too
    defaults={
        **{key: value for key, value in GRANITE.defaults.items() if key != "mlp_bias"},
        **BAMBA_DEFAULTS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    fixed=HYBRID_FIXED,
    single_values={**BAMBA_SINGLE_VALUES, "attention_bias": False},
    required=GRANITE.required,
    moe_keys={**GRANITE_MOE.moe_keys, "moe_shared_expert_intermediate_size": "shared_intermediate_size"},
    moe_fixed={
        **{
            name: value
            for name, value in GRANITE_MOE.moe_fixed.items()
            if name != "moe_shared_expert_intermediate_size"
        },
        "moe_shared_expert_gate": False,
    },
    read_more=_read_more,
    write_more=_write_more,
    more_settings=("position_embedding_type",),
    unsupported=_unsupported,
    hybrid=HybridLayers(2, r"([M*]-)+|([M*]E)+", _read_layers, _write_layers, {"layer_types": None}),
)
