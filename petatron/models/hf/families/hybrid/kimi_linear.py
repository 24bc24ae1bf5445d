"""Kimi-Linear: Kimi delta attention in most layers, latent attention without positions in the others, DeepSeek-V3's experts.

Latents are normalized with an epsilon of 1e-6 whatever `rms_norm_eps` says. A published config.json has the sizes of linear attention, and
which layers have it counted from 1, in a table (`linear_attn_config`); transformers writes `linear_*` and `layer_types`. Both are read, and
both are written, since each is what some program reads.

The files have the convolutions of queries, keys and values apart, experts one by one under `block_sparse_moe`, and the MLP of a dense layer
under `mlp`; transformers writes that one under `block_sparse_moe` too, which is read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.attention_layer_freq import format_layers, linear_layers
from petatron.models.hf import moe_config_json as moe
from petatron.models.hf.check_claimed_counts import MAX_HEADS
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import SILU_ALONE, latent_attention, llama, no_biases
from petatron.models.hf.families.deepseek import EXPERT_BIAS_MAPPING, LATENT_MAPPINGS, SHARED_EXPERTS
from petatron.models.hf.families.mistral import MIXTRAL_EXPERTS
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.linear_layers_config_json import linear_attention, read_linear_layers, write_linear_layers
from petatron.models.hf.shared_tensor_names import FUSED_EXPERTS, leaf_mappings, module_mappings
from petatron.models.model_spec import ModelSpec

_TABLE = "linear_attn_config"
_NET, _HF_NET = "layers.*.delta", "model.layers.*.self_attn"
_MOE = "block_sparse_moe"
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_OURS = {
    "linear_head_dim": ("linear_key_head_dim", "linear_value_head_dim"),
    "linear_num_heads": ("linear_num_key_heads", "linear_num_value_heads"),
    "linear_conv_kernel_dim": ("linear_conv_kernel_dim",),
}
_NET_MAPPINGS = (
    ModuleMapping(("layers.*.delta_norm",), "model.layers.*.input_layernorm"),
    *(ModuleMapping((f"{_NET}.in_{name}",), f"{_HF_NET}.{name}_proj") for name in ("q", "k", "v", "b")),
    *module_mappings(
        _NET, _HF_NET, {"gate_down": "g_a_proj", "gate_up": "g_b_proj", "norm": "o_norm", "out_proj": "o_proj"}
    ),
)


def _decay_mappings(module: str) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of decays, which are in a module of their own in memory."""
    return (
        *module_mappings(_NET, module, {"decay_down": "f_a_proj", "decay_up": "f_b_proj"}),
        *leaf_mappings(_NET, module, "A_log", "dt_bias"),
    )


def _in_files(mapping: ModuleMapping) -> ModuleMapping:
    """Returns the mapping of a part of an MoE layer as files name it."""
    return replace(mapping, hf_module=mapping.hf_module.replace(".mlp.", f".{_MOE}."))


_FILES = (
    *LATENT_MAPPINGS,
    *_NET_MAPPINGS,
    *_decay_mappings(_HF_NET),
    *(ModuleMapping((f"{_NET}.conv_{name}",), f"{_HF_NET}.{name}_conv1d") for name in ("q", "k", "v")),
    *(_in_files(mapping) for mapping in (*SHARED_EXPERTS, EXPERT_BIAS_MAPPING)),
    *MIXTRAL_EXPERTS,
)
_MEMORY = (
    *LATENT_MAPPINGS,
    *_NET_MAPPINGS,
    *_decay_mappings(f"{_HF_NET}.forget_gate"),
    ModuleMapping((f"{_NET}.conv_q", f"{_NET}.conv_k", f"{_NET}.conv_v"), f"{_HF_NET}.conv1d"),
    *SHARED_EXPERTS,
    EXPERT_BIAS_MAPPING,
    *FUSED_EXPERTS,
)


