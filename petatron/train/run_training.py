"""Runs a whole training run on this rank: opens everything, reports every problem, then trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from petatron.base.device import DeviceInfo, detect_device
from petatron.base.errors import ConfigError, DataError, PetatronError, TrainError
from petatron.base.log import get_logger
from petatron.base.safe_files import write_atomic
from petatron.config import LoadedConfig, RunConfig
from petatron.config.checks.preflight import preflight
from petatron.config.saved_config import saved_yaml, without_private_paths
from petatron.data.tokenizer import Tokenizer
from petatron.estimate.memory.forecast import recompute_plans, shared_device_problem
from petatron.history.metrics_file import METRICS_FILE
from petatron.history.run_settings import CONFIG_FILE
from petatron.mesh import collectives
from petatron.mesh.diagnose.watchdog import Watchdog
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rendezvous import Rendezvous
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.train.build_run import DataLoaders, build_loaders, launch, open_tokenizer
from petatron.train.loop import TrainingResult, TrainLoop
from petatron.train.report.closing_summary import summary_record
from petatron.train.report.environment_facts import environment_facts
from petatron.train.report.memory_capacity import check_memory_capacity
from petatron.train.report.metrics import MetricSink, event_record
from petatron.train.report.next_commands import next_commands
from petatron.train.report.out_of_memory import report_out_of_memory
from petatron.train.report.run_header import RunHeader
from petatron.train.report.run_history import read_history
from petatron.train.report.sinks import build_sinks
from petatron.train.report.text_samples import SamplePrompt, TextSampler, read_prompts
from petatron.train.state.run_dirs import check_run_dirs, lock_save_dir
from petatron.train.state.train_state import TrainState

_log = get_logger(__name__)
Result = TypeVar("Result")


def run_training(loaded: LoadedConfig, *, verbs: Collection[str] = ()) -> TrainingResult:
    """Trains as configured; every rank calls it. Nothing is computed before files, folders and data are checked.

    `verbs` are those of the command line, which the closing summary may advise.

    >>> import contextlib, io, tempfile
    >>> from petatron.config import load_config
    >>> flags = f"--mock-data --lr 1e-3 --train-iters 2 --eval-iters 0 --save {tempfile.mkdtemp()} --live off".split()
    >>> with contextlib.redirect_stdout(io.StringIO()) as lines:
    ...     outcome = run_training(load_config(flags, preset="tiny-llama"))
    >>> outcome.iteration, "lm loss" in lines.getvalue()
    (2, True)
    """
    started_s = time.monotonic()
    problems = preflight(loaded.config)
    if problems:
        raise ConfigError(problems)
    check_run_dirs(loaded.config.checkpoint)
    loaded, tokenizer = open_tokenizer(loaded)
    prompts = read_prompts(loaded.config, tokenizer)
    device = detect_device(loaded.config.train.device)
    check_memory_capacity(loaded.config, device, local_ranks=read_environment().local_world_size)
    header = RunHeader(loaded.config, device, recompute_plans(loaded.config, device=device.kind))
    _check_shared_device(loaded.config)
    for notice in loaded.notices:
        _log.info("note: %s", notice)
    with lock_save_dir(loaded.config.checkpoint.save, rank=read_environment().rank):
        mesh = launch(loaded.config)
        with build_watchdog(mesh, timeout_minutes=loaded.config.parallel.distributed_timeout_minutes):
            start = _Start(loaded, tokenizer, prompts, header, started_s, verbs)
            return _build_and_run(start, mesh)


@dataclass(frozen=True, slots=True)
class _Start:
    """What is known of a start before its ranks have met."""

    loaded: LoadedConfig
    tokenizer: Tokenizer | None
    prompts: list[SamplePrompt]
    header: RunHeader
    started_s: float
    """The process's start on the monotonic clock."""
    verbs: Collection[str]


def build_watchdog(mesh: ParallelMesh, *, timeout_minutes: float) -> Watchdog:
    """Builds the watchdog of this rank's communication."""
    environment, device = read_environment(), mesh.device
    busy = (lambda: not torch.cuda.current_stream(device).query()) if mesh.backend == "nccl" else None
    # Our own launcher ends the other ranks of its machine.
    peers = partial(Rendezvous, environment) if environment.store_file is None else None
    return Watchdog(mesh.record, timeout_s=60 * timeout_minutes, device_busy=busy, connect_peers=peers)


def _build_and_run(start: _Start, mesh: ParallelMesh) -> TrainingResult:
    run, tokenizer = start.loaded.config, start.tokenizer
    with report_out_of_memory(run, mesh.device, phase=lambda: "building the model"):
        state = TrainState.build_for_load(run, mesh, tokenizer)
    with report_out_of_memory(run, mesh.device, phase=lambda: "loading the checkpoint"):
        resumed = run.checkpoint.load is not None and state.load(run.checkpoint.load)
        pretrained = None if resumed else run.checkpoint.pretrained_checkpoint
        if pretrained is not None:
            state.load_pretrained_weights(pretrained)
    length = state.run_length()
    loaders = _build_on_rank_zero_first(
        mesh.control,
        lambda: build_loaders(run, mesh, tokenizer, train_samples=length.samples),
        local_rank=read_environment().local_rank,
    )
    headline = start.header.lines(length, tokenizer)
    if resumed:
        how = "weights" if run.checkpoint.finetune else f"resumed at iteration {state.progress.iteration}"
        headline.append(f"{how} from {run.checkpoint.load}")
        headline += [f"changed since the checkpoint: {change}" for change in state.resume_changes]
    if pretrained is not None:
        headline.append(f"first weights from {pretrained}")
    headline += state.record_data_fingerprint(loaders.train.dataset.fingerprint)
    return _run_loop(start, state, loaders, header_lines=headline)


