"""GPT-NeoX and Pythia: parallel branches with a norm each, LayerNorm, a part of each head rotated, q, k and v of a head side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.models.hf.families.gpt2 import GPT2
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.model_spec import ModelSpec

_LAYER = "gpt_neox.layers.*"
_MAPPINGS = (
    ModuleMapping(("embedding",), "gpt_neox.embed_in"),
    ModuleMapping(("layers.*.attention_norm",), f"{_LAYER}.input_layernorm"),
    ModuleMapping(
        ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v"),
        f"{_LAYER}.attention.query_key_value",
        fused_by_head=True,
    ),
    ModuleMapping(("layers.*.attention.out",), f"{_LAYER}.attention.dense"),
    ModuleMapping(("layers.*.mlp_norm",), f"{_LAYER}.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp.up",), f"{_LAYER}.mlp.dense_h_to_4h"),
    ModuleMapping(("layers.*.mlp.down",), f"{_LAYER}.mlp.dense_4h_to_h"),
    ModuleMapping(("norm",), "gpt_neox.final_layer_norm"),
)


_ROPE_KEYS = {"rope_theta": ("rotary_emb_base", 10000.0), "partial_rotary_factor": ("rotary_pct", 0.25)}
"""The keys of other families, with those of this one and transformers' defaults."""


def _read_more(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    table = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    problems = [
        Problem(key, str(hf_config[key]), f"is not read by transformers, which has {own} here", f"Write {own} too.")
        for key, (own, default) in _ROPE_KEYS.items()
        if key not in table and hf_config.get(key, default) != hf_config.get(own, default)
    ]
    return {"residual_branches": "parallel" if hf_config["use_parallel_residual"] else "sequential"}, problems


def _write_more(spec: ModelSpec) -> dict[str, Any]:
    model = spec.config
    own = {"rotary_emb_base": model.rotary_base, "rotary_pct": model.rotary_percent}
    return {"use_parallel_residual": model.residual_branches == "parallel", **own}


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    models="GPT-NeoX, Pythia",
    what_differs="attention and MLP in parallel, part of each head rotated",
    prefix="gpt_neox.",
    mappings=(*_MAPPINGS, ModuleMapping(("head",), "embed_out")),
    in_memory_mappings=(*_MAPPINGS, ModuleMapping(("head",), "lm_head")),
    ignored_tensors=("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq"),
    keys={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
        "norm_epsilon": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "init_method_std": "initializer_range",
    },
    activation_key="hidden_act",
    defaults={
        "intermediate_size": 24576,
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
    },
    aliases={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    fixed={
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "qk_layernorm": False,
        "apply_layernorm_1p": False,
        "scale_embeddings": False,
    },
    single_values={"attention_bias": True},
    activations=GPT2.activations,
    heads_divide_width=True,
    read_more=_read_more,
    write_more=_write_more,
    more_settings=("residual_branches",),
    unsupported_choices={"residual_branches": ("parallel_shared_norm",)},
)
