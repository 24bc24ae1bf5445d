"""What users ask for by flags and this version does not have, with what exists instead.

Adapters, conversations, preferences and quantized training have no flag here whose name could be close: without this table the closest
spelling would be suggested (`--etp` for `--peft`). The tables of Megatron's flags refuse features too; where something else exists
for one of these, `ALTERNATIVES` says it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

CONVERSATIONS = "fine-tuning on conversations"
REINFORCEMENT = "reinforcement learning"
_ADAPTERS = "low-rank adapters (LoRA) and other adapters of PEFT"
_PREFERENCES = "training on preferences (DPO and the like)"
_QUANTIZED = "training with quantized weights"
SAVED_FORMAT = "saving in another format while training"
ZARR_FORMAT = "Megatron's zarr checkpoints"

_FULL_FINE_TUNING = "`--from FOLDER` fine-tunes all weights of a model, or with --freeze some of them"
_OWN_LOOP = "a loop of your own with `petatron.build_model` may have any loss (docs/finetuning.md)"

ALTERNATIVES: Mapping[str, str] = {
    _ADAPTERS: f"Leave it out: {_FULL_FINE_TUNING}; {_OWN_LOOP}",
    CONVERSATIONS: f"Leave it out: {_FULL_FINE_TUNING} on text of `petatron data preprocess`, with the loss on every token; {_OWN_LOOP}",
    _PREFERENCES: f"Leave it out: {_FULL_FINE_TUNING} on text; {_OWN_LOOP}",
    REINFORCEMENT: f"Leave it out: {_FULL_FINE_TUNING} on text; {_OWN_LOOP}",
    _QUANTIZED: "Leave it out: --bf16 --fp8-format hybrid computes in FP8, and --data-parallel-sharding-strategy optim_grads_params or "
    "--optimizer-cpu-offload saves memory",
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


def _flags_with(*words: str) -> re.Pattern[str]:
    """Matches flags that begin with such a word: `--lora`, `--lora-rank`, `--peft-config`, `--use-peft`."""
    return re.compile(rf"--(?:use-|enable-|no-)?(?:{'|'.join(words)})(?:-.*)?")


_ABSENT = (
    _AbsentFeature(_ADAPTERS, _flags_with("lora", "qlora", "dora", "peft", "adapters?", "prefix-tuning", "prompt-tuning")),
    _AbsentFeature(
        CONVERSATIONS,
        _flags_with("sft", "chat-template", "assistant-only-loss", "completion-only-loss", "conversations", "instruct"),
    ),
    _AbsentFeature(_PREFERENCES, _flags_with("dpo", "orpo", "kto", "simpo", "preference", "ref-model", "reference-model")),
    _AbsentFeature(REINFORCEMENT, _flags_with("ppo", "grpo", "rlhf", "rl", "reward-model", "reward-funcs?", "rollout")),
    _AbsentFeature(_QUANTIZED, _flags_with("load-in-4bit", "load-in-8bit", "bnb", "quantization", "nf4")),
)  # fmt: skip


def absent_feature(flag: str) -> str | None:
    """Returns the feature that a flag of other programs asks for, if this version does not have it.

    >>> absent_feature("--lora-rank"), absent_feature("--num-layers")
    ('low-rank adapters (LoRA) and other adapters of PEFT', None)
    """
    return next((absent.feature for absent in _ABSENT if absent.names.fullmatch(flag)), None)


def alternative(feature: str) -> str:
    """Returns what to do instead of asking for a feature."""
    return ALTERNATIVES.get(feature, "Leave it out")
