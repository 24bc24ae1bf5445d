"""Opens a run: everything that can be refused is checked, then model, optimizer and data are built and a checkpoint is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from petatron.base.device import DeviceInfo, detect_device
from petatron.base.errors import ConfigError, DataError, PetatronError, raise_problems
from petatron.base.log import get_logger
from petatron.checkpoint.stateful_components import Stateful
from petatron.config import LoadedConfig, RunConfig
from petatron.config.schema.objective_and_dataset_names import EXTERNAL
from petatron.data.build_datasets import chosen_kind
from petatron.data.external_loader import registered_dataloader
from petatron.data.tokenizer import Tokenizer
from petatron.data.transformers_tokenizer import missing_for_transformers
from petatron.estimate.memory.forecast import recompute_plans, shared_device_problem
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.train.build_run import DataLoaders, build_loaders
from petatron.train.hooks.megatron_copies import megatron_copy_problems
from petatron.train.report.log_records import MetricWriter
from petatron.train.report.memory_capacity_and_oom import check_memory_capacity, report_out_of_memory
from petatron.train.report.run_header import RunHeader
from petatron.train.report.task_evaluation import IterationEvaluator, TaskEvaluator, read_eval_tasks
from petatron.train.report.text_samples import SamplePrompt, TextSampler, read_prompts
from petatron.train.state.check_run_dirs import check_run_dirs
from petatron.train.state.optional_components import check_components
from petatron.train.state.train_state import TrainState
from petatron.train.stored_role_outputs import attach_stored_outputs
from petatron.train.training_loop import TrainLoop
from petatron.validate.preflight import preflight

if TYPE_CHECKING:
    from petatron.evaluate.task_list import TaskSettings

_log = get_logger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RunStart:
    """What is known of a start before its ranks have met."""

    loaded: LoadedConfig
    tokenizer: Tokenizer | None
    prompts: list[SamplePrompt]
    eval_tasks: list[TaskSettings]
    header: RunHeader
    started_s: float
    """The process's start on the monotonic clock."""


