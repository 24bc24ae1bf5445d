"""Names that flags of ours have in other programs: transformers, torchtitan, DeepSpeed, Lightning and nanoGPT.

An unknown flag or field with such a name gets the suggestion of this table. Closeness of spelling would suggest nothing for most of
them, and something else for others (`--num-key-value-heads` is nearest to `--linear-num-value-heads`). None of them is accepted:
values may mean something else there, and a run has one name for a setting. docs/coming-from.md has these names by program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SHARDING = "--data-parallel-sharding-strategy optim_grads_params"
_BATCH = "--global-batch-size (micro-batch x data-parallel size x accumulation steps)"
_LENGTH = "--train-iters or --train-samples (there are no epochs)"
_DATA = "--data-path (files of `petatron data preprocess`)"
_FP8 = "--fp8-format hybrid"

SUGGESTIONS: Mapping[str, str] = {
    # The model
    "--activation-function": "--activation",
    "--attention-bias": "--add-qkv-bias",
    "--attention-probs-dropout-prob": "--attention-dropout",
    "--attn-pdrop": "--attention-dropout",
    "--bias": "--add-bias-linear",
    "--d-model": "--hidden-size",
    "--dim": "--hidden-size",
    "--embd-pdrop": "--hidden-dropout",
    "--ffn-dim": "--ffn-hidden-size",
    "--head-dim": "--kv-channels",
    "--heads": "--num-attention-heads",
    "--hidden-act": "--activation",
    "--hidden-dim": "--hidden-size",
    "--initializer-range": "--init-method-std",
    "--intermediate-size": "--ffn-hidden-size",
    "--layer-norm-eps": "--norm-epsilon",
    "--layer-norm-epsilon": "--norm-epsilon",
    "--mlp-bias": "--add-bias-linear",
    "--moe-intermediate-size": "--moe-ffn-hidden-size",
    "--n-embd": "--hidden-size",
    "--n-head": "--num-attention-heads",
    "--n-heads": "--num-attention-heads",
    "--n-kv-heads": "--num-query-groups",
    "--n-layer": "--num-layers",
    "--n-layers": "--num-layers",
    "--n-positions": "--max-position-embeddings",
    "--n-vocab": "--vocab-size",
    "--no-bias": "--disable-bias-linear",
    "--no-tie-word-embeddings": "--untie-embeddings-and-output-weights",
    "--norm-eps": "--norm-epsilon",
    "--num-experts-per-tok": "--moe-router-topk",
    "--num-experts-per-token": "--moe-router-topk",
    "--num-heads": "--num-attention-heads",
    "--num-hidden-layers": "--num-layers",
    "--num-key-value-heads": "--num-query-groups",
    "--num-kv-heads": "--num-query-groups",
    "--parallel-residual": "--residual-branches parallel",
    "--partial-rotary-factor": "--rotary-percent",
    "--qk-norm": "--qk-layernorm",
    "--resid-pdrop": "--hidden-dropout",
    "--rms-norm-eps": "--norm-epsilon",
    "--rope-scaling": "--use-rope-scaling (Llama 3) or --position-embedding-type yarn",
    "--rotary-dim": "--rotary-percent (a fraction of the head)",
    "--share-embeddings-and-output-weights": "--no-untie-embeddings-and-output-weights (the default)",
    "--sliding-window": "--window-size",
    "--tie-embeddings": "--no-untie-embeddings-and-output-weights (the default)",
    "--tie-word-embeddings": "--no-untie-embeddings-and-output-weights (the default)",
    "--tied-embeddings": "--no-untie-embeddings-and-output-weights (the default)",
    "--top-k-experts": "--moe-router-topk",
    "--use-bias": "--add-bias-linear",
    "--use-parallel-residual": "--residual-branches parallel",
    "--use-qk-norm": "--qk-layernorm",
    "--vocab": "--vocab-size",
    # Length and batch
    "--accumulate-grad-batches": _BATCH,
    "--block-size": "--seq-length",
    "--context-length": "--seq-length",
    "--epochs": _LENGTH,
    "--gbs": "--global-batch-size",
    "--grad-accum-steps": _BATCH,
    "--gradient-accumulation-steps": _BATCH,
    "--iterations": "--train-iters",
    "--local-batch-size": "--micro-batch-size",
    "--max-epochs": _LENGTH,
    "--max-iters": "--train-iters",
    "--max-length": "--seq-length",
    "--max-seq-len": "--seq-length",
    "--max-steps": "--train-iters",
    "--mbs": "--micro-batch-size",
    "--num-epochs": _LENGTH,
    "--num-steps": "--train-iters",
    "--num-train-epochs": _LENGTH,
    "--per-device-eval-batch-size": "--micro-batch-size (evaluation takes the training batch)",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--per-gpu-train-batch-size": "--micro-batch-size",
    "--steps": "--train-iters",
    "--total-steps": "--train-iters",
    "--train-batch-size": "--global-batch-size",
    "--train-micro-batch-size-per-gpu": "--micro-batch-size",
    # The optimizer
    "--decay-ratio": "--lr-wsd-decay-iters (with --lr-decay-style WSD)",
    "--grad-clip": "--clip-grad",
    "--gradient-clip-val": "--clip-grad",
    "--gradient-clipping": "--clip-grad",
    "--learning-rate": "--lr",
    "--lr-min": "--min-lr",
    "--lr-scheduler": "--lr-decay-style",
    "--lr-scheduler-type": "--lr-decay-style",
    "--max-grad-norm": "--clip-grad",
    "--max-lr": "--lr",
    "--max-norm": "--clip-grad",
    "--min-learning-rate": "--min-lr",
    "--optimizer.eps": "--adam-eps",
    "--optimizer.name": "--optimizer",
    "--warmup-ratio": "--lr-warmup-fraction",
    "--warmup-steps": "--lr-warmup-iters",
    "--wd": "--weight-decay",
    # Precision, memory and speed
    "--activation-checkpoint": _FULL_RECOMPUTE,
    "--activation-checkpoint.mode": _FULL_RECOMPUTE,
    "--activation-checkpointing": _FULL_RECOMPUTE,
    "--compile.enable": "--compile (the default)",
    "--disable-compile": "--no-compile",
    "--dtype": "--bf16 or --fp16",
    "--enable-cpu-offload": "--optimizer-cpu-offload",
    "--float8": _FP8,
    "--fp8": _FP8,
    "--fp8-training": _FP8,
    "--gradient-checkpointing": _FULL_RECOMPUTE,
    "--mixed-precision": "--bf16 or --fp16",
    "--mixed-precision-param": "--bf16 or --fp16",
    "--mixed-precision-reduce": "--grad-reduce-in-bf16 (the default is fp32)",
    "--precision": "--bf16 or --fp16",
    "--recipe-name": "--fp8-recipe",
    "--torch-compile": "--compile (the default)",
    "--torch-dtype": "--bf16 or --fp16",
    # The layout
    "--context-parallel-rotate-method": "--cp-comm-type",
    "--data-parallel-replicate-degree": "--num-distributed-optimizer-instances",
    "--data-parallel-shard-degree": _SHARDING,
    "--ddp-timeout": "--distributed-timeout-minutes",
    "--enable-async-tensor-parallel": "--tp-comm-overlap",
    "--enable-fsdp-float8-all-gather": "--fp8-param-gather",
    "--expert-parallel-degree": "--expert-model-parallel-size",
    "--expert-parallel-size": "--expert-model-parallel-size",
    "--fsdp": _SHARDING,
    "--fsdp-reshard-after-forward": "--data-parallel-sharding-strategy optim_grads (where the answer is never)",
    "--ngpus": "--nproc-per-node",
    "--nproc": "--nproc-per-node",
    "--num-gpus": "--nproc-per-node",
    "--pipeline-parallel-degree": "--pipeline-model-parallel-size",
    "--pipeline-parallel-layers-per-stage": "--num-layers-per-virtual-pipeline-stage",
    "--pipeline-parallel-microbatch-size": "--micro-batch-size",
    "--pipeline-parallel-schedule": "--pipeline-schedule",
    "--pipeline-parallel-size": "--pipeline-model-parallel-size",
    "--tensor-parallel-degree": "--tensor-model-parallel-size",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--train-timeout-seconds": "--distributed-timeout-minutes",
    "--zero": "--use-distributed-optimizer (ZeRO-1) or --data-parallel-sharding-strategy (ZeRO-2 and 3)",
    "--zero-stage": "--use-distributed-optimizer (ZeRO-1) or --data-parallel-sharding-strategy (ZeRO-2 and 3)",
    # Data, checkpoints and logs
    "--async-mode": "--async-save",
    "--checkpoint-interval": "--save-interval",
    "--checkpoint.folder": "--save",
    "--checkpoint.interval": "--save-interval",
    "--data-dir": _DATA,
    "--dataloader-num-workers": "--num-workers",
    "--dataset": _DATA,
    "--dataset-path": _DATA,
    "--enable-profiling": "--profile",
    "--enable-tensorboard": "--tensorboard-dir",
    "--enable-wandb": "--wandb-project",
    "--eval-every": "--eval-interval",
    "--eval-steps": "--eval-interval",
    "--eval-strategy": "--eval-interval",
    "--full-determinism": "--deterministic-mode",
    "--initial-load-in-hf": "--from",
    "--initial-load-path": "--from",
    "--job.config-file": "--config",
    "--keep-latest-k": "--save-total-limit",
    "--load-step": "--ckpt-step",
    "--log-every": "--log-interval",
    "--log-every-n-steps": "--log-interval",
    "--log-freq": "--log-interval",
    "--logging-steps": "--log-interval",
    "--model": "--preset, or --from (the folder of a model)",
    "--model-name-or-path": "--from (the folder of a model) or --preset",
    "--model.flavor": "--preset",
    "--model.name": "--preset",
    "--output-dir": "--save",
    "--pretrained-model-name-or-path": "--from (the folder of a model)",
    "--report-to": "--tensorboard-dir or --wandb-project",
    "--resume": "--load",
    "--resume-from-checkpoint": "--load",
    "--run-name": "--wandb-exp-name",
    "--save-every": "--save-interval",
    "--save-freq": "--save-interval",
    "--save-only-model": "--no-save-optim",
    "--save-steps": "--save-interval",
    "--seed-everything": "--seed",
    "--tokenizer": "--tokenizer-model",
    "--tokenizer-name": "--tokenizer-model",
    "--tokenizer-path": "--tokenizer-model",
    "--train-file": _DATA,
    "--use-cpu": "--device cpu",
    "--validation.freq": "--eval-interval",
    "--validation.steps": "--eval-iters",
    "--wandb": "--wandb-project",
}

_FLAG = re.compile(r"--[a-z0-9-]+")


def suggestion(flag: str) -> str | None:
    """Returns what a flag of another program is called here; torchtitan's have their section in front.

    >>> suggestion("--learning-rate"), suggestion("--training.max-norm"), suggestion("--num-layers")
    ('--lr', '--clip-grad', None)
    """
    return SUGGESTIONS.get(flag) or SUGGESTIONS.get(without_section(flag))


def without_section(flag: str) -> str:
    """Removes the section of torchtitan's flags: `--training.seq-len` is `--seq-len`."""
    return f"--{flag[2:].rpartition('.')[2]}"


def suggested_flags(text: str) -> list[str]:
    """Returns the flags of a suggestion.

    >>> suggested_flags("--bf16 or --fp16")
    ['--bf16', '--fp16']
    """
    return _FLAG.findall(text)
