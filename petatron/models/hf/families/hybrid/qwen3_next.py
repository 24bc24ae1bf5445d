"""Qwen3-Next: three layers of gated delta nets before each one of gated attention, experts with a gated shared one in every layer.

Norms multiply by one plus their weight, except that of the delta net. The projections of a delta net are two matrices there, with the
rows of one key head adjacent: its query, its key, the values and gates of its value heads; and b and a of these. A query head's gate
follows its query.

Published folders have a depth of multi-token prediction under `mtp.`, which transformers does not load, nor do we.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.layer_patterns import format_layers, linear_layers
from petatron.models.hf.decoder_config_json import SILU_ALONE, llama
from petatron.models.hf.families.qwen import QWEN2_MOE, head_norms, qwen_experts, shared_expert
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.setting_types import OWN_FOLDER_FIX
from petatron.models.hf.translation import Keys, Settings, Translation
from petatron.models.hf.window_config_json import FULL
from petatron.models.model_spec import ModelSpec

LINEAR = "linear_attention"
_NET, _HF_NET = "layers.*.delta", "model.layers.*.linear_attn"
_NET_MAPPINGS = (
    ModuleMapping(("layers.*.delta_norm",), "model.layers.*.input_layernorm"),
    ModuleMapping(
        (f"{_NET}.in_q", f"{_NET}.in_k", f"{_NET}.in_v", f"{_NET}.in_z"),
        f"{_HF_NET}.in_proj_qkvz",
        fused_by_head=True,
        heads="linear_num_key_heads",
    ),
    ModuleMapping(
        (f"{_NET}.in_b", f"{_NET}.in_a"), f"{_HF_NET}.in_proj_ba", fused_by_head=True, heads="linear_num_key_heads"
    ),
    ModuleMapping((f"{_NET}.conv_q", f"{_NET}.conv_k", f"{_NET}.conv_v"), f"{_HF_NET}.conv1d"),
    ModuleMapping((_NET,), f"{_HF_NET}.A_log", no_weight_suffix=True, leaf="A_log"),
    ModuleMapping((_NET,), f"{_HF_NET}.dt_bias", no_weight_suffix=True, leaf="dt_bias"),
    ModuleMapping((f"{_NET}.norm",), f"{_HF_NET}.norm"),
    ModuleMapping((f"{_NET}.out_proj",), f"{_HF_NET}.out_proj"),
    ModuleMapping(
        ("layers.*.attention.q", "layers.*.attention.gate"), "model.layers.*.self_attn.q_proj", fused_by_head=True
    ),
)


def _with_net(mappings: tuple[ModuleMapping, ...]) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of Qwen2-MoE, whose experts are the same, with those of delta nets and gated queries."""
    return (*(row for row in mappings if row.logical_modules != ("layers.*.attention.q",)), *_NET_MAPPINGS)


def _read_layer_types(keys: Keys) -> tuple[Settings, list[Problem]]:
    """`layer_types` names the kind of every layer; without it every so many-th is attention."""
    layers, every, kinds = (keys[key] for key in ("num_hidden_layers", "full_attention_interval", "layer_types"))
    if kinds is None:
        if not is_count(every, 1):
            rule = "is not a positive whole number"
            return {}, [Problem("full_attention_interval", f"{every!r:.40}", rule, "Use 4, or name layer_types.")]
        return {"linear_attention_freq": str(every)}, []
    if not isinstance(kinds, list) or len(kinds) != layers or {str(kind) for kind in kinds} - {FULL, LINEAR}:
        rule = f"does not name each of the {layers} layers {FULL} or {LINEAR}"
        return {}, [Problem("layer_types", "", rule, OWN_FOLDER_FIX)]
    return {"linear_attention_freq": format_layers([kind == LINEAR for kind in kinds])}, []


def _write_layer_types(spec: ModelSpec) -> Keys:
    return {"layer_types": [LINEAR if linear else FULL for linear in linear_layers(spec.config)]}


def _translate(config: Translation) -> None:
    llama(
        config,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=32768,
        activations=SILU_ALONE,  # of the convolution too
    )
    head_norms(config)
    config.always(apply_layernorm_1p=True, attention_output_gate=True)
    rope(config, partial_rotary_factor=0.25)
    _delta_nets(config)
    qwen_experts(config, norm_topk_prob=True)
    shared_expert(config)


def _delta_nets(config: Translation) -> None:
    config.always(experimental_attention_variant="gated_delta_net")
    config.copy("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4)
    config.copy("linear_key_head_dim", "linear_key_head_dim", 128)
    config.copy("linear_value_head_dim", "linear_value_head_dim", 128)
    config.copy("linear_num_key_heads", "linear_num_key_heads", 16)
    config.copy("linear_num_value_heads", "linear_num_value_heads", 32)
    frequency, keys = "linear_attention_freq", {"full_attention_interval": 4, "layer_types": None}
    config.convert((frequency,), _read_layer_types, _write_layer_types, **keys)
    config.expect(frequency, "always one", lambda spec: spec.config.linear_attention_freq is not None)


QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    models="Qwen3-Next",
    what_differs="[gated delta nets](delta.md), gated attention in every fourth layer, a gated shared expert, one-plus norms",
    mappings=_with_net(QWEN2_MOE.mappings),
    in_memory_mappings=_with_net(QWEN2_MOE.in_memory_mappings),
    ignored_tensors=("*rotary_emb.inv_freq", "mtp.*"),
    translate=_translate,
)
