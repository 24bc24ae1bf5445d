"""Mamba-2 alone: no attention, no MLP, no positions, so no longest sequence either."""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.config.schema.hybrid_pattern import MAMBA
from petatron.models.hf.decoder_config_json import llama_layers, no_biases, tied_embeddings
from petatron.models.hf.families.hybrid.mamba_tables import (
    any_time_step,
    expansion,
    mixer_mappings,
    one_norm_group,
    read_layer_count,
)
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.translation import Keys, Settings, Translation

_MAX_POSITIONS = 1 << 20
"""Not in config.json, since the state has the same size after any number of tokens; a run has some number."""


def _read_layers(keys: Keys) -> str | Problem:
    count = read_layer_count(keys)
    return count if isinstance(count, Problem) else MAMBA * count


def _translate(config: Translation) -> None:
    config.layer_pattern("M+", _read_layers, lambda pattern: {"num_hidden_layers": len(pattern)}, stand_in=MAMBA)
    config.copy("hidden_size", "hidden_size")
    config.copy("vocab_size", "vocab_size")
    config.copy("norm_epsilon", "layer_norm_epsilon", 1e-5)
    config.copy("init_method_std", "initializer_range", 0.1)
    config.copy("mamba_num_heads", "num_heads", 128)
    config.copy("mamba_head_dim", "head_dim", 64)
    config.copy("mamba_num_groups", "n_groups", 8)
    config.copy("mamba_state_dim", "state_size", 128)
    config.copy("mamba_chunk_size", "chunk_size", 256)
    tied_embeddings(config, False)
    llama_layers(config)
    no_biases(config)
    config.always(rotary_percent=1.0)
    config.only(conv_kernel=4, use_bias=False, use_conv_bias=True, hidden_act="silu")
    any_time_step(config)
    one_norm_group(config)
    positions = "position_embedding_type"
    config.convert((positions,), _read_positions, lambda spec: {"expand": expansion(spec)})
    # Rotary positions would be those of attention, which there is none of.
    config.expect(positions, "none", lambda spec: spec.config.position_embedding_type != "learned_absolute")


def _read_positions(keys: Keys) -> tuple[Settings, list[Problem]]:
    return {"max_position_embeddings": _MAX_POSITIONS, "position_embedding_type": "none"}, []


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
    branches=1,
    translate=_translate,
)