def _read_linear_attention(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Sizes and layers of linear attention: of the table, where there is one; `layer_types` names layers before it does."""
    table = keys[_TABLE]
    if not isinstance(table, Mapping | None):
        return {}, [Problem(_TABLE, f"{table!r:.40}", "is not a table of settings", OWN_FOLDER_FIX)]
    table = table or {}
    values: Settings = {}
    problems: list[Problem] = []
    for name, key in _SIZES.items():
        size = table.get(name, keys[key])
        if not is_count(size, 1) or size > MAX_HEADS:
            rule = "is not a positive whole number that a model may have"
            problems.append(Problem(f"{_TABLE}.{name}", f"{size!r:.40}", rule, OWN_FOLDER_FIX))
        values |= dict.fromkeys(_OURS[key], size)
    linear = _read_layers(keys, table)
    if isinstance(linear, Problem):
        return {}, [*problems, linear]
    return ({}, problems) if problems else (values | {"linear_attention_freq": format_layers(linear)}, [])


def _read_layers(keys: Keys, table: Keys) -> list[bool] | Problem:
    """Returns for each layer whether it has linear attention."""
    layers, kinds = keys["num_hidden_layers"], keys["layer_types"]
    if kinds is not None:
        return read_linear_layers(kinds, layers)
    full, linear = table.get("full_attn_layers"), table.get("kda_layers")
    if full is None or linear is None:
        return [layer == 0 or layer % 4 != 0 for layer in range(layers)]
    named = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if len(named) != layers or any(layer not in named for layer in range(1, layers + 1)):
        rule = f"and kda_layers do not have each of the {layers} layers, which are counted from 1, once"
        return Problem(f"{_TABLE}.full_attn_layers", f"{full!r:.40}", rule, OWN_FOLDER_FIX)
    return [layer + 1 in linear for layer in range(layers)]


def _write_linear_attention(spec: ModelSpec) -> Keys:
    model, linear = spec.config, linear_layers(spec.config)
    sizes = {key: getattr(model, ours[0]) for key, ours in _OURS.items()}
    table = {name: sizes[key] for name, key in _SIZES.items()}
    table["full_attn_layers"] = [layer + 1 for layer, chosen in enumerate(linear) if not chosen]
    table["kda_layers"] = [layer + 1 for layer, chosen in enumerate(linear) if chosen]
    return {**sizes, **write_linear_layers(spec), _TABLE: table}


def _translate(config: Translation) -> None:
    config.also(model_max_length="max_position_embeddings", num_experts="num_local_experts")
    config.also(num_experts_per_token="num_experts_per_tok", num_shared_experts="n_shared_experts")
    config.also(num_expert_group="n_group", moe_renormalize="norm_topk_prob")
    latent_attention(config, q_lora_rank=None)
    config.copy("max_position_embeddings", "model_max_length", 1048576)
    llama(
        config,
        without=("head_dim", "max_position_embeddings"),
        rms_norm_eps=1e-5,
        activations=SILU_ALONE,  # of the convolution too
    )
    no_biases(config)
    config.always(qk_layernorm=True, latent_norm_epsilon=1e-6, position_embedding_type="none")
    config.only(attention_bias=False, mla_use_nope=True)
    _linear_attention(config)
    moe.expert_sizes(config, "num_experts", "num_experts_per_token", "moe_intermediate_size", defaults=(256, 8, 1024))
    moe.sigmoid_router(config)
    config.only(moe_renormalize=True, moe_router_activation_func="sigmoid")
    keys = {"shared_key": "num_shared_experts", "groups_key": "num_expert_group"}
    routing = {"num_shared_experts": 1, "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1}
    moe.deepseek_routing(config, 2, **keys, **routing)
    moe.experts_after_dense_layers(config, 1, mlp_layer_types=None)


def _linear_attention(config: Translation) -> None:
    """Translates the sizes of linear attention, and which layers have it; keys and values have the same heads in every model."""
    settings = [name for names in _OURS.values() for name in names]
    keys = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4, _TABLE: None}
    linear_attention(config, "kimi_delta_attention", _read_linear_attention, _write_linear_attention, *settings, **keys)
    for names in _OURS.values():
        key_heads, value_heads = config.setting(names[0]), config.setting(names[-1])
        config.expect(names[0], f"the value of {names[-1]} there", lambda spec, same=key_heads == value_heads: same)


KIMI_LINEAR = Family(
    name="kimi_linear",
    architecture="KimiLinearForCausalLM",
    models="Kimi-Linear",
    what_differs="[delta nets with a decay of every channel](delta.md), [latent attention](mla.md) without positions, "
    "experts as in DeepSeek-V3",
    mappings=_FILES,
    in_memory_mappings=_MEMORY,
    tensor_aliases={f".{_MOE}.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")},
    translate=_translate,
)
