"""Tables of flag spellings beyond the schema's own: short forms, Megatron's other names, and what is refused and why.

`parse.py` and `config/yaml_file.py` read these tables to parse, `reference_page.py` to document. A flag of
Megatron's is in exactly one table, or is a field of the schema, or is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from petatron.config.flags.foreign_names import CONVERSATIONS, REINFORCEMENT, SAVED_FORMAT, ZARR_FORMAT, by_flag
from petatron.config.schema.fields import FieldValue


@dataclass(frozen=True, slots=True)
class Shorthand:
    """A flag without a value that sets `field` to `value`; one that `is_overridable` yields to the field's own flag."""

    field: str
    value: FieldValue
    is_overridable: bool = False


@dataclass(frozen=True, slots=True)
class NoOpFlag:
    """A flag that is accepted and changes nothing, because it is always on; `takes_value` if it has a value."""

    reason: str
    takes_value: bool = False


# Another name of a field: same type, same value.
ALIASES: Mapping[str, str] = {
    "--tp": "tensor_model_parallel_size",
    "--pp": "pipeline_model_parallel_size",
    "--cp": "context_parallel_size",
    "--ep": "expert_model_parallel_size",
    "--etp": "expert_tensor_parallel_size",
    "--dp": "data_parallel_size",
    "--sp": "sequence_parallel",
    "--import": "imports",
    "--dataset-kind": "dataset_type",
    "--cpu-optimizer": "optimizer_cpu_offload",
    "--optimizer-nvme-path": "optimizer_nvme_offload",
    "--dataloader-inter-document-masking": "reset_attention_mask",
    "--hybrid-override-pattern": "hybrid_layer_pattern",
    "--layernorm-epsilon": "norm_epsilon",
    "--mscale": "yarn_mscale",
    "--mscale-all-dim": "yarn_mscale_all_dim",
    "--muon-use-nesterov": "muon_nesterov",
    "--persistent-save-interval": "save_interval",
    "--rope-theta": "rotary_base",
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
    "--muon-no-split-qkv": Shorthand("muon_split_qkv", False),
    "--disable-bias-linear": Shorthand("add_bias_linear", False),
    "--use-rotary-position-embeddings": Shorthand("position_embedding_type", "rope"),
    "--apply-residual-connection-post-layernorm": Shorthand("norm_placement", "stream"),
    "--fp8-hybrid": Shorthand("fp8_format", "hybrid"),
    "--enable-cuda-graph": Shorthand("cuda_graphs", "on"),
    "--recompute-activations": Shorthand("recompute_granularity", "selective"),
    # Megatron's switches for FSDP; the strategy decides how much is sharded when that is given too.
    "--use-torch-fsdp2": Shorthand("data_parallel_sharding_strategy", "optim_grads_params", is_overridable=True),
    "--use-megatron-fsdp": Shorthand("data_parallel_sharding_strategy", "optim_grads_params", is_overridable=True),
    "--use-custom-fsdp": Shorthand("data_parallel_sharding_strategy", "optim_grads_params", is_overridable=True),
}

# A flag whose every value maps to one of a field's.
CHOICE_FLAGS: Mapping[str, Mapping[str, Shorthand]] = {
    "--cuda-graph-impl": {
        "none": Shorthand("cuda_graphs", "off"),
        "local": Shorthand("cuda_graphs", "on"),
        "full_iteration": Shorthand("cuda_graphs", "on"),
    },
}

# Megatron's window is the tokens before and after a token: 127,0 are 128 with itself.
_WINDOW_PAIR = re.compile(r"\(?(\d{1,9}),0\)?")


def own_value_text(field: str, text: str) -> str:
    """Returns a flag's value in our spelling.

    >>> own_value_text("window_size", "127,0"), own_value_text("window_size", "128")
    ('128', '128')
    """
    pair = _WINDOW_PAIR.fullmatch(text) if field == "window_size" else None
    return text if pair is None else str(int(pair[1]) + 1)


# Megatron deprecated this one: it has an effect only when another flag has already removed the learned table.
NO_POSITION_EMBEDDING = "--no-position-embedding"

