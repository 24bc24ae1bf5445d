"""Qwen3-Next: three layers of gated delta nets before each one of gated attention, experts with a gated shared one in every layer.

Norms multiply by one plus their weight, except that of the delta net. The projections of a delta net are two matrices there, with the
rows of one key head adjacent: its query, its key, the values and gates of its value heads; and b and a of these. A query head's gate
follows its query.

Published folders have a depth of multi-token prediction under `mtp.`, which transformers does not load, nor do we.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.models.hf.config_translation import Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import SILU_ALONE, llama
from petatron.models.hf.families.qwen import QWEN2_MOE, head_norms, qwen_experts, shared_expert
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.linear_layers_config_json import (
    linear_attention,
    linear_settings,
    read_linear_layers,
    write_linear_layers,
)
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import leaf_mappings, module_mappings

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
    *leaf_mappings(_NET, _HF_NET, "A_log", "dt_bias"),
    *module_mappings(_NET, _HF_NET, {"norm": "norm", "out_proj": "out_proj"}),
    ModuleMapping(
        ("layers.*.attention.q", "layers.*.attention.gate"), "model.layers.*.self_attn.q_proj", fused_by_head=True
    ),
)


def _with_net(mappings: tuple[ModuleMapping, ...]) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of Qwen2-MoE, whose experts are the same, with those of delta nets and gated queries."""
    return (*(row for row in mappings if row.logical_modules != ("layers.*.attention.q",)), *_NET_MAPPINGS)


def _read_layer_types(keys: Keys) -> tuple[Settings, list[Problem]]:
    """`layer_types` names the kind of every layer; without it every `full_attention_interval`-th is attention."""
    every, kinds = keys["full_attention_interval"], keys["layer_types"]
    if kinds is not None:
        return linear_settings(read_linear_layers(kinds, keys["num_hidden_layers"]))
    if is_count(every, 1):
        return {"linear_attention_freq": str(every)}, []
    rule = "is not a positive whole number"
    return {}, [Problem("full_attention_interval", f"{every!r:.40}", rule, "Use 4, or name layer_types.")]


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
    linear_attention(config, "gated_delta_net", _read_layer_types, write_linear_layers, full_attention_interval=4)
    config.copy_same(linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128)
    config.copy_same(linear_num_key_heads=16, linear_num_value_heads=32)
    qwen_experts(config, norm_topk_prob=True)
    shared_expert(config)


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
