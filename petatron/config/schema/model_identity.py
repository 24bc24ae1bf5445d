"""Which settings of a model define the function of its weights, and which are a run's choice.

A checkpoint, a config.json and a resumed run must agree on the first; the others may differ.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from petatron.config.schema.model import ModelConfig, MoEConfig

# How a run shards or computes the model.
RUNTIME_FIELDS = frozenset(
    {
        "seq_length",
        "make_vocab_size_divisible_by",
        "moe_grouped_gemm",
        "moe_token_dispatcher_type",
        "moe_pad_expert_input_to_capacity",
        "moe_router_force_load_balancing",
        "moe_shared_expert_overlap",
    }
)
# What matters only in training, or limits positions.
TRAINING_ONLY_FIELDS = frozenset(
    {
        "max_position_embeddings",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "embedding_init_method_std",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_input_jitter_eps",
    }
)
# Redundant with other settings.
REDUNDANT_FIELDS = frozenset({"group_query_attention", "moe_layer_freq"})


def is_identity_field(name: str) -> bool:
    """Whether models that differ in this setting are different models.

    >>> is_identity_field("rotary_base"), is_identity_field("hidden_dropout")
    (True, False)
    """
    return name not in RUNTIME_FIELDS and name not in TRAINING_ONLY_FIELDS


def model_identity(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    """Returns the settings that define the function of a model's weights, as stored in a checkpoint.

    A dense model has no expert settings, and a decoder no type, so that checkpoints from before there were others still match.
    """
    experts = asdict(moe) if moe is not None and moe.num_experts is not None else {}
    identity = {name: value for name, value in (asdict(model) | experts).items() if is_identity_field(name)}
    if identity["model_type"] == "decoder":
        del identity["model_type"]
    return identity
