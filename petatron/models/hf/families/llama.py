"""Llama 1 to 3: rotary positions, RMSNorm, a gated MLP. Most families differ from it in a detail: in SmolLM3, every fourth layer has no
positions.
"""

from __future__ import annotations

from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.layer_patterns import format_layers, no_rope_layers
from petatron.models.hf.decoder_config_json import biases, llama
from petatron.models.hf.family import Family
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.setting_types import OWN_FOLDER_FIX
from petatron.models.hf.shared_tables import LLAMA_MAPPINGS
from petatron.models.hf.translation import Keys, Settings, Translation
from petatron.models.hf.window_config_json import windows
from petatron.models.model_spec import ModelSpec


def _llama(config: Translation) -> None:
    llama(config, heads_divide_width=True)
    biases(config)
    rope(config)


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    models="Llama 1 to 3",
    what_differs="rotary positions, RMSNorm, a gated MLP; linear, Llama 3 and YaRN scaling",
    mappings=LLAMA_MAPPINGS,
    translate=_llama,
)


def rotary_layers(keys: Keys) -> Any:
    """Returns `no_rope_layers`, in which a 1 means, against its name, that the layer has rotary positions; or what they are without it."""
    every = keys["no_rope_layer_interval"]
    if keys["no_rope_layers"] is not None:
        return keys["no_rope_layers"]
    return [int(every < 1 or (layer + 1) % every != 0) for layer in range(keys["num_hidden_layers"])]


def read_no_rope(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Reads which layers have no positions."""
    rotates, num_layers = rotary_layers(keys), keys["num_hidden_layers"]
    if not isinstance(rotates, list) or len(rotates) != num_layers or any(bit not in (0, 1) for bit in rotates):
        rule = f"is not one 0 or 1 for each of the {num_layers} layers"
        return {}, [Problem("no_rope_layers", f"{rotates!r:.40}", rule, OWN_FOLDER_FIX)]
    return {} if all(rotates) else {"no_rope_freq": format_layers([not bit for bit in rotates])}, []


def write_no_rope(spec: ModelSpec) -> Settings:
    """Returns `no_rope_layers`."""
    return {"no_rope_layers": [int(not here) for here in no_rope_layers(spec.config)]}


def _smollm3(config: Translation) -> None:
    llama(
        config,
        without=("head_dim",),
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    biases(config)
    windows(config, None, use_sliding_window=False, layer_types=None)
    rope(config, rope_theta=2000000.0)
    config.convert(("no_rope_freq",), read_no_rope, write_no_rope, no_rope_layers=None, no_rope_layer_interval=4)


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    what_differs="every fourth layer has no positions",
    mappings=LLAMA_MAPPINGS,
    translate=_smollm3,
)
