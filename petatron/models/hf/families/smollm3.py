"""SmolLM3: a Llama in which every fourth layer has no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.layer_patterns import format_layers, no_rope_layers
from petatron.models.hf.families.llama import LLAMA, like_llama
from petatron.models.hf.family import OWN_FOLDER_FIX
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, SLIDING_WINDOW_DEFAULTS
from petatron.models.model_spec import ModelSpec


def rotary_layers(hf_config: Mapping[str, Any]) -> Any:
    """Returns `no_rope_layers`, in which a 1 means, against its name, that the layer has rotary positions; or what they are without it."""
    every = hf_config["no_rope_layer_interval"]
    if hf_config["no_rope_layers"] is not None:
        return hf_config["no_rope_layers"]
    return [int(every < 1 or (layer + 1) % every != 0) for layer in range(hf_config["num_hidden_layers"])]


def read_no_rope(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Reads which layers have no positions."""
    rotates, num_layers = rotary_layers(hf_config), hf_config["num_hidden_layers"]
    if not isinstance(rotates, list) or len(rotates) != num_layers or any(bit not in (0, 1) for bit in rotates):
        rule = f"is not one 0 or 1 for each of the {num_layers} layers"
        return {}, [Problem("no_rope_layers", f"{rotates!r:.40}", rule, OWN_FOLDER_FIX)]
    return {} if all(rotates) else {"no_rope_freq": format_layers([not bit for bit in rotates])}, []


def write_no_rope(spec: ModelSpec) -> dict[str, Any]:
    """Returns `no_rope_layers`."""
    return {"no_rope_layers": [int(not here) for here in no_rope_layers(spec.config)]}


SMOLLM3 = like_llama(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    what_differs="every fourth layer has no positions",
    keys={name: key for name, key in LLAMA.keys.items() if name != "kv_channels"},
    defaults={
        **LLAMA_DEFAULTS,
        **{key: value for key, value in SLIDING_WINDOW_DEFAULTS.items() if key != "max_window_layers"},
        "sliding_window": None,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    read_more=read_no_rope,
    write_more=write_no_rope,
    more_settings=("no_rope_freq",),
)
