"""Tables of other spellings of fields and their values: short forms, and Megatron's names.

`parse_command_line.py` and `config/yaml_file.py` read these tables to parse, `reference_page.py` to document. What becomes of every flag of
Megatron's, also of those that are no spelling of a field, is in `megatron_table.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from petatron.config.flags.flag_names_of_other_trainers import SAVED_FORMAT, ZARR_FORMAT
from petatron.config.schema.fields import FieldValue


@dataclass(frozen=True, slots=True)
class Shorthand:
    """A flag without a value that sets `field` to `value`; one that `is_overridable` yields to the field's own flag.

    `also` are other fields that it sets.
    """

    field: str
    value: FieldValue
    is_overridable: bool = False
    also: tuple[tuple[str, FieldValue], ...] = ()


# Another name of a field: same type, same value.
ALIASES: Mapping[str, str] = {
    "--tp": "tensor_model_parallel_size",
    "--pp": "pipeline_model_parallel_size",
    "--cp": "context_parallel_size",
    "--ep": "expert_model_parallel_size",
    "--etp": "expert_tensor_parallel_size",
    "--dp": "data_parallel_size",
    "--sp": "sequence_parallel",
    "--rollout-tp": "rollout_tensor_model_parallel_size",
    "--rollout-pp": "rollout_pipeline_model_parallel_size",
    "--rollout-ep": "rollout_expert_model_parallel_size",
    "--import": "imports",
    "--dataset-kind": "dataset_type",
    "--cpu-optimizer": "optimizer_cpu_offload",
    "--optimizer-nvme-path": "optimizer_nvme_offload",
    "--dataloader-inter-document-masking": "reset_attention_mask",
    "--encoder-seq-length": "seq_length",
    "--export-moe-apply-probs-on-input": "moe_apply_probs_on_input",
    "--export-qk-l2-norm": "qk_l2_norm",
    "--freeze-LM": "freeze_language_model",
    "--freeze-ViT": "freeze_vision_encoder",
    "--hybrid-override-pattern": "hybrid_layer_pattern",
    "--img-h": "vision_image_size",
    "--img-w": "vision_image_size",
    "--layernorm-epsilon": "norm_epsilon",
    "--mscale": "yarn_mscale",
    "--mscale-all-dim": "yarn_mscale_all_dim",
    "--muon-use-nesterov": "muon_nesterov",
    "--patch-dim": "vision_patch_size",
    "--persistent-save-interval": "save_interval",
    "--pytorch-profiler-collect-shapes": "record_shapes",
    "--rope-theta": "rotary_base",
    "--s3-cache-path": "object_storage_cache_path",
    "--tiktoken-special-tokens": "tokenizer_special_tokens",
    "--rotary-scaling-factor": "rope_scaling_factor",
    "--yarn-original-max-position-embeddings": "original_max_position_embeddings",
    "--yarn-rotary-scaling-factor": "rope_scaling_factor",
}

SHORTHANDS: Mapping[str, Shorthand] = {
    "--swiglu": Shorthand("activation", "swiglu"),
    "--geglu": Shorthand("activation", "geglu"),
    "--quick-geglu": Shorthand("activation", "quick_geglu"),
    "--reglu": Shorthand("activation", "reglu"),
    "--squared-relu": Shorthand("activation", "squared_relu"),
    "--openai-gelu": Shorthand("activation", "gelu_tanh"),
    "--bert-no-binary-head": Shorthand("bert_binary_head", False),
    "--disable-vision-class-token": Shorthand("vision_class_token", False),
    "--muon-no-split-qkv": Shorthand("muon_split_qkv", False),
    "--disable-bias-linear": Shorthand("add_bias_linear", False),
    "--use-rotary-position-embeddings": Shorthand("position_embedding_type", "rope"),
    "--apply-residual-connection-post-layernorm": Shorthand("norm_placement", "stream"),
    "--fp8-hybrid": Shorthand("fp8_format", "hybrid"),
    "--enable-cuda-graph": Shorthand("cuda_graphs", "auto"),
    "--external-cuda-graph": Shorthand("cuda_graphs", "auto"),
    "--fake-process-group": Shorthand("distributed_backend", "fake"),
    "--disable-dsa-indexer-rotate-activation": Shorthand("dsa_indexer_rotate_activation", False),
    "--disable-dsa-indexer-scoring-relu": Shorthand("dsa_indexer_scoring_relu", False),
    "--disable-manual-gc-eval": Shorthand("manual_gc_eval", False),
    "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces": Shorthand(
        "tokenizer_sentencepiece_ignore_extra_whitespaces", False
    ),
    "--disable-use-tokenizer-model-from-checkpoint-args": Shorthand("use_tokenizer_model_from_checkpoint_args", False),
    "--recompute-activations": Shorthand("recompute_granularity", "selective"),
    "--moe-layer-recompute": Shorthand(
        "recompute_granularity", "selective", also=(("recompute_modules", ("core_attn", "moe")),)
    ),
    # Megatron's switches for FSDP; the strategy decides how much is sharded when that is given too.
    "--use-torch-fsdp2": Shorthand("data_parallel_sharding_strategy", "optim_grads_params", is_overridable=True),
    "--use-megatron-fsdp": Shorthand("data_parallel_sharding_strategy", "optim_grads_params", is_overridable=True),
    "--use-megatron-fsdp-v2": Shorthand("data_parallel_sharding_strategy", "optim_grads_params", is_overridable=True),
    "--use-custom-fsdp": Shorthand("data_parallel_sharding_strategy", "optim_grads_params", is_overridable=True),
}

# A flag whose every value maps to one of a field's.
CHOICE_FLAGS: Mapping[str, Mapping[str, Shorthand]] = {
    "--no-weight-decay-cond-type": {
        "qwen3_next": Shorthand("apply_wd_to_qk_layernorm", True),
        "apply_wd_to_qk_layernorm": Shorthand("apply_wd_to_qk_layernorm", True),
    },
    "--megatron-fsdp-grad-comm-dtype": {
        "bf16": Shorthand("grad_reduce_in_bf16", True),
        **dict.fromkeys(("fp32", "auto"), Shorthand("grad_reduce_in_bf16", False)),
    },
    "--megatron-fsdp-main-grads-dtype": {
        "bf16": Shorthand("main_grads_dtype", "bf16"),
        **dict.fromkeys(("fp32", "auto"), Shorthand("main_grads_dtype", "fp32")),
    },
    "--cuda-graph-impl": {
        "none": Shorthand("cuda_graphs", "off"),
        "local": Shorthand("cuda_graphs", "auto"),
        "transformer_engine": Shorthand("cuda_graphs", "auto"),
        "full_iteration": Shorthand("cuda_graphs", "auto"),
    },
}

# Megatron's window is the tokens before and after a token: 127,0 are 128 with itself.
_WINDOW_PAIR = re.compile(r"\(?(\d{1,9}),0\)?")


@dataclass(frozen=True, slots=True)
class OtherValue:
    """A value of Megatron's that is one of ours, and why that is the same; `also` are other fields that it sets."""

    value: str
    reason: str
    also: tuple[tuple[str, FieldValue], ...] = ()


