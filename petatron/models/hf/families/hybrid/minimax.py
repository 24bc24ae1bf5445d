"""MiniMax-Text-01: lightning attention in most layers, attention in the others, Mixtral's experts in all of them.

The stream of a layer is the output of its norms, times a factor (alpha), and what a branch adds has another (beta). The norm inside of
lightning attention has an epsilon of 1e-6 whatever `rms_norm_eps` says; slopes follow from heads and layers, and are not read.

Folders with the model's own code have other spellings (`layernorm_*`, `attn_type_list`), which are read too. These models rotate
`rotary_dim` channels of each head: so do we, while transformers' MiniMax passes over that key and rotates whole heads.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import SILU_ALONE, llama, no_biases
from petatron.models.hf.families.mistral import MIXTRAL, mixtral_experts
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.linear_layers_config_json import (
    LINEAR,
    linear_attention,
    linear_settings,
    read_linear_layers,
    write_linear_layers,
)
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import FUSED_EXPERT_MAPPINGS, module_mappings
from petatron.models.hf.window_config_json import FULL
from petatron.models.model_spec import ModelSpec

_OURS, _THEIRS = "layers.*.lightning", "model.layers.*.self_attn"
_LIGHTNING = (
    ModuleMapping(("layers.*.lightning_norm",), "model.layers.*.input_layernorm"),
    ModuleMapping((f"{_OURS}.in_q", f"{_OURS}.in_k", f"{_OURS}.in_v"), f"{_THEIRS}.qkv_proj", fused_by_head=True),
    *module_mappings(_OURS, _THEIRS, {"in_z": "output_gate", "norm": "norm", "out_proj": "out_proj"}),
)
_FACTORS = {
    "attention_stream_multiplier": "full_attn_alpha_factor",
    "attention_out_multiplier": "full_attn_beta_factor",
    "lightning_stream_multiplier": "linear_attn_alpha_factor",
    "lightning_out_multiplier": "linear_attn_beta_factor",
    "mlp_stream_multiplier": "mlp_alpha_factor",
}
_MLP_OUTPUT = "mlp_beta_factor"
_PUBLISHED_FACTORS = {
    f"{theirs}_{part}_factor": f"layernorm_{published}_{part}"
    for theirs, published in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for part in ("alpha", "beta")
}


def _translate(config: Translation) -> None:
    config.also(num_local_experts="num_experts", **_PUBLISHED_FACTORS)
    llama(
        config,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        activations=SILU_ALONE,  # of queries, keys and values of lightning attention too
    )
    no_biases(config)
    rope(config, rope_theta=1e6)
    _rotated_channels(config)
    config.always(norm_placement="stream")
    config.only(postnorm=True)
    linear_attention(config, "lightning_attention", _read_layer_types, write_linear_layers)
    _factors(config)
    mixtral_experts(config)
    config.convert((), _read_absent_parts)


def _read_layer_types(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Layers are linear by name, or by number (`attn_type_list`, where 0 is linear), or every second one is."""
    layers, kinds, numbers = keys["num_hidden_layers"], keys["layer_types"], keys.get("attn_type_list")
    if kinds is None:
        kinds = [FULL, LINEAR] * layers if numbers is None else numbers
        kinds = [{0: LINEAR, 1: FULL}.get(kind, kind) for kind in kinds[:layers]] if isinstance(kinds, list) else kinds
    return linear_settings(read_linear_layers(kinds, layers))


def _rotated_channels(config: Translation) -> None:
    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        width = config.setting("kv_channels")
        rotated = keys["rotary_dim"] or width
        if is_count(rotated, 2) and rotated % 2 == 0 and rotated <= width:
            return {"rotary_percent": rotated / width}, []
        rule = f"is not an even number of the {width} channels of a head"
        return {}, [Problem("rotary_dim", f"{rotated!r:.40}", rule, OWN_FOLDER_FIX)]

    def write(spec: ModelSpec) -> Keys:
        return {"rotary_dim": int(spec.config.kv_channels * spec.config.rotary_percent)}

    config.convert(("rotary_percent",), read, write, rotary_dim=None)


def _factors(config: Translation) -> None:
    for setting, key in _FACTORS.items():
        config.copy(setting, key, 1.0)
    multipliers = "mlp_multipliers"
    config.convert(
        (multipliers,),
        lambda keys: ({multipliers: (1.0, float(keys[_MLP_OUTPUT]))}, []),
        lambda spec: {_MLP_OUTPUT: spec.config.mlp_multipliers[-1]},
        **{_MLP_OUTPUT: 1.0},
    )
    config.expect(multipliers, "no factor on gates", lambda spec: spec.config.mlp_multipliers[0] == 1.0)


def _read_absent_parts(keys: Keys) -> tuple[Settings, list[Problem]]:
    parts = {
        "sliding_window": "is a window in the layers of attention, which this family does not have here",
        "shared_intermediate_size": "is a shared expert with a coefficient of its own, which the decoder does not have",
    }
    absent = [key for key in parts if keys.get(key) or (key == "sliding_window" and keys.get(key) is not None)]
    return {}, [Problem(key, f"{keys[key]!r:.40}", parts[key], OTHER_MODEL_FIX) for key in absent]


MINIMAX = Family(
    name="minimax",
    architecture="MiniMaxForCausalLM",
    other_names=("minimax_text_01", "minimax_m1"),
    models="MiniMax-Text-01, MiniMax-M1 (`minimax_text_01`, `minimax_m1`)",
    what_differs="[lightning attention](lightning.md) and attention in some layers, norms on the stream, factors on residuals, experts",
    mappings=(*MIXTRAL.mappings, *_LIGHTNING),
    in_memory_mappings=(*FUSED_EXPERT_MAPPINGS, *_LIGHTNING),
    ignored_tensors=(
        "*rotary_emb.inv_freq",
        *(f"*.self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
    ),
    translate=_translate,
)
