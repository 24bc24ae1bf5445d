"""The settings of checkpoints: what is loaded at the start, and what is saved when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from petatron.config.schema.numeric_bounds import (
    IterationCount,
)
from petatron.config.schema.setting_metadata import NotWith, used_with
from petatron.config.schema.setting_types import (
    FilePath,
    NotSavedFlag,
    NotSavedOnResumeFlag,
    PrivateKeyPath,
)

_LOADS = used_with("checkpoint.load", reason="there is no --load")
_SAVES = used_with("checkpoint.save", reason="there is no --save")
_FROM = used_with(
    "checkpoint.use_checkpoint_args",
    "checkpoint.pretrained_checkpoint",
    reason="it is for --use-checkpoint-args and --from",
)
_NO_OVERRIDE = NotWith(
    "override_opt_param_scheduler",
    rule="takes the checkpoint's schedule, and --override-opt-param-scheduler this run's",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where state is kept."""

    save: Annotated[FilePath, "training"] | None = None
    """Folder to save checkpoints in."""
    load: FilePath | None = None
    """Folder to resume from (its newest checkpoint)."""
    pretrained_checkpoint: FilePath | None = None
    """Folder to take the first weights from when `--load` is not given or holds no checkpoint yet: of checkpoints, or of a
    Hugging Face model."""
    save_interval: Annotated[IterationCount, "at least 1", "training", _SAVES] | None = None
    """Iterations between saves; the last state is always saved when `--save` is given."""
    ckpt_step: Annotated[IterationCount, "at least 0", "one load"] | None = None
    """Resume from this iteration instead of the newest."""
    finetune: Annotated[bool, "training"] = False
    """Load weights only and start at iteration 0."""
    no_load_optim: Annotated[NotSavedOnResumeFlag, "training", _LOADS] = False
    """Do not load optimizer state."""
    no_load_rng: Annotated[NotSavedOnResumeFlag, "training", _LOADS] = False
    """Do not load random states."""
    no_save_optim: Annotated[bool, "training", _SAVES] = False
    """Do not save optimizer state; such a checkpoint cannot be resumed, only finetuned."""
    no_save_rng: Annotated[bool, "training", _SAVES] = False
    """Do not save random states."""
    exit_on_missing_checkpoint: bool = False
    """Fail when `--load` holds no checkpoint, instead of starting from scratch."""
    use_checkpoint_args: NotSavedFlag = False
    """Take the model's settings from the checkpoint in `--load`; other values for them give way, with a note."""
    use_mp_args_from_checkpoint_args: NotSavedFlag = False
    """With `--use-checkpoint-args`, take the sizes of tensor, pipeline and expert parallelism and the pipeline's split too."""
    use_tokenizer_model_from_checkpoint_args: Annotated[bool, _FROM] = True
    """With `--use-checkpoint-args` or `--from`, use the tokenizer found there unless another one is given."""
    override_opt_param_scheduler: NotSavedFlag = False
    """On resume take the learning-rate schedule from this run's flags even if the checkpoint's differs."""
    use_checkpoint_opt_param_scheduler: Annotated[NotSavedFlag, _LOADS, _NO_OVERRIDE] = False
    """On resume take the schedules of learning rate and weight decay from the checkpoint, whatever this run's flags say."""
    async_save: Annotated[bool, "training", _SAVES] = False
    """Write checkpoints in the background: the run goes on as soon as the state is copied to host memory."""
    save_total_limit: Annotated[IterationCount, "at least 1", "training", _SAVES] | None = None
    """Keep only this many of the newest checkpoints; unset keeps all."""
    save_retain_interval: Annotated[IterationCount, "at least 1", "training", _SAVES] | None = None
    """Keep the checkpoints whose iteration is a multiple of this, and the newest: one, or those of `--save-total-limit`."""
    sign_key: PrivateKeyPath | None = None
    """File of an Ed25519 private key to sign checkpoints with (extra: sign); their files get SHA-256 digests then."""
    load_fallback: Annotated[bool, "training", _LOADS] = False
    """If the checkpoint to load is damaged, say so and take the newest sound one before it."""
    save_megatron: Annotated[FilePath, "training", _SAVES] | None = None
    """Folder for Megatron's files (torch_dist) of every checkpoint, beside those in `--save`; written in the background."""
    ckpt_format: Literal["petatron"] = "petatron"
    """Checkpoint format."""
