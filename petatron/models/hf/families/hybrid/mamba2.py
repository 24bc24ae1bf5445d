"""Mamba-2 alone: no attention, no MLP, no positions, so no longest sequence either."""

from __future__ import annotations

from petatron.config.schema.sections.hybrid import MAMBA
from petatron.models.hf.config_translation import REQUIRED, Translation
from petatron.models.hf.decoder_config_json import llama_layers, no_biases, tied_embeddings
from petatron.models.hf.families.hybrid import shared_mamba_config
from petatron.models.hf.family import Family, ModuleMapping

_MAX_POSITIONS = 1 << 20
"""Not in config.json, since the state has the same size after any number of tokens; a run has some number."""


def _translate(config: Translation) -> None:
    shared_mamba_config.equal_layers(config, MAMBA)
    config.copy_same(hidden_size=REQUIRED, vocab_size=REQUIRED)
    config.copy("norm_epsilon", "layer_norm_epsilon", 1e-5)
    config.copy("init_method_std", "initializer_range", 0.1)
    shared_mamba_config.mixer_sizes(
        config, ("num_heads", "head_dim", "n_groups", "state_size", "chunk_size"), (128, 64, 8, 128, 256)
    )
    tied_embeddings(config, False)
    llama_layers(config)
    no_biases(config)
    config.always(rotary_percent=1.0)
    config.only(conv_kernel=4, use_bias=False, use_conv_bias=True, hidden_act="silu")
    shared_mamba_config.one_norm_group(config)
    positions = "position_embedding_type"
    read = {"max_position_embeddings": _MAX_POSITIONS, positions: "none"}
    config.convert((positions,), lambda keys: (read, []), lambda spec: {"expand": shared_mamba_config.expansion(spec)})
    # Rotary positions would be those of attention, which there is none of.
    config.expect(positions, "none", lambda spec: spec.config.position_embedding_type != "learned_absolute")


MAMBA2 = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    models="Mamba-2, Codestral Mamba",
    what_differs="[Mamba-2](mamba.md) in every layer, no attention",
    prefix="backbone.",
    mappings=(
        ModuleMapping(("embedding",), "backbone.embeddings"),
        ModuleMapping(("layers.*.mamba_norm",), "backbone.layers.*.norm"),
        *shared_mamba_config.mixer_mappings("backbone.layers.*.mixer"),
        ModuleMapping(("norm",), "backbone.norm_f"),
        ModuleMapping(("head",), "lm_head"),
    ),
    ignored_tensors=(),
    branches=1,
    translate=_translate,
)
