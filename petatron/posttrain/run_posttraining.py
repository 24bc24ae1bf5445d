"""Runs reinforcement learning on this rank: a training run whose samples are answers that it draws itself."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.checkpoint.stateful_components import Stateful
from petatron.config import LoadedConfig
from petatron.config.rollout_layout import drawing_config
from petatron.config.schema.run import RunConfig
from petatron.data.conversations.end_of_turn import end_of_turn_id
from petatron.data.prompt.prompt_encoder import PromptEncoder
from petatron.data.tokenizer import Tokenizer
from petatron.infer.stop_ids import find_stop_ids
from petatron.mesh import collectives
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.distillation import Distill
from petatron.models.objective import build_objective
from petatron.models.policy_gradient import PolicyGradient
from petatron.parallel.parallel_model import ParallelModel
from petatron.posttrain.answer_judge import AnswerJudge
from petatron.posttrain.critic import Critic
from petatron.posttrain.drawing_ranks.distant_drawing import DistantDrawing, DistantLoader, DistantSampler
from petatron.posttrain.drawing_ranks.draw_for_others import DrawingForOthers
from petatron.posttrain.drawing_ranks.messages import MessageAxis, OrderQueue
from petatron.posttrain.environment_turns import EnvironmentTurns
from petatron.posttrain.environments.environment import EnvironmentProperties
from petatron.posttrain.environments.environment_pool import EnvironmentPool
from petatron.posttrain.environments.environment_spec import environment_backend
from petatron.posttrain.handover.drawing_model import ReceivedModel, open_drawing_model
from petatron.posttrain.handover.weight_handover import WeightHandover
from petatron.posttrain.prompt_evaluation import PromptEvaluator, prompt_groups
from petatron.posttrain.prompts import PromptSet, read_prompt_files
from petatron.posttrain.rewards.code_rewards import check_sandbox
from petatron.posttrain.rewards.code_sandbox import SandboxLimits
from petatron.posttrain.rewards.model_rewards import RewardModel
from petatron.posttrain.rewards.reward_spec import RewardSpec, parse_rewards
from petatron.posttrain.rewards.reward_sum import RewardSum
from petatron.posttrain.rewards.rollout_rewards import RolloutRewards
from petatron.posttrain.rollout_batches import RolloutPacking
from petatron.posttrain.rollout_engine import RolloutEngine
from petatron.posttrain.rollout_loader import RolloutLoader
from petatron.posttrain.rollout_log import RolloutLog
from petatron.posttrain.rollout_sampler import RolloutSampler
from petatron.posttrain.rollout_state import RolloutState
from petatron.pretrained.launch_and_build_model import build_initial_model, join_ranks
from petatron.train.build_run import DataLoaders
from petatron.train.check_and_open_run import RunStart, check_start
from petatron.train.report.task_evaluation import IterationEvaluator
from petatron.train.run_training import build_watchdog, log_directory, run_training
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainingResult

_GIGABYTE = 1 << 30


def run_posttraining(loaded: LoadedConfig, *, subcommands: Collection[str] = ()) -> TrainingResult | None:
    """Trains on drawn answers as configured; every rank calls it. Prompts and rewards are checked before anything is built.

    Ranks that draw while others train return None.
    """
    environment = read_environment()
    if environment.rank < loaded.config.parallel.world_size:
        return run_training(loaded, subcommands=subcommands, open_source=RolloutSource)
    for number in (signal.SIGTERM, signal.SIGINT):  # ranks that train save first, and then end this one
        signal.signal(number, signal.SIG_IGN)
    source = RolloutSource(check_start(loaded))
    common = join_ranks(source.run)
    first = source.run.parallel.world_size
    layout = Layout.from_config(drawing_config(source.run).parallel)
    mesh = ParallelMesh(layout, environment.rank - first, first_rank=first, **common)
    with build_watchdog(mesh, timeout_minutes=common["timeout_minutes"]):
        source.draw_for_others(mesh)
    return None


class RolloutSource:
    """The `RunSource` of a run: its prompts and rewards, and the state of its rollouts."""

    def __init__(self, start: RunStart) -> None:
        run, tokenizer = start.loaded.config, start.tokenizer
        self.run, objective = run, build_objective(run)
        if run.rollout.rollout_ranks and isinstance(objective, PolicyGradient) and objective.kl_in_reward:
            rule = "is computed by a reference that ranks which draw alone do not have"
            fix = "Use kl_weight, or leave --rollout-ranks out."
            raise ConfigError([Problem("--objective-settings", f"kl_in_reward={objective.kl_in_reward}", rule, fix)])
        if not isinstance(objective, PolicyGradient | Distill):
            rule = "is no objective of drawn answers"
            fix = "Use policy-gradient or distill, or leave it out."
            raise ConfigError([Problem("--objective", str(run.train.objective), rule, fix)])
        if isinstance(objective, Distill) and objective.stored:
            rule = "is of the rows of files, and answers are drawn anew"
            raise ConfigError(
                [Problem("--objective-settings", f"stored={objective.stored}", rule, "Give teacher=FOLDER.")]
            )
        if not run.rollout.rollout_prompts:
            fix = "Give a file of prompts."
            raise ConfigError([Problem("--rollout-prompts", "", "is missing: nothing is to be answered", fix)])
        if tokenizer is None:
            raise ConfigError(
                [Problem("--tokenizer-model", "", "is missing: rewards read texts", "Give the model's tokenizer.")]
            )
        self._tokenizer: Tokenizer = tokenizer
        self._environment = environment_backend(run.rollout, tokenizer)
        rewarded = self._environment is not None or isinstance(build_objective(run), Distill)
        needed = run.rollout.rewards or not rewarded or (run.rollout.eval_prompts and self._environment is None)
        self._rewards: list[RewardSpec] = parse_rewards(run.rollout.rewards) if needed else []
        self._sandbox = SandboxLimits(
            seconds=run.rollout.code_timeout_s,
            memory_bytes=int(run.rollout.code_memory_gigabytes * _GIGABYTE),
            isolated=not run.rollout.code_without_isolation,
        )
        if any(spec.tests_key for spec in self._rewards):
            check_sandbox(self._sandbox)
        self._properties = EnvironmentProperties()
        if self._environment is not None:
            self._properties = self._environment.properties
            self._environment.close()  # rank 0 alone uses it, when it draws
        self._prompts = self._read(run, run.rollout.rollout_prompts, "--rollout-prompts")
        self._held_out = (
            self._read(run, run.rollout.eval_prompts, "--eval-prompts") if run.rollout.eval_prompts else None
        )
        self._state = RolloutState()
        self._critic: Critic | None = None
        self._loader: RolloutLoader | None = None

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def components(self, state: TrainState) -> Sequence[Stateful]:
        if state.run.rollout.advantage == "gae":
            self._critic = Critic(state.run, state.mesh, init_weights=state.weights_initialized)
        return [self._state, *(() if self._critic is None else self._critic.components())]

    def open(self, state: TrainState, tokenizer: Tokenizer | None) -> tuple[DataLoaders, IterationEvaluator | None]:
        run, settings, mesh = state.run, state.run.rollout, state.mesh
        if self._critic is not None:
            self._critic.start()
        rewards = self._open_rewards(run, mesh, state.model)
        log = RolloutLog(log_directory(run), gigabytes=settings.rollout_log_gigabytes)
        multiple = mesh.pp.size if state.model.plan.virtual > 1 else 1
        packing = RolloutPacking(run, mesh.dp, micro_batch_multiple=multiple)
        judge = AnswerJudge(settings, state.model, self._critic, packing)
        options: dict[str, Any] = {
            "judge": judge,
            "packing": packing,
            "iteration": lambda: state.progress.iteration,
        }
        if settings.rollout_ranks:
            everyone = open_everyone(mesh, run)
            handover = WeightHandover(state.model, None, everyone, ranks_per_node=read_environment().local_world_size)
            axis = MessageAxis(everyone, run.parallel.world_size, str(log_directory(run)))
            drawing = DistantDrawing(
                axis,
                handover,
                self._state,
                iteration=options["iteration"],
                in_flight=settings.rollout_in_flight,
            )
            sampler: Any = DistantSampler(drawing)
            options["drawing"], loader_class = drawing, DistantLoader
        else:
            model = open_drawing_model(run, state.model, iteration=options["iteration"])
            engine = RolloutEngine(run, model, self._tokenizer, longest=self._longest(run))
            sampler, loader_class = self._open_sampler(run, mesh, engine, state.model.spec.vocab_size), RolloutLoader
        self._loader = loader_class(run, mesh, self._prompts, sampler, rewards, self._state, log, **options)
        evaluator = None
        if self._held_out is not None:
            interval = settings.eval_rollout_interval or run.train.eval_interval
            evaluator = PromptEvaluator(settings, self._held_out, sampler, rewards, interval=interval)
        return DataLoaders(train=self._loader, valid={}, test=None), evaluator

    def draw_for_others(self, mesh: ParallelMesh) -> None:
        """Draws on this rank, one of `--rollout-ranks`, until those that train have ended."""
        run, settings = drawing_config(self.run), self.run.rollout
        model = build_initial_model(run, mesh, init_weights=False, gradients=False)
        everyone = open_everyone(mesh, self.run)
        handover = WeightHandover(None, model, everyone, ranks_per_node=read_environment().local_world_size)
        axis = MessageAxis(everyone, mesh.first_rank, "")
        received = ReceivedModel(model, handover)
        engine = RolloutEngine(run, received, self._tokenizer, longest=self._longest(run))
        sampler = self._open_sampler(run, mesh, engine, model.spec.vocab_size)
        log = RolloutLog(Path(axis.folder), gigabytes=settings.rollout_log_gigabytes)
        packing = RolloutPacking(run, mesh.dp, micro_batch_multiple=1)
        loader = self._loader = RolloutLoader(
            run,
            mesh,
            self._prompts,
            sampler,
            self._open_rewards(run, mesh, model),
            self._state,
            log,
            judge=AnswerJudge(settings, model, None, packing),
            packing=packing,
            iteration=lambda: 0,
        )
        drawing = DrawingForOthers(
            axis,
            OrderQueue(axis, mesh),
            received,
            engine,
            loader,
            sampler,
            self._state,
            held_out=[] if self._held_out is None else prompt_groups(self._held_out),
            in_flight=settings.rollout_in_flight,
        )
        try:
            drawing.serve()
        finally:
            self.close()

    def _open_sampler(
        self, run: RunConfig, mesh: ParallelMesh, engine: RolloutEngine, vocab_size: int
    ) -> RolloutSampler:
        start = run.checkpoint.pretrained_checkpoint
        if start is not None:
            stop_ids = find_stop_ids(Path(start), self._tokenizer, vocab_size=vocab_size)
        else:
            stop_ids = () if self._tokenizer.eod is None else (self._tokenizer.eod,)
        end_of_turn = end_of_turn_id(self._tokenizer)
        stop_ids = tuple({*stop_ids, *(() if end_of_turn is None else (end_of_turn,))})
        return RolloutSampler(run, engine, self._tokenizer, stop_ids, self._open_environment(run, mesh))

    def _open_rewards(self, run: RunConfig, mesh: ParallelMesh, model: ParallelModel) -> RolloutRewards:
        settings = self.run.rollout
        reward_sum = RewardSum(
            self._rewards,
            workers=settings.reward_workers,
            timeout_s=settings.reward_timeout_s,
            sandbox=self._sandbox,
        )
        multiple = mesh.pp.size if model.plan.virtual > 1 else 1
        models = [
            (spec.weight, RewardModel(run, model, spec.folder, micro_batch_multiple=multiple))
            for spec in self._rewards
            if spec.folder
        ]
        return RolloutRewards(mesh, reward_sum, models)

    def _open_environment(self, run: RunConfig, mesh: ParallelMesh) -> EnvironmentTurns | None:
        if self._environment is None:
            return None
        pool = EnvironmentPool(self._environment, workers=run.rollout.reward_workers)
        limits = {"seed": run.train.seed, "max_ids": run.model.seq_length + 1}
        return EnvironmentTurns(mesh, pool, self._tokenizer, self._properties, **limits)

    def _longest(self, run: RunConfig) -> int:
        """Returns the most tokens of a prompt with its answer; episodes of several turns may fill a row."""
        most = run.model.seq_length + 1
        if self._environment is not None:
            return most
        sets = [self._prompts, *([] if self._held_out is None else [self._held_out])]
        longest = max(len(prompt.ids) for prompts in sets for prompt in prompts.prompts)
        return min(most, longest + run.rollout.max_answer_tokens)

    def _read(self, run: RunConfig, paths: tuple[str, ...], flag: str) -> PromptSet:
        encoder, settings = PromptEncoder(self._tokenizer), run.rollout
        if settings.rollout_chat and not encoder.has_template:
            rule = "needs a chat template, and the tokenizer has none"
            raise ConfigError([Problem("--rollout-chat", "", rule, "Leave it out: prompts are plain texts then.")])
        # The last id of an answer is no input.
        max_ids = run.model.seq_length + 1 - settings.max_answer_tokens
        return read_prompt_files(
            paths, encoder, chat=settings.rollout_chat, max_ids=max_ids, flag=flag, tools=self._properties.tools
        )


def open_everyone(mesh: ParallelMesh, run: RunConfig) -> ParallelMesh:
    """Returns the mesh of the ranks that train and those that draw; each of them calls it."""
    everyone = mesh.of_all_ranks(run.parallel.world_size + run.rollout.rollout_ranks, label="everyone")
    collectives.barrier(everyone.control)  # others may still load their weights, for longer than a device waits
    everyone.create_groups(["world"])
    return everyone
