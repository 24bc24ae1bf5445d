"""Tiny models by the names of Megatron-Core: what its config and its GPTModel take, and the arguments that a run would store with them."""

from __future__ import annotations

from typing import Any

VOCAB, PADDED, POSITIONS = 60, 64, 16
TRAINING: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 2e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 30,
    "lr_warmup_iters": 2,
    "lr_warmup_init": 0.0,
    "weight_decay": 0.1,
    "start_weight_decay": 0.1,
    "end_weight_decay": 0.1,
    "weight_decay_incr_style": "constant",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "train_iters": 30,
    "train_samples": None,
    "seed": 1234,
}
"""The part of the arguments that says how a run trains."""
_LLAMA = {"num_query_groups": 2, "gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False}
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "allgather",
    "moe_ffn_hidden_size": 24,
}
_LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "rope_type": "rope",
    "rotary_scaling_factor": 1.0,
    "original_max_position_embeddings": POSITIONS,
}
_INDEXER = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 8,  # with few, all may score nothing: of equal scores its `topk` takes any
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 5,
    "dsa_indexer_loss_coeff": 0.3,
}
BERTS = {"bert": True, "bert alone": False}
"""Whether they have segments, and a head for their order."""
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"normalization": "LayerNorm", "add_bias_linear": True},
    "bert": {"normalization": "LayerNorm", "add_bias_linear": True},
    "bert alone": {"normalization": "LayerNorm", "add_bias_linear": True},
    "llama": _LLAMA,
    "qk-norm": {**_LLAMA, "qk_layernorm": True},
    "moe": {**_LLAMA, **_EXPERTS},
    "mla": {key: value for key, value in {**_LLAMA, **_LATENT}.items() if key != "num_query_groups"},
    "dsa": {key: value for key, value in {**_LLAMA, **_LATENT, **_INDEXER}.items() if key != "num_query_groups"},
    "dsa sparse loss": {
        **{key: value for key, value in {**_LLAMA, **_LATENT, **_INDEXER}.items() if key != "num_query_groups"},
        "dsa_indexer_use_sparse_loss": True,
    },
    "yarn": {
        **{key: value for key, value in {**_LLAMA, **_LATENT}.items() if key != "num_query_groups"},
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 4,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
}


def layer_settings(kind: str, *, layers: int = 4, width: int = 32) -> dict[str, Any]:
    """Returns the values of TransformerConfig."""
    sizes = {"num_layers": layers, "hidden_size": width, "num_attention_heads": 4, "ffn_hidden_size": 3 * width // 2}
    return {**sizes, "layernorm_epsilon": 1e-5, **KINDS[kind]}


def model_settings(kind: str) -> dict[str, Any]:
    """Returns the values of GPTModel."""
    learned = kind in ("gpt", *BERTS)
    return {
        "vocab_size": PADDED,
        "max_sequence_length": POSITIONS,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "share_embeddings_and_output_weights": learned,
        "rotary_percent": 1.0,
        "rotary_base": 10000,
    }


def arguments(kind: str, tp: int, pp: int, ep: int, **sizes: int) -> dict[str, Any]:
    """Returns the model's part of a run's arguments, under the names of Megatron's command line."""
    layer, model = layer_settings(kind, **sizes), model_settings(kind)
    groups = layer.get("num_query_groups")
    same = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "normalization", "add_bias_linear")
    kept = {name: layer[name] for name in (*same, "layernorm_epsilon")}
    own = ("moe_", "mscale", "dsa_", "experimental_")
    kept |= {name: value for name, value in layer.items() if name in _LATENT or name.startswith(own)}
    if "dsa_indexer_topk" in kept:  # an argument of later versions
        kept["dsa_indexer_rope_interleaved"] = True
    return {
        **kept,
        "norm_epsilon": 1e-5,
        "kv_channels": layer["hidden_size"] // 4,
        "group_query_attention": groups is not None,
        "num_query_groups": groups or 1,
        "num_experts": layer.get("num_moe_experts"),
        "swiglu": bool(layer.get("gated_linear_unit")),
        "qk_layernorm": bool(layer.get("qk_layernorm")),
        "position_embedding_type": model["position_embedding_type"],
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "untie_embeddings_and_output_weights": not model["share_embeddings_and_output_weights"],
        "seq_length": POSITIONS,
        "max_position_embeddings": POSITIONS,
        "bias_gelu_fusion": False,
        "vocab_size": VOCAB,
        "padded_vocab_size": PADDED,
        "make_vocab_size_divisible_by": 16,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "tokenizer_type": "HuggingFaceTokenizer",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.02,
        "transformer_impl": "local",
        "consumed_train_samples": 80,
        "iteration": 10,
    }