_FUSED = "kernels are not chosen by flags; results are the same"
_ATTENTION = "attention always uses the fastest kernel the device offers"
_MODEL = "there is one model implementation"
_NO_OPS: Mapping[str, str] = {
    _MODEL: "--use-mcore-models",
    _ATTENTION: "--use-flash-attn",
    _FUSED: (
        "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
        "--no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm "
        "--cross-entropy-loss-fusion --moe-permute-fusion --moe-router-fusion --moe-use-legacy-grouped-gemm"
    ),
    "the attention softmax is always computed in fp32": "--attention-softmax-in-fp32",
    "gradients are always accumulated in fp32, and reduced in it unless --grad-reduce-in-bf16 is given": (
        "--accumulate-allreduce-grads-in-fp32"
    ),
    "the loss is always one mean over the tokens of the global batch": "--calculate-per-token-loss",
    "initial weights never depend on the layout or the device": "--use-cpu-initialization",
    "a rank only ever makes the weights it holds": "--init-model-with-meta-device",
    "transfers between pipeline stages always overlap with computing": (
        "--overlap-p2p-communication --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush"
    ),
    "the load of every MoE layer is always logged": "--moe-per-layer-logging",
    "the loader never builds a dense attention mask": "--no-create-attention-mask-in-dataloader",
    "SIGTERM and SIGINT always save and exit": "--exit-signal-handler",
    "there is one checkpoint format": "--auto-detect-ckpt-format --use-dist-ckpt",
    "all ranks always share the writing": "--no-ckpt-fully-parallel-save",
    "ranks always read only what they need": "--ckpt-fully-parallel-load",
    "saving needs no plan that could be kept": "--ckpt-assume-constant-structure",
    "--async-save needs no other process": "--use-persistent-ckpt-worker",
    "formats of optimizer state need no other optimizer": "--use-precision-aware-optimizer",
    "copies in both directions and updates always overlap": "--overlap-cpu-optimizer-d2h-h2d",
    "every logged value goes to every metric writer": (
        "--log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard --log-learning-rate-to-tensorboard"
    ),
    "--profile always uses PyTorch's profiler": "--use-pytorch-profiler",
}
_NO_OPS_WITH_VALUE: Mapping[str, str] = {
    _MODEL: "--transformer-impl",
    _ATTENTION: "--attention-backend",
    _FUSED: "--cross-entropy-fusion-impl",
    "tensor-parallel overlap has no buffers of its own to set up": "--tp-comm-bootstrap-backend",
    "everything must fit, always": "--dist-ckpt-strictness",
    "the optimizer is the one named by --optimizer": "--cpu-optimizer-type",
    "the rank is read from the launcher's environment": "--local-rank",
}
NO_OP_FLAGS: Mapping[str, NoOpFlag] = {
    **{flag: NoOpFlag(reason) for flag, reason in by_flag(_NO_OPS).items()},
    **{flag: NoOpFlag(reason, takes_value=True) for flag, reason in by_flag(_NO_OPS_WITH_VALUE).items()},
}

# Names Megatron itself dropped, or that mean one of ours: refused with what to write instead.
RENAMED_FLAGS: Mapping[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--encoder-seq-length": "--seq-length",
    "--tensorboard-log-interval": "--log-interval",
    "--step-batch-size-schedule": "--rampup-batch-size START INCREMENT SAMPLES",
    "--dist-ckpt-format": "--ckpt-format",
    "--lr-decay-tokens": "--lr-decay-samples",
    "--train-tokens": "--train-samples",
    "--gpus-per-node": "--nproc-per-node",
    "--moe-extended-tp": "--expert-tensor-parallel-size",
    "--torch-fsdp2-no-reshard-after-forward": "--data-parallel-sharding-strategy optim_grads",
}

OTHER_COMMAND_FLAGS: Mapping[str, str] = by_flag(
    {
        "petatron data preprocess": "--input --output-prefix --json-keys --append-eod --workers",
        "python tasks/main.py": "--task --valid-data",
        "petatron eval": "--strict-lambada",
        "petatron serve": "--port",
        "petatron generate": "--temperature --top-k --top-p",
    }
)
"""Flags of another subcommand."""

_BERT, _VISION = "BERT", "multimodal models"

