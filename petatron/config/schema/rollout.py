"""The settings of reinforcement learning: prompts, how answers are drawn and rewarded, and what is learned from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import (
    Factor,
    Fraction,
    Gigabytes,
    IterationCount,
    LearningRate,
    PositiveCount,
    RankCount,
    Seconds,
    SmallCount,
)
from petatron.config.schema.setting_metadata import Feature, UsedWhen, used_with
from petatron.config.schema.setting_types import FilePath

AdvantageName = Literal["group", "centered", "leave-one-out", "batch", "gae"]

_DRAWS = used_with("rollout.rollout_prompts")
_CRITIC = used_with("rollout.advantage", value="gae")
_RUNS_CODE = UsedWhen(
    lambda run: any(
        text.partition("*")[2].startswith("code") or text.startswith("code") for text in run.rollout.rewards
    ),
    "it is for --rewards code",
)
_EVALUATES = used_with("rollout.eval_prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What `petatron posttrain` draws, rewards and learns from."""

    feature: ClassVar = Feature("rollouts", role="training")
    rollout_prompts: tuple[FilePath, ...] = ()
    """Files of prompts, a JSON object in each line, with `prompt` (a text or messages) and what rewards read, such as `answer`."""
    rewards: tuple[Annotated[str, _DRAWS], ...] = ()
    """What answers are rewarded for: [WEIGHT*]NAME[:ARGUMENT], [WEIGHT*]model:FOLDER, [WEIGHT*]FILE.py:FUNCTION or
    [WEIGHT*]http://HOST/PATH, several are added up."""
    environment: Annotated[str, _DRAWS] | None = None
    """What answers to answers, for several turns: FILE.py:CLASS, an object with `reset` and `step` for each episode; tools:FILE.py, whose
    functions the model may call; http://HOST/PATH, a server. Its rewards are added to those of `--rewards`, which are for the last
    answer."""
    max_turns: Annotated[PositiveCount, used_with("rollout.environment")] = 8
    """Answers of an episode at most. --max-answer-tokens holds for each, and --seq-length for all of them with what is between."""
    rollouts_per_prompt: Annotated[PositiveCount, _DRAWS] = 8
    """Answers drawn for each prompt, at least 2 unless a critic says what is expected of one. `--global-batch-size` counts answers, so it
    is a multiple of it."""
    max_answer_tokens: Annotated[PositiveCount, _DRAWS] = 256
    """Tokens of an answer at most."""
    rollout_temperature: Annotated[Factor, "above 0", _DRAWS] = 1.0
    """Temperature of answers in training."""
    rollout_chat: Annotated[bool, _DRAWS] | None = None
    """Put prompts into the tokenizer's chat template, also those that are texts. Unset: messages alone."""
    advantage: Annotated[AdvantageName, _DRAWS] = "group"
    """What a reward is measured against: the mean of the prompt's answers, divided by their deviation (group) or not (centered); the mean
    of its other answers (leave-one-out); that of its answers, divided by the deviation of all answers of a step (batch); or, token by
    token, what a critic expected (gae: generalized advantage estimation), which is trained beside the model."""
    discount: Annotated[Fraction, _CRITIC] = 1.0
    """What a reward one token later is worth (gamma)."""
    gae_lambda: Annotated[Fraction, _CRITIC] = 0.95
    """How far advantages look ahead: 0, to the next value of the critic; 1, to the reward."""
    whiten_advantages: Annotated[bool, _CRITIC] = True
    """Shift and scale the advantages of all tokens that are drawn at once to mean 0 and deviation 1."""
    value_clip: Annotated[Factor, _CRITIC] = 0.2
    """How far a value of the critic may move from that before the first update on an answer; 0: any."""
    critic: Annotated[FilePath, _CRITIC] | None = None
    """Folder of the model that the critic starts from, such as a reward model. Unset: the one that the run starts from, with a new head."""
    critic_lr: Annotated[LearningRate, "above 0", _CRITIC] | None = None
    """Learning rate of the critic, with the schedule of `--lr`. Unset: `--lr`."""
    updates_per_rollout: Annotated[PositiveCount, _DRAWS] = 1
    """Steps that are trained on the answers that are drawn at once: each step has --global-batch-size of them."""
    rollout_epochs: Annotated[PositiveCount, _DRAWS] = 1
    """How many times the steps of answers that are drawn at once are trained on."""
    old_log_probs: Annotated[Literal["drawn", "computed"], _DRAWS] = "drawn"
    """What ratios are against where answers are trained on several times or later: the log-probabilities of the draw, or those that
    training computes with the same weights, in a further pass; then importance weights correct for the difference of the two."""
    rollout_staleness: Annotated[SmallCount, _DRAWS] = 0
    """Answers are drawn so many steps before they are trained on, by the weights of then."""
    redraw_equal_rewards: Annotated[SmallCount, _DRAWS] = 0
    """Prompts whose answers all have one reward teach nothing: others are drawn in their place, in at most so many rounds (DAPO)."""
    reward_timeout_s: Annotated[Seconds, "above 0", _DRAWS] = 30.0
    """Seconds that a reward of one answer may take; it is worth nothing after that, and left out of the step."""
    reward_workers: Annotated[PositiveCount, _DRAWS] = 2
    """Rewards of Python functions, steps of environments, and requests to servers of them, that are computed at a time."""
    code_timeout_s: Annotated[Seconds, "above 0", _RUNS_CODE] = 5.0
    """Seconds that a test of `--rewards code` may take; it has failed after that."""
    code_memory_gigabytes: Annotated[Gigabytes, "above 0", _RUNS_CODE] = 1.0
    """Memory of each process of a test of `--rewards code`."""
    code_without_isolation: Annotated[bool, _RUNS_CODE] = False
    """Let code of `--rewards code` see the files and the network of this machine, where the system does not let it be isolated."""
    rollout_log_gigabytes: Annotated[Factor, _DRAWS] = 1.0
    """Disk space for answers with their rewards, in `rollouts` of the run folder; the oldest are removed. 0 writes none."""
    rollout_sequences: Annotated[PositiveCount, _DRAWS] = 256
    """Answers that are drawn at a time on each data-parallel rank, if its memory suffices."""
    rollout_keep_engine: Annotated[bool, _DRAWS] = False
    """Keep the cache of the engine, and its captured steps, while training: rounds of drawing begin sooner, and training has less
    memory."""
    rollout_ranks: Annotated[SmallCount, "at least 0", _DRAWS] = 0
    """Ranks, the last ones, that draw while the others train, in a layout of their own, for steps that `--rollout-staleness` says. They are
    not among the ranks of the layout of training, and --nproc-per-node counts both."""
    rollout_in_flight: Annotated[bool, used_with("rollout.rollout_ranks")] = False
    """Hand weights over to ranks that draw between two tokens, also of answers that have begun. Nobody waits for the longest answer, and
    which weights draw a token depends on time, so no two runs are the same."""
    rollout_tensor_model_parallel_size: Annotated[RankCount, "at least 1", _DRAWS] | None = None
    """Tensor-parallel ranks while answers are drawn; weights are handed over to this layout for each round of drawing. Unset, as are the
    next two: that of training, where weights stay in place."""
    rollout_pipeline_model_parallel_size: Annotated[RankCount, "at least 1", _DRAWS] | None = None
    """Pipeline ranks while answers are drawn. All ranks that are left are data-parallel ones, which draw answers to other prompts."""
    rollout_expert_model_parallel_size: Annotated[RankCount, "at least 1", _DRAWS] | None = None
    """Expert-parallel ranks while answers are drawn."""
    eval_prompts: tuple[FilePath, ...] = ()
    """Files of prompts that are answered and rewarded in evaluations, and not trained on."""
    eval_rollouts: Annotated[PositiveCount, _EVALUATES] = 1
    """Answers to each prompt of an evaluation; with several, the share of prompts with a right one among k is told too."""
    eval_rollout_temperature: Annotated[Factor, _EVALUATES] = 0.0
    """Temperature of answers in evaluations; 0: greedy."""
    eval_rollout_interval: Annotated[IterationCount, "at least 1", _EVALUATES] | None = None
    """Iterations between evaluations of `--eval-prompts`. Unset: those of `--eval-interval`."""
    correct_reward: Annotated[Factor, _EVALUATES] = 1.0
    """The reward from which on an answer of an evaluation is right."""
