"""Megatron's arguments of latent attention, multi-token prediction and hybrids, to our settings and back; those of BERT to ours.

Latent attention rotates by `rope_type`, whatever `position_embedding_type` says, and uses YaRN if neither is set; YaRN with a
factor of 1 is plain rope. Arguments that a checkpoint lacks have the defaults of Megatron's own config.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.megatron.weight_names import (
    MASKED_HEAD_WEIGHT,
    ORDER_HEAD_WEIGHT,
    OUTPUT_BIAS,
    SEGMENTS_WEIGHT,
)
from petatron.config.schema.fields import flag_name
from petatron.config.schema.hybrid_mtp_pattern import depth_problems, split_depths
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.hybrid import (
    ATTENTION,
    DELTA,
    EXPERTS,
    PARALLEL,
    PREDICTION_DEPTH,
    STAGE_BOUNDARY,
    all_symbols,
    allocate_layers,
)
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.sparse_attention import (
    SPARSE_ATTENTION,
    SPARSE_ATTENTION_FIELDS,
    has_sparse_attention,
)

_FIX = "Such a checkpoint cannot be converted."
_LATENT_DEFAULTS: Mapping[str, int | None] = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
# Ours, Megatron's, and its default.
_YARN = (
    ("rope_scaling_factor", "rotary_scaling_factor", 1.0),
    ("yarn_mscale", "mscale", 1.0),
    ("yarn_mscale_all_dim", "mscale_all_dim", 0.0),
    ("original_max_position_embeddings", "original_max_position_embeddings", 4096),
    ("yarn_beta_fast", "beta_fast", 32),
    ("yarn_beta_slow", "beta_slow", 1),
)
_MAMBA_FIELDS = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups")
_UNNAMED = {DELTA: "gated delta nets", PARALLEL: "attention and Mamba-2 in parallel"}
"""Kinds of layers whose weights have no names in our maps of Megatron's."""