# Features that Megatron has and this version has not. The value is the feature's name in the message.
UNSUPPORTED_FLAGS: Mapping[str, str] = by_flag(
    {
        "CUDA graphs of single modules (--cuda-graphs records a whole step)": (
            "--cuda-graph-scope --cuda-graph-modules --external-cuda-graph"
        ),
        "tensor-parallel overlap tuned by a file (--tp-comm-overlap-chunks is for all linears)": (
            "--tp-comm-overlap-cfg"
        ),
        "tensor-parallel overlap by part (--tp-comm-overlap is for all linears, and the backward pass always overlaps)": (
            "--disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --disable-tp-comm-split-ag "
            "--disable-tp-comm-split-rs --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad "
            "--tp-comm-overlap-rs-dgrad"
        ),
        "another rank order": "--use-tp-pp-dp-mapping",
        "deferred gradients of the output head": "--defer-embedding-wgrad-compute",
        "a context-parallel size per sample": "--hybrid-context-parallel",
        "sharding over the copies of sharded state": "--outer-dp-sharding-strategy",
        "this option of mixture of experts": (
            "--delay-wgrad-compute --moe-use-upcycling --moe-flex-dispatcher-backend --moe-enable-deepep "
            "--disable-moe-token-dispatch"
        ),
        "a model spec from a module": "--spec",
        _BERT: "--bert-no-binary-head --mask-prob --short-seq-prob",
        "encoder-decoder models (T5)": (
            "--encoder-num-layers --decoder-num-layers --decoder-seq-length --vocab-extra-ids"
        ),
        _VISION: "--img-h --img-w --patch-dim --num-classes --language-model-type --vision-model-type --mrope-section",
        "an fp32 residual stream": "--fp32-residual-connection",
        "this attention variant": "--apply-query-key-layer-scaling",
        "layers of different shapes": "--heterogeneous-layers-config-path",
        "muP": "--use-mup --mup-base-hidden-size",
        "Xavier initialization": "--init-method-xavier-uniform",
        "different initial weights per replica": "--data-parallel-random-init",
        "lazy initialization": "--lazy-mpu-init",
        "this option of FP8 training": "--fp8-margin --fp8-interval --no-fp8-wgrad",
        "FP4 training": "--fp4-format --fp4-recipe",
        "master weights in half precision": "--main-params-dtype",
        "saved activations spread over the tensor-parallel ranks": "--distribute-saved-activations",
        "activation offload by module (--cpu-offloading-num-layers offloads by layer)": (
            "--fine-grained-activation-offloading --offload-modules"
        ),
        "gathering parameters during the optimizer step": "--overlap-param-gather-with-optimizer-step",
        "averaging inside the gradient collective": "--ddp-average-in-collective",
        "NCCL tuning by flag": "--use-nccl-ub --use-sharp",
        "a kernel for the symmetric GEMMs of Muon": "--muon-use-syrk",
        "rounding the global batch size": "--decrease-batch-size-if-needed",
        "this checkpoint option": (
            "--use-checkpoint-opt-param-scheduler --non-persistent-save-interval --non-persistent-ckpt-type "
            "--ckpt-convert-format"
        ),
        "fault tolerance beyond save and resume": (
            "--rerun-mode --check-for-spiky-loss --check-for-large-grads --iterations-to-skip --enable-ft-package "
            "--inprocess-restart --log-straggler --check-weight-hash-across-dp-replicas-interval"
        ),
        "control of garbage collection": "--manual-gc --manual-gc-interval",
        "emptying the device memory cache": "--empty-unused-memory-level",
        "a record of every memory allocation": "--record-memory-history",
        "timers by level": "--timing-log-level --timing-log-option --log-timers-to-tensorboard",
        "memory curves": "--log-memory-to-tensorboard --log-memory-interval",
        "energy metering": "--log-energy",
        "a progress file": "--log-progress",
        "a folder of its own for W&B files": "--wandb-save-dir",
        "W&B entities by flag": "--wandb-entity",
        "evaluation without training": "--skip-train",
        "evaluation over the whole split": "--full-validation",
        "several validation sets": "--multiple-validation-sets",
        "a batch size of its own for evaluation": "--eval-global-batch-size",
        "this data option": (
            "--no-mmap-bin-files --object-storage-cache-path --per-split-data-args-path --s3-cache-path "
            "--fim-data --fim-rate"
        ),
        "tiktoken tokenizers": "--tiktoken-pattern",
        "sentence splitting": "--split-sentences",
        CONVERSATIONS: "--sft --sft-tokenizer-prompt-format",
        REINFORCEMENT: "--perform-rl-step",
        "Megatron's YAML files (ours are read by --config)": "--yaml-cfg",
        "Megatron's legacy models": "--use-legacy-models",
        "this option of text generation (`petatron serve` batches as requests come)": (
            "--inference-dynamic-batching --inference-max-requests"
        ),
    }
)

# Values of our own fields that Megatron has and this version has not: field -> value -> its name in the message.
UNSUPPORTED_VALUES: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "dist_muon": "Megatron's own sharding of Muon (say --optimizer muon --use-distributed-optimizer)",
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
    "position_embedding_type": {"mrope": _VISION, "relative": "relative position bias"},
    "moe_token_dispatcher_type": {"flex": "the flex token dispatcher"},
    "moe_router_load_balancing_type": {"quantile_balancing": "quantile balancing"},
    "fp8_recipe": {"mxfp8": "the mxfp8 recipe", "custom": "custom FP8 recipes"},
    "recompute_modules": {"mla_up_proj": "recompute of the up-projections of latent attention alone"},
    "dataloader_type": {"external": "external data loaders"},
    "tokenizer_type": {
        **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), _BERT),
        **dict.fromkeys(("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"), "SentencePiece"),
        **dict.fromkeys(("MultimodalTokenizer", "NullMultimodalTokenizer"), _VISION),
        "TikTokenizer": "tiktoken tokenizers",
        "SFTTokenizer": CONVERSATIONS,
    },
}

# A key of a YAML file that is easily mistaken for a section -> the section's name.
FORMER_SECTIONS: Mapping[str, str] = {"latent": "model"}
"""Sections that files of earlier versions have, and the one that has their fields now."""
SECTION_ALIASES: Mapping[str, str] = {"optimizer": "optim"}
