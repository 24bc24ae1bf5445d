"""Nemotron-H and Nemotron 3: layers of one branch each, in any order: Mamba-2, attention without positions, MLPs of squared ReLU, experts.

Here the names are ours: `hybrid_override_pattern` is Megatron's pattern, and `layers_block_type` the same as a list. The gated norm is over
as many groups as B and C have. Experts are routed as DeepSeek-V3's, may work in a latent space, and are not gated; one more is shared.

transformers bounds step sizes below by `time_step_min`, for whole sequences and not for single tokens. The model's own code, Megatron's,
does not, and neither do we; a folder that is written has a bound that is never met. Nor can it run a model without attention, so none is
written as one.
"""

from __future__ import annotations

from dataclasses import replace

from petatron.base.errors import Problem
from petatron.config.schema.sections.hybrid import EXPERTS as EXPERT_LAYER
from petatron.models.hf import moe_config_json as moe
from petatron.models.hf.check_claimed_counts import MAX_LAYERS
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import Keys, Translation
from petatron.models.hf.decoder_config_json import SQUARED_RELU, activation, llama, no_biases
from petatron.models.hf.families.hybrid import shared_mamba_config
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.shared_tensor_names import ATTENTION, EXPERTS, module_mappings

_NO_BOUND = 1e-30
_LAYER = "backbone.layers.*"
_MIXER = f"{_LAYER}.mixer"
_UNGATED_MLP = {"up": "up_proj", "down": "down_proj"}
_EXPERTS_IN_FILES = module_mappings(EXPERTS, f"{_MIXER}.experts.#", _UNGATED_MLP)
_EXPERTS_IN_MEMORY = (
    ModuleMapping((f"{EXPERTS}.up",), f"{_MIXER}.experts.up_proj", no_weight_suffix=True),
    ModuleMapping((f"{EXPERTS}.down",), f"{_MIXER}.experts.down_proj", no_weight_suffix=True),
)
_MAPPINGS = (
    ModuleMapping(("embedding",), "backbone.embeddings"),
    ModuleMapping(("layers.*.mamba_norm",), f"{_LAYER}.norm"),
    ModuleMapping(("layers.*.attention_norm",), f"{_LAYER}.norm"),
    ModuleMapping(("layers.*.mlp_norm",), f"{_LAYER}.norm"),
    *shared_mamba_config.mixer_mappings(_MIXER),
    *module_mappings("layers.*.attention", _MIXER, ATTENTION),
    *module_mappings("layers.*.mlp", _MIXER, _UNGATED_MLP),
    *module_mappings("layers.*.mlp.shared", f"{_MIXER}.shared_experts", _UNGATED_MLP),
    *module_mappings("layers.*.mlp", _MIXER, {"latent_down": "fc1_latent_proj", "latent_up": "fc2_latent_proj"}),
    ModuleMapping(("layers.*.mlp.router",), f"{_MIXER}.gate"),
    ModuleMapping(
        ("layers.*.mlp.router",), f"{_MIXER}.gate.e_score_correction_bias", no_weight_suffix=True, leaf="expert_bias"
    ),
    ModuleMapping(("norm",), "backbone.norm_f"),
    ModuleMapping(("head",), "lm_head"),
)
_SYMBOLS = "".join(shared_mamba_config.LAYER_TYPES)


def _read_layers(keys: Keys) -> str | Problem:
    pattern = keys.get("hybrid_override_pattern")
    if pattern is None or any(keys.get(key) is not None for key in shared_mamba_config.LAYER_KEYS):
        return shared_mamba_config.read_layer_kinds(keys, "layers_block_type", _SYMBOLS)
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_LAYERS or set(pattern) - set(_SYMBOLS):
        rule = f"is no pattern of the symbols {_SYMBOLS}"
        return Problem("hybrid_override_pattern", f"{pattern!r:.40}", rule, OWN_FOLDER_FIX)
    return pattern


def _write_layers(pattern: str) -> Keys:
    kinds = [shared_mamba_config.LAYER_TYPES[symbol] for symbol in pattern]
    return {"layers_block_type": kinds, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


_ROUTING: Keys = {"n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_SIZES: Keys = {"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
_EXPERT_KEYS: Keys = {"n_routed_experts": 8, "num_experts_per_tok": 2, **_SIZES, **_ROUTING}
"""Also in files of models without experts."""


def _translate(config: Translation) -> None:
    config.also(n_routed_experts="num_local_experts", n_groups="mamba_n_groups", conv_kernel="mamba_d_conv")
    config.also(chunk_size="mamba_chunk_size", use_conv_bias="mamba_conv_bias", time_step_limit="mamba_dt_limit")
    pattern = config.layer_pattern(r"[ME-]*\*[M*E-]*", _read_layers, _write_layers, stand_in="M*")
    llama(
        config,
        without=("num_hidden_layers", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        intermediate_size=21504,
    )
    config.copy("norm_epsilon", "layer_norm_epsilon", 1e-5)
    activation(config, "mlp_hidden_act", "relu2", SQUARED_RELU)
    no_biases(config)
    config.only(attention_bias=False, mlp_bias=False, use_bias=False, mamba_proj_bias=False, tie_word_embeddings=False)
    config.always(position_embedding_type="none", rotary_percent=1.0, untie_embeddings_and_output_weights=True)
    _mixers(config)
    config.only(norm_topk_prob=True)
    config.convert((), **_EXPERT_KEYS)
    if EXPERT_LAYER in pattern:
        _experts(config)


def _mixers(config: Translation) -> None:
    keys = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "chunk_size")
    shared_mamba_config.mixer_sizes(config, keys, (128, 64, 8, 128, 128))
    config.only(conv_kernel=4, use_conv_bias=True, mamba_hidden_act="silu")
    groups, rest = "mamba_norm_groups", {"time_step_min": _NO_BOUND, "num_nextn_predict_layers": 0}
    config.convert((groups,), lambda keys: ({groups: keys["n_groups"]}, []), lambda spec: rest)
    config.expect(
        groups,
        "a gated norm over as many groups as B and C have",
        lambda spec: (
            not shared_mamba_config.has_mamba(spec) or spec.config.mamba_norm_groups == spec.config.mamba_num_groups
        ),
    )


def _experts(config: Translation) -> None:
    width = "moe_shared_expert_intermediate_size"
    moe.expert_sizes(config, "n_routed_experts", width="moe_intermediate_size", defaults=(8, 2, 7688))
    config.copy(width, width, 7688)
    config.copy("moe_latent_size", "moe_latent_size", None)
    moe.sigmoid_router(config)
    moe.deepseek_routing(config, 2, **_ROUTING)
    moe.experts_of_pattern(config)


NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    models="Nemotron-H, Nemotron 3 (2025)",
    what_differs="a [hybrid](mamba.md) with one branch a layer; attention without positions, squared ReLU, experts",
    prefix="backbone.",
    mappings=(*_MAPPINGS, *_EXPERTS_IN_FILES),
    in_memory_mappings=tuple(
        replace(mapping, hf_module=mapping.hf_module.replace("backbone.", "model."))
        for mapping in (*_MAPPINGS, *_EXPERTS_IN_MEMORY)
    ),
    ignored_tensors=("mtp.*",),
    branches=1,
    translate=_translate,
)
