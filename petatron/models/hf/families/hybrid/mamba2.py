"""Mamba-2 alone: no attention, no MLP, no positions, so no longest sequence either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.hybrid_pattern import MAMBA
from petatron.models.hf.families.hybrid.mamba_tables import (
    HYBRID_FIXED,
    expansion,
    mixer_mappings,
    mixer_problems,
    read_layer_count,
    time_step_problems,
)
from petatron.models.hf.family import Family, HybridLayers, ModuleMapping, unsupported_setting
from petatron.models.model_spec import ModelSpec

_MAX_POSITIONS = 1 << 20
"""Not in config.json, since the state has the same size after any number of tokens; a run has some number."""


def _read_layers(hf_config: Mapping[str, Any]) -> str | Problem:
    count = read_layer_count(hf_config)
    return count if isinstance(count, Problem) else MAMBA * count


def _read_more(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    values = {"max_position_embeddings": _MAX_POSITIONS, "mamba_norm_groups": 1, "position_embedding_type": "none"}
    return values, time_step_problems(hf_config)


def _unsupported(spec: ModelSpec) -> list[Problem]:
    """Rotary positions would be those of attention, which there is none of."""
    positions = spec.config.position_embedding_type
    learned = [unsupported_setting("position_embedding_type", positions, MAMBA2, "none")]
    return mixer_problems(spec, MAMBA2) + (learned if positions == "learned_absolute" else [])


def _write_more(spec: ModelSpec) -> Mapping[str, Any]:
    return {"expand": expansion(spec)}


MAMBA2 = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    models="Mamba-2, Codestral Mamba",
    what_differs="[Mamba-2](mamba.md) in every layer, no attention",
    prefix="backbone.",
    mappings=(
        ModuleMapping(("embedding",), "backbone.embeddings"),
        ModuleMapping(("layers.*.mamba_norm",), "backbone.layers.*.norm"),
        *mixer_mappings("backbone.layers.*.mixer"),
        ModuleMapping(("norm",), "backbone.norm_f"),
        ModuleMapping(("head",), "lm_head"),
    ),
    ignored_tensors=(),
    keys={
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "norm_epsilon": "layer_norm_epsilon",
        "init_method_std": "initializer_range",
        "mamba_num_heads": "num_heads",
        "mamba_head_dim": "head_dim",
        "mamba_num_groups": "n_groups",
        "mamba_state_dim": "state_size",
        "mamba_chunk_size": "chunk_size",
    },
    activation_key="",
    activations={},
    defaults={
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "chunk_size": 256,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.1,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    fixed=HYBRID_FIXED,
    single_values={"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu"},
    has_rope=False,
    read_more=_read_more,
    write_more=_write_more,
    unsupported=_unsupported,
    hybrid=HybridLayers(1, "M+", _read_layers, lambda pattern: {"num_hidden_layers": len(pattern)}),
)
