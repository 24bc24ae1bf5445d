"""Bamba: layers of Mamba-2 and some of attention, each with a gated MLP; half of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.hybrid_pattern import ATTENTION, MAMBA, MLP
from petatron.models.hf.families.hybrid.mamba_tables import (
    BAMBA_DEFAULTS,
    BAMBA_KEYS,
    BAMBA_MAPPINGS,
    BAMBA_SINGLE_VALUES,
    HYBRID_FIXED,
    bamba_expansion,
    mixer_problems,
    read_layer_count,
    time_step_problems,
)
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, HybridLayers, ModuleMapping
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_KEYS, SILU_ALONE
from petatron.models.model_spec import ModelSpec

_LAYER = "model.layers.*"


def _read_layers(hf_config: Mapping[str, Any]) -> str | Problem:
    count, chosen = read_layer_count(hf_config), hf_config.get("attn_layer_indices") or []
    if isinstance(count, Problem):
        return count
    if not isinstance(chosen, list) or not all(is_count(index) and index < count for index in chosen):
        return Problem("attn_layer_indices", f"{chosen!r:.40}", f"are not some of the {count} layers", OWN_FOLDER_FIX)
    attention = set(chosen)
    return "".join((ATTENTION if index in attention else MAMBA) + MLP for index in range(count))


def _write_layers(pattern: str) -> Mapping[str, Any]:
    mixers = pattern[::2]
    chosen = [index for index, letter in enumerate(mixers) if letter == ATTENTION]
    return {"num_hidden_layers": len(mixers), "attn_layer_indices": chosen}


def _unsupported(spec: ModelSpec) -> list[Problem]:
    return mixer_problems(spec, BAMBA)


BAMBA = Family(
    name="bamba",
    architecture="BambaForCausalLM",
    models="Bamba",
    what_differs="a [hybrid](mamba.md): Mamba-2 in most layers, half of each attention head rotated",
    prefix="model.",
    mappings=(
        ModuleMapping(("layers.*.mamba_norm",), f"{_LAYER}.input_layernorm"),
        ModuleMapping(("layers.*.attention_norm",), f"{_LAYER}.input_layernorm"),
        *BAMBA_MAPPINGS,
    ),
    ignored_tensors=("*rotary_emb.inv_freq",),
    keys={
        **{ours: key for ours, key in LLAMA_KEYS.items() if ours not in ("num_layers", "kv_channels")},
        **BAMBA_KEYS,
    },
    activation_key="hidden_act",
    activations=SILU_ALONE,  # of the convolution too
    defaults={
        **{key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"},
        **BAMBA_DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    fixed={**HYBRID_FIXED, "rotary_percent": 0.5},
    single_values={**BAMBA_SINGLE_VALUES, "attention_bias": False, "mlp_bias": False},
    read_more=lambda hf_config: ({"mamba_norm_groups": 1}, time_step_problems(hf_config)),
    write_more=bamba_expansion,
    unsupported=_unsupported,
    hybrid=HybridLayers(2, r"([M*]-)+", _read_layers, _write_layers, {"attn_layer_indices": None}),
)
