"""Llama 1 to 3: rotary positions, RMSNorm, a gated MLP. Most families differ from it in a detail, and those here in little else:

SmolLM3 has no positions in every fourth layer. Phi-3 and Phi-4 have q, k and v in one matrix, gate and up in another, and part of each
head rotated in some. StarCoder2 has LayerNorm and biases everywhere as in GPT-2, kv heads and windows as in Mistral, a plain MLP. Nemotron
(3 and 4, Minitron) has LayerNorm with weights as offsets from one, squared ReLU without gates, half of each head rotated.

Long contexts of Phi ("longrope") have two lists of factors. transformers chooses by the length of each input; here a run has one, by its
`--seq-length`, and generates up to the original context with the short ones. Files before that name say "su" or "yarn", and it is their
only kind of scaling in transformers.
"""

from __future__ import annotations

from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.attention_layer_freq import format_layers, no_rope_layers
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import PLAIN, SQUARED_RELU, biases, dropouts, llama
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import (
    GATED_MLP,
    LLAMA_MAPPINGS,
    QKV,
    llama_mappings_without,
    module_mappings,
)
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


_GATE_UP = ("layers.*.mlp.gate", "layers.*.mlp.up")


def _phi3(config: Translation) -> None:
    llama(config, without=("head_dim",), max_position_embeddings=4096, rms_norm_eps=1e-5)
    config.always(add_bias_linear=False)
    dropouts(config, "resid_pdrop", "embd_pdrop", 0.0)
    windows(config, None)
    types = {"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")}
    rope(config, types=types, partial_rotary_factor=1.0, original_max_position_embeddings=4096)


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-4, Phi-4-mini",
    what_differs="q, k and v in one matrix, gate and up in another, part of each head rotated",
    mappings=(
        *llama_mappings_without(*QKV, *_GATE_UP),
        ModuleMapping(QKV, "model.layers.*.self_attn.qkv_proj"),
        ModuleMapping(_GATE_UP, "model.layers.*.mlp.gate_up_proj"),
    ),
    translate=_phi3,
)


def _starcoder2(config: Translation) -> None:
    llama(
        config,
        without=("head_dim", "rms_norm_eps"),
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.018042,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        activations={name: PLAIN[name] for name in PLAIN if name not in ("gelu_new", "gelu_fast")},
    )
    config.copy("norm_epsilon", "norm_epsilon", 1e-5)
    config.copy("add_bias_linear", "use_bias", True)
    config.always(normalization="LayerNorm", add_qkv_bias=False)
    dropouts(config, "residual_dropout", "embedding_dropout", 0.0)
    windows(config, None)
    rope(config)


STARCODER2 = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    models="StarCoder2",
    what_differs="LayerNorm, biases, a plain MLP",
    mappings=(
        *llama_mappings_without(*(f"layers.*.mlp.{name}" for name in GATED_MLP)),
        *module_mappings("layers.*.mlp", "model.layers.*.mlp", {"up": "c_fc", "down": "c_proj"}),
    ),
    translate=_starcoder2,
)


def _nemotron(config: Translation) -> None:
    llama(
        config,
        without=("rms_norm_eps",),
        max_position_embeddings=4096,
        initializer_range=0.0134,
        hidden_act="relu2",
        activations=SQUARED_RELU,
    )
    config.copy("norm_epsilon", "norm_eps", 1e-5)
    config.always(normalization="LayerNorm", apply_layernorm_1p=True)
    biases(config)
    rope(config, partial_rotary_factor=0.5)


NEMOTRON = Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    models="Nemotron-3 (2023), Nemotron-4, Minitron",
    what_differs="LayerNorm as offset from one, squared ReLU, half of each head rotated",
    mappings=llama_mappings_without("layers.*.mlp.gate"),
    translate=_nemotron,
)
