"""Names that flags of ours have in other programs: transformers, torchtitan, DeepSpeed, Lightning and nanoGPT.

An unknown flag or field with such a name gets the suggestion of this table. Closeness of spelling would suggest nothing for most of
them, and something else for others (`--num-key-value-heads` is nearest to `--linear-num-value-heads`). None of them is accepted:
values may mean something else there, and a run has one name for a setting. docs/coming-from.md has these names by program.

Prompt tuning, conversations, preferences and quantized training have no flag here whose name could be close: they have a table of what
exists instead, or the closest spelling would be suggested. The tables of Megatron's flags refuse features too; where
something else exists for one of these, `ALTERNATIVES` says it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


def by_flag(flags_by_text: Mapping[str, str]) -> dict[str, str]:
    """Returns the text of each flag, from the flags of each text.

    >>> by_flag({"--lr": "--learning-rate --max-lr"})
    {'--learning-rate': '--lr', '--max-lr': '--lr'}
    """
    return {flag: text for text, flags in flags_by_text.items() for flag in flags.split()}


_NAMES_ELSEWHERE: Mapping[str, str] = {
    # The model
    "--activation": "--activation-function --hidden-act",
    "--add-qkv-bias": "--attention-bias",
    "--attention-dropout": "--attention-probs-dropout-prob --attn-pdrop",
    "--add-bias-linear": "--bias --mlp-bias --use-bias",
    "--hidden-size": "--d-model --dim --hidden-dim --n-embd",
    "--hidden-dropout": "--embd-pdrop --resid-pdrop",
    "--ffn-hidden-size": "--ffn-dim --intermediate-size",
    "--kv-channels": "--head-dim",
    "--num-attention-heads": "--heads --n-head --n-heads --num-heads",
    "--init-method-std": "--initializer-range",
    "--norm-epsilon": "--layer-norm-eps --layer-norm-epsilon --norm-eps --rms-norm-eps",
    "--moe-ffn-hidden-size": "--moe-intermediate-size",
    "--num-query-groups": "--n-kv-heads --num-key-value-heads --num-kv-heads",
    "--num-layers": "--n-layer --n-layers --num-hidden-layers",
    "--max-position-embeddings": "--n-positions",
    "--vocab-size": "--n-vocab --vocab",
    "--disable-bias-linear": "--no-bias",
    "--untie-embeddings-and-output-weights": "--no-tie-word-embeddings",
    "--moe-router-topk": "--num-experts-per-tok --num-experts-per-token --top-k-experts",
    "--residual-branches parallel": "--parallel-residual --use-parallel-residual",
    "--rotary-percent": "--partial-rotary-factor",
    "--qk-layernorm": "--qk-norm --use-qk-norm",
    "--use-rope-scaling (Llama 3) or --position-embedding-type yarn": "--rope-scaling",
    "--rotary-percent (a fraction of the head)": "--rotary-dim",
    "--no-untie-embeddings-and-output-weights (the default)": (
        "--share-embeddings-and-output-weights --tie-embeddings --tie-word-embeddings --tied-embeddings"
    ),
    "--window-size": "--sliding-window",
    # Adapters
    "--adapter lora": "--enable-lora --lora --peft --peft-method --use-lora --use-peft",
    "--adapter-alpha": "--lora-alpha",
    "--adapter-dropout": "--lora-dropout",
    "--adapter-rank": "--lora-dim --lora-r --lora-rank --peft-rank",
    "--adapter-targets": "--lora-target --lora-target-modules --lora-targets --target-modules",
    "--adapter-also-train": "--lora-modules-to-save --modules-to-save",
    "--adapter dora": "--use-dora",
    "--adapter rslora": "--use-rslora",
    "--adapter lora --adapter-base-format nf4": "--load-in-4bit --qlora --use-qlora",
    "--adapter lora --adapter-base-format fp8": "--load-in-8bit",
    # Length and batch
    "--global-batch-size (micro-batch x data-parallel size x accumulation steps)": (
        "--accumulate-grad-batches --grad-accum-steps --gradient-accumulation-steps"
    ),
    "--seq-length": "--block-size --context-length --max-length --max-seq-len",
    "--train-epochs": "--epochs --max-epochs --num-epochs --num-train-epochs",
    "--sft": "--assistant-only-loss --completion-only-loss --conversations",
    "--global-batch-size": "--gbs --train-batch-size",
    "--train-iters": "--iterations --max-iters --max-steps --num-steps --steps --total-steps",
    "--micro-batch-size": (
        "--local-batch-size --mbs --per-device-train-batch-size --per-gpu-train-batch-size "
        "--train-micro-batch-size-per-gpu --pipeline-parallel-microbatch-size"
    ),
    "--micro-batch-size (evaluation takes the training batch)": "--per-device-eval-batch-size",
    # The optimizer
    "--lr-wsd-decay-iters (with --lr-decay-style WSD)": "--decay-ratio",
    "--clip-grad": "--grad-clip --gradient-clip-val --gradient-clipping --max-grad-norm --max-norm",
    "--lr": "--learning-rate --max-lr",
    "--min-lr": "--lr-min --min-learning-rate",
    "--lr-decay-style": "--lr-scheduler --lr-scheduler-type",
    "--adam-eps": "--optimizer.eps",
    "--optimizer": "--optimizer.name",
    "--lr-warmup-fraction": "--warmup-ratio",
    "--lr-warmup-iters": "--warmup-steps",
    "--weight-decay": "--wd",
    # Precision, memory and speed
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
        "--activation-checkpoint --activation-checkpoint.mode --activation-checkpointing --gradient-checkpointing"
    ),
    "--compile (the default)": "--compile.enable --torch-compile",
    "--no-compile": "--disable-compile",
    "--bf16 or --fp16": "--dtype --mixed-precision --mixed-precision-param --precision --torch-dtype",
    "--optimizer-cpu-offload": "--enable-cpu-offload",
    "--fp8-format hybrid": "--float8 --fp8 --fp8-training",
    "--grad-reduce-in-bf16 (the default is fp32)": "--mixed-precision-reduce",
    "--fp8-recipe": "--recipe-name",
    # The layout
    "--cp-comm-type": "--context-parallel-rotate-method",
    "--num-distributed-optimizer-instances": "--data-parallel-replicate-degree",
    "--data-parallel-sharding-strategy optim_grads_params": "--data-parallel-shard-degree --fsdp",
    "--distributed-timeout-minutes": "--ddp-timeout --train-timeout-seconds",
    "--tp-comm-overlap": "--enable-async-tensor-parallel",
    "--fp8-param-gather": "--enable-fsdp-float8-all-gather",
    "--expert-model-parallel-size": "--expert-parallel-degree --expert-parallel-size",
    "--data-parallel-sharding-strategy optim_grads (where the answer is never)": "--fsdp-reshard-after-forward",
    "--nproc-per-node": "--ngpus --nproc --num-gpus",
    "--pipeline-model-parallel-size": "--pipeline-parallel-degree --pipeline-parallel-size",
    "--num-layers-per-virtual-pipeline-stage": "--pipeline-parallel-layers-per-stage",
    "--pipeline-schedule": "--pipeline-parallel-schedule",
    "--tensor-model-parallel-size": "--tensor-parallel-degree --tensor-parallel-size",
    "--use-distributed-optimizer (ZeRO-1) or --data-parallel-sharding-strategy (ZeRO-2 and 3)": "--zero --zero-stage",
    # Data, checkpoints and logs
    "--async-save": "--checkpoint.async-mode",
    "--save-interval": "--checkpoint-interval --checkpoint.interval --save-every --save-freq --save-steps",
    "--save": "--checkpoint.folder --output-dir",
    "--data-path (files of `petatron data preprocess`)": "--data-dir --dataset --dataset-path --train-file",
    "--num-workers": "--dataloader-num-workers",
    "--profile": "--enable-profiling",
    "--tensorboard-dir": "--enable-tensorboard",
    "--wandb-project": "--enable-wandb --wandb",
    "--eval-interval": "--eval-every --eval-steps --eval-strategy --validation.freq",
    "--deterministic-mode": "--full-determinism",
    "--from": "--initial-load-in-hf --initial-load-path",
    "--config": "--job.config-file",
    "--save-total-limit": "--keep-latest-k",
    "--ckpt-step": "--load-step",
    "--log-interval": "--log-every --log-every-n-steps --log-freq --logging-steps",
    "--preset, or --from (the folder of a model)": "--model",
    "--from (the folder of a model) or --preset": "--model-name-or-path",
    "--preset": "--model.flavor --model.name",
    "--from (the folder of a model)": "--pretrained-model-name-or-path",
    "--tensorboard-dir or --wandb-project": "--report-to",
    "--load": "--resume --resume-from-checkpoint",
    "--wandb-exp-name": "--run-name",
    "--no-save-optim": "--save-only-model",
    "--seed": "--seed-everything",
    "--tokenizer-model": "--tokenizer --tokenizer-name --tokenizer-path",
    "--device cpu": "--use-cpu",
    "--eval-iters": "--validation.steps",
}

SUGGESTIONS: Mapping[str, str] = by_flag(_NAMES_ELSEWHERE)
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


REINFORCEMENT = "reinforcement learning as flags of other trainers describe it"
_ADAPTERS = "prompt tuning and such adapters of PEFT"
_PREFERENCES = "training on preferences as flags of other trainers describe it"
_QUANTIZED = "training with quantized weights"
SAVED_FORMAT = "saving in another format while training"
ZARR_FORMAT = "Megatron's zarr checkpoints"

_OWN_LOOP = "a loop of your own with `petatron.build_model` may have any loss (docs/finetuning.md)"

ALTERNATIVES: Mapping[str, str] = {
    _ADAPTERS: f"Use --adapter lora, rslora, dora or ia3 instead; {_OWN_LOOP}",
    _PREFERENCES: "Use --objective dpo, orpo, simpo, kto or reward, with --objective-settings (docs/posttraining.md)",
    REINFORCEMENT: "Use `petatron posttrain grpo` (or dapo, gspo, rloo, ppo) with --rollout-prompts and --rewards (docs/posttraining.md)",
    _QUANTIZED: "Use --adapter lora --adapter-base-format nf4 to train beside quantized weights; --bf16 --fp8-format hybrid computes in "
    "FP8, and --data-parallel-sharding-strategy optim_grads_params or --optimizer-cpu-offload saves memory",
    SAVED_FORMAT: "Leave it out: a run saves petatron, and `petatron checkpoint convert SOURCE TARGET --to megatron` (or huggingface) "
    "writes another; with --to petatron it reads what Megatron saved",
    ZARR_FORMAT: "Save it as torch_dist with Megatron, which `petatron checkpoint convert SOURCE TARGET --to petatron` reads",
}
"""What exists in place of a feature, as the sentence of an error, without its full stop."""


@dataclass(frozen=True, slots=True)
class _AbsentFeature:
    """A feature and the names of its flags in other programs, as whole words between dashes."""

    feature: str
    names: re.Pattern[str]


def _flags_with(*names: str) -> re.Pattern[str]:
    """Matches flags that begin with such a name: `--sft`, `--dpo-beta`, `--use-dpo`."""
    return re.compile(rf"--(?:use-|enable-|no-)?(?:{'|'.join(names)})(?:-.*)?")


_ABSENT = (
    _AbsentFeature(_ADAPTERS, _flags_with("prefix-tuning", "prompt-tuning", "p-tuning")),
    _AbsentFeature(_PREFERENCES, _flags_with("dpo", "orpo", "kto", "simpo", "preference", "ref-model", "reference-model")),
    _AbsentFeature(REINFORCEMENT, _flags_with("ppo", "grpo", "rlhf", "rl", "reward-model", "reward-funcs?")),
    _AbsentFeature(_QUANTIZED, _flags_with("bnb", "quantization", "nf4")),
)  # fmt: skip


def absent_feature(flag: str) -> str | None:
    """Returns the feature that a flag of other programs asks for, if this version does not have it.

    >>> absent_feature("--prompt-tuning"), absent_feature("--num-layers")
    ('prompt tuning and such adapters of PEFT', None)
    """
    return next((absent.feature for absent in _ABSENT if absent.names.fullmatch(flag)), None)


def alternative(feature: str) -> str:
    """Returns what to do instead of asking for a feature."""
    return ALTERNATIVES.get(feature, "Leave it out")
