"""Tables of flag spellings beyond the schema's own: short forms, Megatron's other names, and what is refused and why.

`parse.py` and `config/yaml_file.py` read these tables to parse, `reference_page.py` to document. A flag of
Megatron's is in exactly one table, or is a field of the schema, or is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from petatron.config.flags.absent_features import CONVERSATIONS, REINFORCEMENT, SAVED_FORMAT, ZARR_FORMAT
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
_TRANSFERS = "transfers between pipeline stages always overlap with computing"
_SINKS = "every logged value goes to every sink"

NO_OP_FLAGS: Mapping[str, NoOpFlag] = {
    "--use-mcore-models": NoOpFlag(_MODEL),
    "--transformer-impl": NoOpFlag(_MODEL, takes_value=True),
    "--attention-backend": NoOpFlag(_ATTENTION, takes_value=True),
    "--use-flash-attn": NoOpFlag(_ATTENTION),
    "--no-masked-softmax-fusion": NoOpFlag(_FUSED),
    "--no-bias-gelu-fusion": NoOpFlag(_FUSED),
    "--no-bias-swiglu-fusion": NoOpFlag(_FUSED),
    "--no-bias-dropout-fusion": NoOpFlag(_FUSED),
    "--no-rope-fusion": NoOpFlag(_FUSED),
    "--no-gradient-accumulation-fusion": NoOpFlag(_FUSED),
    "--no-persist-layer-norm": NoOpFlag(_FUSED),
    "--cross-entropy-loss-fusion": NoOpFlag(_FUSED),
    "--cross-entropy-fusion-impl": NoOpFlag(_FUSED, takes_value=True),
    "--attention-softmax-in-fp32": NoOpFlag("the attention softmax is always computed in fp32"),
    "--accumulate-allreduce-grads-in-fp32": NoOpFlag(
        "gradients are always accumulated in fp32, and reduced in it unless --grad-reduce-in-bf16 is given"
    ),
    "--calculate-per-token-loss": NoOpFlag("the loss is always one mean over the tokens of the global batch"),
    "--use-cpu-initialization": NoOpFlag("initial weights never depend on the layout or the device"),
    "--init-model-with-meta-device": NoOpFlag("a rank only ever makes the weights it holds"),
    "--overlap-p2p-communication": NoOpFlag(_TRANSFERS),
    "--no-overlap-p2p-communication": NoOpFlag(_TRANSFERS),
    "--overlap-p2p-communication-warmup-flush": NoOpFlag(_TRANSFERS),
    "--tp-comm-bootstrap-backend": NoOpFlag(
        "tensor-parallel overlap has no buffers of its own to set up", takes_value=True
    ),
    "--moe-permute-fusion": NoOpFlag(_FUSED),
    "--moe-router-fusion": NoOpFlag(_FUSED),
    "--moe-use-legacy-grouped-gemm": NoOpFlag(_FUSED),
    "--moe-per-layer-logging": NoOpFlag("the load of every MoE layer is always logged"),
    "--no-create-attention-mask-in-dataloader": NoOpFlag("the loader never builds a dense attention mask"),
    "--exit-signal-handler": NoOpFlag("SIGTERM and SIGINT always save and exit"),
    "--auto-detect-ckpt-format": NoOpFlag("there is one checkpoint format"),
    "--use-dist-ckpt": NoOpFlag("there is one checkpoint format"),
    "--no-ckpt-fully-parallel-save": NoOpFlag("all ranks always share the writing"),
    "--ckpt-fully-parallel-load": NoOpFlag("ranks always read only what they need"),
    "--ckpt-assume-constant-structure": NoOpFlag("saving needs no plan that could be kept"),
    "--dist-ckpt-strictness": NoOpFlag("everything must fit, always", takes_value=True),
    "--use-persistent-ckpt-worker": NoOpFlag("--async-save needs no other process"),
    "--use-precision-aware-optimizer": NoOpFlag("formats of optimizer state need no other optimizer"),
    "--overlap-cpu-optimizer-d2h-h2d": NoOpFlag("copies in both directions and updates always overlap"),
    "--cpu-optimizer-type": NoOpFlag("the optimizer is the one named by --optimizer", takes_value=True),
    "--log-loss-scale-to-tensorboard": NoOpFlag(_SINKS),
    "--log-validation-ppl-to-tensorboard": NoOpFlag(_SINKS),
    "--log-learning-rate-to-tensorboard": NoOpFlag(_SINKS),
    "--use-pytorch-profiler": NoOpFlag("--profile always uses PyTorch's profiler"),
    "--local-rank": NoOpFlag("the rank is read from the launcher's environment", takes_value=True),
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

_PREPROCESS = "petatron data preprocess"
_TASKS = "python tasks/main.py"
_GENERATE = "petatron generate"

# Flags of another subcommand.
OTHER_COMMAND_FLAGS: Mapping[str, str] = {
    "--input": _PREPROCESS,
    "--output-prefix": _PREPROCESS,
    "--json-keys": _PREPROCESS,
    "--append-eod": _PREPROCESS,
    "--workers": _PREPROCESS,
    "--task": _TASKS,
    "--valid-data": _TASKS,
    "--strict-lambada": "petatron eval",
    "--port": "petatron serve",
    "--temperature": _GENERATE,
    "--top-k": _GENERATE,
    "--top-p": _GENERATE,
}

_GRAPHS = "CUDA graphs of single modules (--cuda-graphs records a whole step)"
_OVERLAP = (
    "tensor-parallel overlap by part (--tp-comm-overlap is for all linears, and the backward pass always overlaps)"
)
_BERT = "BERT"
_T5 = "encoder-decoder models (T5)"
_VISION = "multimodal models"
_MOE = "this option of mixture of experts"
_FP8 = "this option of FP8 training"
_OFFLOAD = "activation offload by module (--cpu-offloading-num-layers offloads by layer)"
_SERVER = "this option of text generation (`petatron serve` batches as requests come)"
_RETRY = "fault tolerance beyond save and resume"
_CHECKPOINT = "this checkpoint option"
_ATTN = "this attention variant"
_DATA = "this data option"

# Features that Megatron has and this version has not. The value is the feature's name in the message.
UNSUPPORTED_FLAGS: Mapping[str, str] = {
    "--cuda-graph-scope": _GRAPHS,
    "--cuda-graph-modules": _GRAPHS,
    "--external-cuda-graph": _GRAPHS,
    "--tp-comm-overlap-cfg": "tensor-parallel overlap tuned by a file (--tp-comm-overlap-chunks is for all linears)",
    "--disable-tp-comm-overlap-ag": _OVERLAP,
    "--disable-tp-comm-overlap-rs": _OVERLAP,
    "--disable-tp-comm-split-ag": _OVERLAP,
    "--disable-tp-comm-split-rs": _OVERLAP,
    "--disable-tp-comm-bulk-dgrad": _OVERLAP,
    "--disable-tp-comm-bulk-wgrad": _OVERLAP,
    "--tp-comm-overlap-rs-dgrad": _OVERLAP,
    "--use-tp-pp-dp-mapping": "another rank order",
    "--defer-embedding-wgrad-compute": "deferred gradients of the output head",
    "--hybrid-context-parallel": "a context-parallel size per sample",
    "--outer-dp-sharding-strategy": "sharding over the copies of sharded state",
    "--delay-wgrad-compute": _MOE,
    "--moe-use-upcycling": _MOE,
    "--moe-flex-dispatcher-backend": _MOE,
    "--moe-enable-deepep": _MOE,
    "--disable-moe-token-dispatch": _MOE,
    "--spec": "a model spec from a module",
    "--bert-no-binary-head": _BERT,
    "--mask-prob": _BERT,
    "--short-seq-prob": _BERT,
    "--encoder-num-layers": _T5,
    "--decoder-num-layers": _T5,
    "--decoder-seq-length": _T5,
    "--vocab-extra-ids": _T5,
    "--img-h": _VISION,
    "--img-w": _VISION,
    "--patch-dim": _VISION,
    "--num-classes": _VISION,
    "--language-model-type": _VISION,
    "--vision-model-type": _VISION,
    "--apply-residual-connection-post-layernorm": "post-norm residuals",
    "--fp32-residual-connection": "an fp32 residual stream",
    "--apply-query-key-layer-scaling": _ATTN,
    "--mrope-section": _VISION,
    "--heterogeneous-layers-config-path": "layers of different shapes",
    "--use-mup": "muP",
    "--mup-base-hidden-size": "muP",
    "--init-method-xavier-uniform": "Xavier initialization",
    "--data-parallel-random-init": "different initial weights per replica",
    "--lazy-mpu-init": "lazy initialization",
    "--fp8-margin": _FP8,
    "--fp8-interval": _FP8,
    "--no-fp8-wgrad": _FP8,
    "--fp4-format": "FP4 training",
    "--fp4-recipe": "FP4 training",
    "--main-params-dtype": "master weights in half precision",
    "--distribute-saved-activations": "saved activations spread over the tensor-parallel ranks",
    "--fine-grained-activation-offloading": _OFFLOAD,
    "--offload-modules": _OFFLOAD,
    "--overlap-param-gather-with-optimizer-step": "gathering parameters during the optimizer step",
    "--ddp-average-in-collective": "averaging inside the gradient collective",
    "--use-nccl-ub": "NCCL tuning by flag",
    "--use-sharp": "NCCL tuning by flag",
    "--muon-use-syrk": "a kernel for the symmetric GEMMs of Muon",
    "--decrease-batch-size-if-needed": "rounding the global batch size",
    "--use-checkpoint-opt-param-scheduler": _CHECKPOINT,
    "--non-persistent-save-interval": _CHECKPOINT,
    "--non-persistent-ckpt-type": _CHECKPOINT,
    "--ckpt-convert-format": _CHECKPOINT,
    "--rerun-mode": _RETRY,
    "--check-for-spiky-loss": _RETRY,
    "--check-for-large-grads": _RETRY,
    "--iterations-to-skip": _RETRY,
    "--enable-ft-package": _RETRY,
    "--inprocess-restart": _RETRY,
    "--log-straggler": _RETRY,
    "--check-weight-hash-across-dp-replicas-interval": _RETRY,
    "--manual-gc": "control of garbage collection",
    "--manual-gc-interval": "control of garbage collection",
    "--empty-unused-memory-level": "emptying the device memory cache",
    "--record-memory-history": "a record of every memory allocation",
    "--timing-log-level": "timers by level",
    "--timing-log-option": "timers by level",
    "--log-timers-to-tensorboard": "timers by level",
    "--log-memory-to-tensorboard": "memory curves",
    "--log-memory-interval": "memory curves",
    "--log-energy": "energy metering",
    "--log-progress": "a progress file",
    "--wandb-save-dir": "a folder of its own for W&B files",
    "--wandb-entity": "W&B entities by flag",
    "--skip-train": "evaluation without training",
    "--full-validation": "evaluation over the whole split",
    "--multiple-validation-sets": "several validation sets",
    "--eval-global-batch-size": "a batch size of its own for evaluation",
    "--no-mmap-bin-files": _DATA,
    "--object-storage-cache-path": _DATA,
    "--per-split-data-args-path": _DATA,
    "--s3-cache-path": _DATA,
    "--fim-data": _DATA,
    "--fim-rate": _DATA,
    "--tiktoken-pattern": "tiktoken tokenizers",
    "--split-sentences": "sentence splitting",
    "--sft": CONVERSATIONS,
    "--sft-tokenizer-prompt-format": CONVERSATIONS,
    "--perform-rl-step": REINFORCEMENT,
    "--yaml-cfg": "Megatron's YAML files (ours are read by --config)",
    "--use-legacy-models": "Megatron's legacy models",
    "--inference-dynamic-batching": _SERVER,
    "--inference-max-requests": _SERVER,
}

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
        "torch_dist": SAVED_FORMAT,
        "torch_dcp": SAVED_FORMAT,
        "torch": SAVED_FORMAT,
        "fsdp_dtensor": SAVED_FORMAT,
        "huggingface": SAVED_FORMAT,
        "megatron": SAVED_FORMAT,
        "zarr": ZARR_FORMAT,
    },
    "position_embedding_type": {"mrope": _VISION, "relative": "relative position bias"},
    "moe_token_dispatcher_type": {"flex": "the flex token dispatcher"},
    "moe_router_load_balancing_type": {"quantile_balancing": "quantile balancing"},
    "fp8_recipe": {"mxfp8": "the mxfp8 recipe", "custom": "custom FP8 recipes"},
    "recompute_modules": {"mla_up_proj": "recompute of the up-projections of latent attention alone"},
    "dataloader_type": {"external": "external data loaders"},
    "tokenizer_type": {
        "BertWordPieceLowerCase": _BERT,
        "BertWordPieceCase": _BERT,
        "SentencePieceTokenizer": "SentencePiece",
        "GPTSentencePieceTokenizer": "SentencePiece",
        "Llama2Tokenizer": "SentencePiece",
        "TikTokenizer": "tiktoken tokenizers",
        "MultimodalTokenizer": _VISION,
        "NullMultimodalTokenizer": _VISION,
        "SFTTokenizer": CONVERSATIONS,
    },
}

# A key of a YAML file that is easily mistaken for a section -> the section's name.
FORMER_SECTIONS: Mapping[str, str] = {"latent": "model"}
"""Sections that files of earlier versions have, and the one that has their fields now."""
SECTION_ALIASES: Mapping[str, str] = {"optimizer": "optim"}