_ONE_FORMAT = (
    "a run saves petatron; --save-megatron FOLDER writes Megatron's torch_dist files beside it, and `petatron checkpoint convert SOURCE "
    "TARGET --to megatron` its other formats"
)
# Values of our own fields that Megatron spells otherwise: field -> value.
OTHER_VALUES: Mapping[str, Mapping[str, OtherValue]] = {
    "tokenizer_type": {
        "SFTTokenizer": OtherValue(
            "HuggingFaceTokenizer",
            "conversations are written as --sft-tokenizer-prompt-format says, by default nemotron-h-aligned as there",
        )
    },
    "distributed_backend": {"nccl2": OtherValue("nccl", "there is one NCCL backend")},
    "optimizer": {
        "dist_muon": OtherValue(
            "muon",
            "--use-distributed-optimizer, which it sets too, shards its state; the updates are the same",
            also=(("use_distributed_optimizer", True),),
        ),
    },
    "ckpt_format": dict.fromkeys(
        ("torch_dist", "torch_dcp", "torch", "fsdp_dtensor"), OtherValue("petatron", _ONE_FORMAT)
    ),
    "recompute_modules": {
        "mla_up_proj": OtherValue(
            "attention", "the up-projections are recomputed with all of attention; no number changes"
        )
    },
    "offload_modules": dict.fromkeys(
        ("group_mlp", "fused_group_mlp"),
        OtherValue(
            "experts", "what the experts' first GEMM and their activation save is offloaded, as one group or as two"
        ),
    ),
    "moe_token_dispatcher_type": {
        "flex": OtherValue("alltoall", "alltoall dispatches the same tokens to the same experts")
    },
}