def _run_loop(start: _Start, state: TrainState, loaders: DataLoaders, *, header_lines: list[str]) -> TrainingResult:
    """Opens the sinks, writes the settings next to the metrics, trains, and writes the closing summary.

    The first record of a start has the origins of settings and the environment, for whoever reads the run later.
    """
    run, mesh = state.run, state.mesh
    directory, began_at = log_directory(run), state.progress.iteration
    device = detect_device(run.train.device, local_rank=read_environment().local_rank // run.launch.ranks_per_device)
    sinks = build_sinks(
        run.log,
        directory,
        mesh.rank,
        config_values=_config_values(run),
        on_gpu=device.kind == "cuda",
        resumed_iteration=began_at,
    )
    try:
        if mesh.rank == 0:
            _write_config(directory / CONFIG_FILE, saved_yaml(start.loaded))
        _write_header(start, sinks, header_lines, device, iteration=began_at)
        loop = TrainLoop(state, loaders, sinks, device, started_s=start.started_s, sampler=_build_sampler(start, state))
        with report_out_of_memory(run, mesh.device, phase=lambda: f"iteration {state.progress.iteration + 1}"):
            return _run_to_summary(start, loop, sinks, directory)
    finally:
        for sink in sinks:
            sink.close()


def _write_header(
    start: _Start, sinks: Sequence[MetricSink], header_lines: Sequence[str], device: DeviceInfo, *, iteration: int
) -> None:
    origins = {path: str(origin) for path, origin in start.loaded.origins.items() if origin.is_explicit}
    facts: Mapping[str, Any] = {"environment": environment_facts(device), "origins": origins}
    records = [event_record(text, iteration=iteration) for text in header_lines]
    records += [event_record(text, iteration=iteration, detail=True) for text in start.header.details()]
    records[0] |= facts
    for sink in sinks:
        for record in records:
            sink.write(record)


def _build_sampler(start: _Start, state: TrainState) -> TextSampler | None:
    if not start.prompts or start.tokenizer is None:
        return None
    return TextSampler(state.model, start.tokenizer, start.prompts, state.run.log, seed=state.run.train.seed)


def _run_to_summary(start: _Start, loop: TrainLoop, sinks: Sequence[MetricSink], directory: Path) -> TrainingResult:
    """Trains, and writes the summary however it ends; of a failure only to the log, since its own report follows on the console."""
    write_summary = partial(_write_summary, start, loop, sinks, directory)
    try:
        result = loop.run()
    except BaseException as error:
        with contextlib.suppress(Exception):  # the original failure is the one to report
            if isinstance(error, KeyboardInterrupt):
                write_summary("interrupted")
            else:
                write_summary(f"failed: {type(error).__name__}", detail=True)
        raise
    write_summary(result.stop_reason or "complete")
    return result


def _write_summary(
    start: _Start, loop: TrainLoop, sinks: Sequence[MetricSink], directory: Path, outcome: str, **facts: Any
) -> None:
    if not sinks:
        return
    run, totals, environment = start.loaded.config, loop.totals, read_environment()
    commands = next_commands(
        run,
        verbs=start.verbs,
        log_dir=directory,
        train_iters=loop.train_iters,
        complete=totals.iteration >= loop.train_iters,
        saved=totals.saved_iteration is not None,
        launcher=environment.launcher if environment.store_file is None else "single",
    )
    earlier = read_history(directory / METRICS_FILE, up_to_iteration=totals.first_iteration, every_point=False)
    record = summary_record(
        totals,
        run,
        outcome=outcome,
        train_iters=loop.train_iters,
        duration_s=time.monotonic() - start.started_s,
        log_dir=directory,
        earlier_validations=earlier.valid,
        next_commands=commands,
    )
    for sink in sinks:
        sink.write({**record, **facts})


def _write_config(path: Path, config_yaml: str) -> None:
    """Replaces whatever exists: an earlier run's settings, or a link that came with the folder."""
    try:
        write_atomic(path, config_yaml)
    except OSError as error:
        raise TrainError(
            f"Cannot write {path}: {error.strerror}. Settings are always kept; choose a writable --log-dir."
        ) from error


def _check_shared_device(run: RunConfig) -> None:
    """Checks that ranks sharing a GPU on purpose fit into it, and warns that their speed is not representative."""
    facts, ranks = detect_device(run.train.device), run.launch.ranks_per_device
    if ranks == 1 or facts.kind != "cuda":
        return
    problem = shared_device_problem(run, memory_bytes=facts.memory_bytes)
    if problem is not None:
        raise ConfigError([problem])
    _log.info("note: %d ranks share each GPU (--ranks-per-device): results are real, speed means nothing", ranks)


def log_directory(run: RunConfig) -> Path:
    """Returns the folder of metrics and the resolved config."""
    chosen = run.log.log_dir or run.checkpoint.save
    return Path(chosen) if chosen else Path("runs") / time.strftime("%Y%m%d-%H%M%S")


def _config_values(run: RunConfig) -> Mapping[str, Any]:
    return {key: value for section in asdict(without_private_paths(run)).values() for key, value in section.items()}


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
        texts = collectives.all_gather_objects(str(failure) if failure else None, world)
        if failure is not None:
            raise failure
        text = next((text for text in texts if text is not None), None)
        if text is not None:
            raise DataError(text)
    return build() if result is None else result
