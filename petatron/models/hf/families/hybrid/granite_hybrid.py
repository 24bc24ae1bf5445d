"""Granite 4: Granite's factors, layers of Mamba-2 or attention, and in each of them an MLP, with experts beside it or alone.

The MLP of every layer (`shared_mlp`) is an MLP of ours, or with experts the shared one. Positions are rotary or none.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.sections.hybrid import ATTENTION, EXPERTS, MAMBA, MLP
from petatron.models.hf.config_translation import REQUIRED, Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import SILU_ALONE, llama, no_biases
from petatron.models.hf.families.granite import EXPERTS_IN_FILES, EXPERTS_IN_MEMORY, multipliers
from petatron.models.hf.families.hybrid import shared_mamba_config
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.moe_config_json import expert_sizes, experts_of_pattern, softmax_router
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import ATTENTION as SELF_ATTENTION
from petatron.models.hf.shared_tensor_names import module_mappings
from petatron.models.model_spec import ModelSpec

_LAYER = "model.layers.*"
_MAPPINGS = (
    ModuleMapping(("embedding",), "model.embed_tokens"),
    ModuleMapping(("layers.*.mamba_norm",), f"{_LAYER}.input_layernorm"),
    ModuleMapping(("layers.*.attention_norm",), f"{_LAYER}.input_layernorm"),
    *shared_mamba_config.mixer_mappings(f"{_LAYER}.mamba"),
    *module_mappings("layers.*.attention", f"{_LAYER}.self_attn", SELF_ATTENTION),
    ModuleMapping(("layers.*.mlp_norm",), f"{_LAYER}.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp.gate", "layers.*.mlp.up"), f"{_LAYER}.shared_mlp.input_linear"),
    ModuleMapping(("layers.*.mlp.down",), f"{_LAYER}.shared_mlp.output_linear"),
    ModuleMapping(("layers.*.mlp.shared.gate", "layers.*.mlp.shared.up"), f"{_LAYER}.shared_mlp.input_linear"),
    ModuleMapping(("layers.*.mlp.shared.down",), f"{_LAYER}.shared_mlp.output_linear"),
    ModuleMapping(("norm",), "model.norm"),
    ModuleMapping(("head",), "lm_head"),
)
_FACTORS = (
    "rotary_seq_len_interpolation_factor",
    *(f"longrope_{name}_factor" for name in ("short", "long", "attention")),
)
_NO_SCALING = {"use_rope_scaling": False, **dict.fromkeys(_FACTORS)}


def _read_layers(keys: Keys) -> str | Problem:
    count = keys.get("num_hidden_layers")
    if not any(keys.get(key) for key in shared_mamba_config.LAYER_KEYS):
        layers = shared_mamba_config.read_layer_count(keys)
        return layers if isinstance(layers, Problem) else (MAMBA + _channel_mixer(keys)) * layers
    mixers = shared_mamba_config.read_layer_kinds(keys, "layer_types", MAMBA + ATTENTION)
    if isinstance(mixers, Problem):
        return mixers
    if is_count(count) and len(mixers) != count:
        rule = f"are not those of {count!r:.20} layers"
        return Problem("layer_types", f"{len(mixers)} kinds", rule, "Correct config.json.")
    return "".join(mixer + _channel_mixer(keys) for mixer in mixers)


def _channel_mixer(keys: Keys) -> str:
    return EXPERTS if keys.get("num_local_experts", 8) else MLP


def _write_layers(pattern: str) -> Keys:
    kinds = [shared_mamba_config.LAYER_TYPES[symbol] for symbol in pattern[::2]]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _read_positions(keys: Keys) -> tuple[Settings, list[Problem]]:
    rotary = keys.get("position_embedding_type") == "rope"
    return {} if rotary else {"position_embedding_type": "none", **_NO_SCALING}, []


def _write_positions(spec: ModelSpec) -> Keys:
    """Writes the keys of experts too, as of a model that has none; those of one that has are written after them."""
    positions = None if spec.config.position_embedding_type == "none" else "rope"
    experts = {"intermediate_size": spec.config.ffn_hidden_size, "num_local_experts": 0}
    return {"position_embedding_type": positions, **experts}


def _translate(config: Translation) -> None:
    pattern = config.layer_pattern(r"([M*]-)+|([M*]E)+", _read_layers, _write_layers, stand_in="M-*-")
    config.copy("ffn_hidden_size", "shared_intermediate_size", 1024)
    llama(
        config,
        without=("num_hidden_layers", "intermediate_size", "head_dim"),
        activations=SILU_ALONE,  # of the convolution too
    )
    multipliers(config)
    no_biases(config)
    config.only(attention_bias=False)
    rope(config, optional=True)
    config.convert((), _read_positions, _write_positions, num_local_experts=8, num_experts_per_tok=2)
    shared_mamba_config.bamba_mixers(config)
    shared_mamba_config.bamba_expansion(config)
    if EXPERTS in pattern:
        expert_sizes(config, defaults=(8, 2, REQUIRED))
        config.copy("moe_shared_expert_intermediate_size", "shared_intermediate_size", 1024)
        softmax_router(config)
        experts_of_pattern(config)


GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4",
    what_differs="a [hybrid](mamba.md) with Granite's factors; positions or none, an MLP or experts and one shared in every layer",
    mappings=(*_MAPPINGS, *EXPERTS_IN_FILES),
    in_memory_mappings=(*_MAPPINGS, *EXPERTS_IN_MEMORY),
    branches=2,
    translate=_translate,
)