def own_value(field: str, text: str) -> OtherValue | None:
    """Returns a flag's value in our spelling, if that is another one.

    >>> own_value("window_size", "127,0").value, own_value("window_size", "128")
    ('128', None)
    """
    if field == "window_size" and (pair := _WINDOW_PAIR.fullmatch(text)) is not None:
        return OtherValue(str(int(pair[1]) + 1), "")
    return OTHER_VALUES.get(field, {}).get(text)


MEGATRON_DEFAULTS_FLAG = "--megatron-defaults"
MEGATRON_DEFAULTS: Mapping[str, FieldValue] = {"fp8_recipe": "delayed", "muon_momentum": 0.9}
"""Defaults of Megatron's that change numbers where ours differ, by field. Its scripts and those of its names use them."""

ROPE_TYPE = "--rope-type"
"""How latent attention rotates, whatever --position-embedding-type says; YaRN where it is not given."""
ROPE_TYPES = ("rope", "yarn")
LATENT_ORIGINAL_CONTEXT = 4096
"""The context before extension that Megatron's latent attention has, where no flag says one."""

NO_GELU_FUSION = "--no-bias-gelu-fusion"
"""Leaves Megatron's default activation the exact gelu: its fused kernel is the approximation with tanh."""

# Megatron deprecated this one: it has an effect only when another flag has already removed the learned table.
NO_POSITION_EMBEDDING = "--no-position-embedding"

# Values of our own fields that Megatron has and this version has not: field -> value -> its name in the message.
UNSUPPORTED_VALUES: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "adaptive_muon": "the adaptive Muon optimizer",
    },
    "muon_coefficient_type": {"aol": "AOL preconditioning of Muon"},
    "muon_fp32_matmul_prec": {"low": "Newton-Schulz steps below bf16"},
    "muon_tp_mode": {
        "blockwise": "Newton-Schulz steps on the shards of tensor-parallel ranks, whose result depends on their number,",
        "distributed": "Newton-Schulz steps sharded over tensor-parallel ranks",
    },
    "ckpt_format": {
        **dict.fromkeys(("torch_dist", "torch_dcp", "torch", "fsdp_dtensor", "huggingface", "megatron"), SAVED_FORMAT),
        "zarr": ZARR_FORMAT,
    },
    "position_embedding_type": {"mrope": "multimodal models"},
    "moe_router_load_balancing_type": {"quantile_balancing": "quantile balancing"},
    "fp8_recipe": {"custom": "custom FP8 recipes"},
    "offload_modules": {"gdp_qkv": "gated delta products"},
    "tokenizer_type": {
        "NullMultimodalTokenizer": "multimodal models",
    },
}

# A key of a YAML file that is easily mistaken for a section -> the section's name.
FORMER_SECTIONS: Mapping[str, str] = {"latent": "model"}
"""Sections that files of earlier versions have, and the one that has their fields now."""
SECTION_ALIASES: Mapping[str, str] = {"optimizer": "optim"}