class RunSource(Protocol):
    """What a run trains on where that is no dataset, such as answers that the model draws itself."""

    def components(self, state: TrainState) -> Sequence[Stateful]:
        """Returns its state, which checkpoints save and restore, for a run whose weights are not loaded yet; every rank calls it."""
        ...

    def open(self, state: TrainState, tokenizer: Tokenizer | None) -> tuple[DataLoaders, IterationEvaluator | None]:
        """Opens it for a run whose weights are loaded; every rank calls it."""
        ...

    def close(self) -> None:
        """Ends what it has started, however the run has ended."""
        ...


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that can train: its state, its data, and what the first lines of its log say."""

    state: TrainState
    loaders: DataLoaders
    device: DeviceInfo
    sampler: TextSampler | None
    task_evaluator: IterationEvaluator | None
    header_lines: list[str]

    def build_loop(self, writers: Sequence[MetricWriter], *, started_s: float | None = None) -> TrainLoop:
        return TrainLoop(
            self.state,
            self.loaders,
            writers,
            self.device,
            started_s=started_s,
            sampler=self.sampler,
            task_evaluator=self.task_evaluator,
        )


def check_start(loaded: LoadedConfig) -> RunStart:
    """Checks files, folders, tokenizer, prompts and memory; nothing is built."""
    started_s = time.monotonic()
    problems = [*preflight(loaded.config), *megatron_copy_problems(loaded.config)]
    raise_problems(problems)
    check_run_dirs(loaded.config.checkpoint)
    loaded, tokenizer = open_tokenizer(loaded)
    run = loaded.config
    if run.checkpoint.save is not None and tokenizer is not None and (note := missing_for_transformers(tokenizer)):
        _log.warning("Checkpoints: %s", note)
    if run.data.dataloader_type == EXTERNAL:
        registered_dataloader()
    else:
        chosen_kind(run)  # what is wrong with the objective or the dataset's settings is told before anything is built
    check_components(run)
    prompts, eval_tasks = read_prompts(run, tokenizer), read_eval_tasks(run)
    device = detect_device(run.train.device)
    check_memory_capacity(run, device, local_ranks=read_environment().local_world_size)
    header = RunHeader(run, device, recompute_plans(run, device=device.kind))
    _check_shared_device(run)
    return RunStart(loaded, tokenizer, prompts, eval_tasks, header, started_s)


def open_run(start: RunStart, mesh: ParallelMesh, source: RunSource | None = None) -> OpenedRun:
    """Builds the state, loads what the run starts from, and opens its data, or its source in their place; every rank calls it."""
    run, tokenizer = start.loaded.config, start.tokenizer
    with report_out_of_memory(run, mesh.device, phase=lambda: "building the model"):
        state = TrainState.build_for_load(run, mesh, tokenizer)
        if source is not None:
            for component in source.components(state):
                state.add(component)
    with report_out_of_memory(run, mesh.device, phase=lambda: "loading the checkpoint"):
        resumed = run.checkpoint.load is not None and state.load(run.checkpoint.load)
        pretrained = None if resumed else run.checkpoint.pretrained_checkpoint
        if pretrained is not None:
            state.load_pretrained_weights(pretrained)
    length, environment = state.run_length(), read_environment()
    sampler, task_evaluator = None, None
    if source is not None:
        loaders, task_evaluator = source.open(state, tokenizer)
    else:
        loaders = _build_on_rank_zero_first(
            mesh.control,
            lambda: build_loaders(run, mesh, tokenizer, train_samples=length.samples),
            local_rank=environment.local_rank,
        )
        attach_stored_outputs(run, state.model, loaders, train_samples=length.samples)
    headline = start.header.lines(length, tokenizer)
    if resumed:
        how = "weights" if run.checkpoint.finetune else f"resumed at iteration {state.progress.iteration}"
        headline.append(f"{how} from {run.checkpoint.load}")
        headline += [f"changed since the checkpoint: {change}" for change in state.resume_changes]
    if pretrained is not None:
        headline.append(f"first weights from {pretrained}")
    headline += state.attach_loader(loaders.train)
    device = detect_device(run.train.device, local_rank=environment.local_rank // run.launch.ranks_per_device)
    interval = run.train.eval_tasks_interval or run.train.eval_interval
    if start.prompts and tokenizer is not None:
        sampler = TextSampler(state.model, tokenizer, start.prompts, run.log, seed=run.train.seed)
    if start.eval_tasks and tokenizer is not None and interval is not None:
        task_evaluator = TaskEvaluator(state.model, tokenizer, start.eval_tasks, interval=interval)
    return OpenedRun(state, loaders, device, sampler, task_evaluator, headline)


def _check_shared_device(run: RunConfig) -> None:
    """Checks that ranks sharing a GPU on purpose fit into it, and warns that their speed is not representative."""
    device, ranks = detect_device(run.train.device), run.launch.ranks_per_device
    if ranks == 1 or device.kind != "cuda":
        return
    problem = shared_device_problem(run, memory_bytes=device.memory_bytes)
    if problem is not None:
        raise ConfigError([problem])
    _log.info("note: %d ranks share each GPU (--ranks-per-device): results are real, speed means nothing", ranks)


def _build_on_rank_zero_first(world: Axis, build: Callable[[], Result], *, local_rank: int) -> Result:
    """Builds on rank 0 first, which fills caches, then on one rank of each other node, whose disk may be local, then on the others.

    If one of the first fails, every rank reports why.
    """
    turn = 0 if world.rank == 0 else 1 if local_rank == 0 else 2
    result = None
    for now in (0, 1):
        failure = None
        if turn == now:
            try:
                result = build()
            except PetatronError as error:
                failure = error
        texts = all_gather_json(str(failure) if failure else None, world)
        if failure is not None:
            raise failure
        text = next((text for text in texts if text is not None), None)
        if text is not None:
            raise DataError(text)
    return build() if result is None else result