def latent_attention_values(arguments: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Returns ModelConfig values of latent attention; empty where a model has other attention."""
    if not arguments.get("multi_latent_attention"):
        return {}
    sizes = {name: arguments.get(name, default) for name, default in _LATENT_DEFAULTS.items()}
    values: dict[str, Any] = {"multi_latent_attention": True, **sizes}
    if all(is_count(sizes[name], 1) for name in ("qk_head_dim", "qk_pos_emb_head_dim")):
        values["kv_channels"] = sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]
    values["learned_position_table"] = (
        arguments.get("position_embedding_type") == "learned_absolute"
        and arguments.get("add_position_embedding", True) is not False
    )
    yarn = {ours: arguments.get(theirs, default) for ours, theirs, default in _YARN}
    scaled = yarn["rope_scaling_factor"] != 1
    if scaled and arguments.get("rope_type") == "rope" and yarn["yarn_mscale_all_dim"]:
        rule = "scales scores by --mscale-all-dim, but no positions, with --rope-type rope"
        problems.append(Problem("--rotary-scaling-factor", f"{yarn['rope_scaling_factor']}"[:40], rule, _FIX))
    if not scaled or arguments.get("rope_type") == "rope":
        return {**values, "position_embedding_type": "rope"}
    return {**values, "position_embedding_type": "yarn", **yarn}


def latent_attention_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns Megatron's arguments of latent attention."""
    if not model.multi_latent_attention:
        return {}
    yarn = model.position_embedding_type == "yarn"
    scaling = {theirs: getattr(model, ours) if yarn else default for ours, theirs, default in _YARN}
    sizes = {name: getattr(model, name) for name in _LATENT_DEFAULTS}
    kinds = {
        "position_embedding_type": "learned_absolute" if model.learned_position_table else "rope",
        "add_position_embedding": model.learned_position_table,
        "use_rotary_position_embeddings": not model.learned_position_table,
        "rope_type": model.position_embedding_type,
    }
    return {"multi_latent_attention": True, **sizes, **scaling, **kinds}


def sparse_attention_values(arguments: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Returns ModelConfig values of sparse attention, attention dropout 0 included; empty for other attention.

    Versions without an argument for the indexer's rotary pairs rotate the last channels of its heads, and later ones the first.
    """
    if arguments.get("experimental_attention_variant") != SPARSE_ATTENTION:
        return {}
    pairs = "dsa_indexer_rope_interleaved"
    if pairs not in arguments:
        rule = (
            "is not in the checkpoint's arguments: it is of a version whose indexer rotates the last channels of a head"
        )
        problems.append(Problem(flag_name(pairs), "", rule, "Save it with a later version of Megatron."))
    if arguments.get("dsa_indexer_topk_freq") not in (None, 0, 1):
        rule = "lets layers share the choice of one indexer, and every layer has one here"
        problems.append(Problem("--dsa-indexer-topk-freq", f"{arguments['dsa_indexer_topk_freq']}"[:40], rule, _FIX))
    values = {name: arguments[name] for name in SPARSE_ATTENTION_FIELDS if arguments.get(name) is not None}
    return {"experimental_attention_variant": SPARSE_ATTENTION, "attention_dropout": 0.0, **values}


def sparse_attention_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns Megatron's arguments of sparse attention."""
    if not has_sparse_attention(model):
        return {}
    values = {name: getattr(model, name) for name in SPARSE_ATTENTION_FIELDS}
    return {"experimental_attention_variant": SPARSE_ATTENTION, **values}


def prediction_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ModelConfig values of multi-token prediction."""
    depths = arguments.get("mtp_num_layers")
    if not depths:
        return {}
    factor = arguments.get("mtp_loss_scaling_factor")
    repeated = bool(arguments.get("mtp_use_repeated_layer"))
    weight = 0.1 if factor is None else factor
    return {"mtp_num_layers": depths, "mtp_loss_scaling_factor": weight, "mtp_use_repeated_layer": repeated}


def prediction_arguments(model: ModelConfig) -> dict[str, Any]:
    depths = model.mtp_num_layers or None
    if depths is None:
        return {"mtp_num_layers": None, "mtp_loss_scaling_factor": None}
    repeated = {"mtp_use_repeated_layer": True} if model.mtp_use_repeated_layer else {}
    return {"mtp_num_layers": depths, "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor, **repeated}


def hybrid_values(arguments: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Returns ModelConfig values of a hybrid; empty where every layer has attention and a channel mixer."""
    pattern = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern")
    if pattern is None and arguments.get("is_hybrid_model"):
        ratios = (arguments.get("hybrid_attention_ratio") or 0.0, arguments.get("hybrid_mlp_ratio") or 0.0)
        if all(isinstance(ratio, int | float) and 0 <= ratio <= 1 for ratio in ratios):
            pattern = allocate_layers(arguments["num_layers"], *ratios)
    if pattern is None:
        if arguments.get("is_hybrid_model"):
            problems.append(Problem("--hybrid-layer-pattern", "", "is not in the checkpoint's arguments", _FIX))
        return {}
    problems += depth_problems("--hybrid-layer-pattern", str(pattern))
    main, depths = parts = split_depths(str(pattern))
    pattern = main.replace(STAGE_BOUNDARY, "")
    in_depth = parts.layers or arguments.get("mtp_hybrid_override_pattern")
    problems += unnamed_layers(pattern + str(in_depth or ""))
    predicted = {"mtp_num_layers": len(depths)} if depths else {}
    predicted |= {"mtp_hybrid_override_pattern": in_depth} if depths or arguments.get("mtp_num_layers") else {}
    sizes = {name: arguments[name] for name in _MAMBA_FIELDS if arguments.get(name) is not None}
    head_dim, groups = sizes.get("mamba_head_dim", 64), sizes.get("mamba_num_groups", 8)
    derived = 2 * arguments["hidden_size"] // head_dim if is_count(head_dim, 1) else None
    return {
        "hybrid_layer_pattern": pattern,
        "num_layers": len(pattern),
        "is_hybrid_model": True,
        **predicted,
        **sizes,
        "mamba_num_heads": arguments.get("mamba_num_heads") or derived,
        "mamba_norm_groups": groups,
    }


def hybrid_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns Megatron's arguments of a hybrid, the pattern in its old and its new spelling."""
    if model.hybrid_layer_pattern is None:
        return {}
    depths = [model.mtp_hybrid_override_pattern or ""] * (model.mtp_num_layers or 0)
    pattern = PREDICTION_DEPTH.join([model.hybrid_layer_pattern, *depths])
    sizes = {name: getattr(model, name) for name in (*_MAMBA_FIELDS, "mamba_num_heads")}
    return {"is_hybrid_model": True, "hybrid_layer_pattern": pattern, "hybrid_override_pattern": pattern, **sizes}


def unnamed_layers(pattern: str | None) -> list[Problem]:
    """Returns the problem of layers whose weights have no names in our maps of Megatron's."""
    unnamed = [kind for letter, kind in _UNNAMED.items() if letter in (pattern or "")]
    if not unnamed:
        return []
    rule = f"has {' and '.join(unnamed)}, whose weights the Megatron converter has no names for"
    return [
        Problem("--hybrid-layer-pattern", f"{pattern}"[:80], rule, "Such a model is saved in Petatron's own names.")
    ]


def unsupported_kinds(model: ModelConfig) -> list[Problem]:
    """Returns the settings of these kinds that Megatron has no argument for."""
    problems = unnamed_layers(all_symbols(model))
    if model.model_type != "decoder":
        rule = "is read from Megatron's files, if at all, and not written to them"
        problems.append(Problem("--model-type", model.model_type, rule, "Save it as a Hugging Face folder."))
    if model.multi_latent_attention and model.position_embedding_type not in ("rope", "yarn"):
        rule = "has no argument in Megatron, where latent attention is always rotary"
        problems.append(Problem("--position-embedding-type", model.position_embedding_type, rule, _FIX))
    if model.multi_latent_attention and not model.yarn_correction_range_round_to_int:
        rule = "has no argument in Megatron for latent attention"
        problems.append(Problem("--no-yarn-correction-range-round-to-int", "", rule, _FIX))
    if model.hybrid_layer_pattern is not None and model.mamba_norm_groups != model.mamba_num_groups:
        rule = f"is not --mamba-num-groups {model.mamba_num_groups}, as always in Megatron"
        problems.append(Problem("--mamba-norm-groups", str(model.mamba_norm_groups), rule, _FIX))
    return problems


def masked_language_values(names: Collection[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ModelConfig values that tell a BERT, whose weights have these names; empty for a decoder.

    Arguments do not tell it: those of BERT have their defaults in every run. The activation before its output head is the exact GELU.
    """
    if MASKED_HEAD_WEIGHT not in names:
        return {}
    return {
        "model_type": MASKED_LANGUAGE_MODEL,
        "bert_binary_head": ORDER_HEAD_WEIGHT in names,
        "num_token_types": 2 if SEGMENTS_WEIGHT in names else 0,
        "prediction_activation": "gelu_tanh" if arguments.get("openai_gelu") else "gelu",
        "prediction_bias": OUTPUT_BIAS in names,
    }


def has_attention(model: ModelConfig) -> bool:
    """Whether some layer is attention."""
    return model.hybrid_layer_pattern is None or ATTENTION in all_symbols(model)


def moe_layer_freq(model: Mapping[str, Any], moe: Mapping[str, Any]) -> str:
    """Returns which layers have experts, of a hybrid by its layer pattern."""
    pattern = model.get("hybrid_layer_pattern")
    return moe["moe_layer_freq"] if pattern is None else str([int(letter == EXPERTS) for letter in pattern])
