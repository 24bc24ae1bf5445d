"""Runs a whole training run on this rank: opens everything, reports every problem, then trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from petatron.base.device import detect_device
from petatron.base.errors import ConfigError, DataError, PetatronError, TrainError
from petatron.base.log import get_logger
from petatron.base.safe_files import write_atomic
from petatron.base.text import count_with_noun
from petatron.config import LoadedConfig, RunConfig
from petatron.config.checks.preflight import preflight
from petatron.config.saved_config import saved_yaml, without_private_paths
from petatron.data.tokenizer import Tokenizer
from petatron.estimate.flops import parameter_count
from petatron.estimate.memory.forecast import recompute_plans, shared_device_problem
from petatron.history.run_settings import CONFIG_FILE
from petatron.mesh import collectives
from petatron.mesh.diagnose.watchdog import Watchdog
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rendezvous import Rendezvous
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.models.registry import model_spec
from petatron.train.build_run import DataLoaders, RunLength, build_loaders, launch, open_tokenizer
from petatron.train.global_batch_size import BatchSizeSchedule
from petatron.train.loop import TrainingResult, TrainLoop
from petatron.train.report.environment_facts import environment_facts
from petatron.train.report.metrics import event_record
from petatron.train.report.out_of_memory import report_out_of_memory
from petatron.train.report.sinks import build_sinks
from petatron.train.state.run_dirs import check_run_dirs, lock_save_dir
from petatron.train.state.train_state import TrainState

_log = get_logger(__name__)
Result = TypeVar("Result")


def run_training(loaded: LoadedConfig) -> TrainingResult:
    """Trains as configured; every rank calls it. Nothing is computed before files, folders and data are checked.

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
    plans = recompute_plans(loaded.config, device=detect_device(loaded.config.train.device).kind)
    _check_shared_device(loaded.config)
    for notice in loaded.notices:
        _log.info("note: %s", notice)
    for number, plan in enumerate(plans):
        _log.info("stage %d: %s", number, plan.describe())
    with lock_save_dir(loaded.config.checkpoint.save, rank=read_environment().rank):
        mesh = launch(loaded.config)
        with build_watchdog(mesh, timeout_minutes=loaded.config.parallel.distributed_timeout_minutes):
            return _build_and_run(loaded, mesh, tokenizer, started_s=started_s)


def build_watchdog(mesh: ParallelMesh, *, timeout_minutes: float) -> Watchdog:
    """Builds the watchdog of this rank's communication."""
    environment, device = read_environment(), mesh.device
    busy = (lambda: not torch.cuda.current_stream(device).query()) if mesh.backend == "nccl" else None
    # Our own launcher ends the other ranks of its machine.
    peers = partial(Rendezvous, environment) if environment.store_file is None else None
    return Watchdog(mesh.record, timeout_s=60 * timeout_minutes, device_busy=busy, connect_peers=peers)


def _build_and_run(
    loaded: LoadedConfig, mesh: ParallelMesh, tokenizer: Tokenizer | None, *, started_s: float
) -> TrainingResult:
    run = loaded.config
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
    headline = [_run_summary(run, length, mesh, tokenizer)]
    if resumed:
        how = "weights" if run.checkpoint.finetune else f"resumed at iteration {state.progress.iteration}"
        headline.append(f"{how} from {run.checkpoint.load}")
        headline += [f"changed since the checkpoint: {change}" for change in state.resume_changes]
    if pretrained is not None:
        headline.append(f"first weights from {pretrained}")
    headline += state.record_data_fingerprint(loaders.train.dataset.fingerprint)
    settings = saved_yaml(loaded)
    origins = {path: str(origin) for path, origin in loaded.origins.items() if origin.is_explicit}
    return _run_loop(state, loaders, config_yaml=settings, header_lines=headline, origins=origins, started_s=started_s)


def _run_loop(
    state: TrainState,
    loaders: DataLoaders,
    *,
    config_yaml: str,
    header_lines: list[str],
    origins: Mapping[str, str],
    started_s: float,
) -> TrainingResult:
    """Opens the sinks, writes the settings next to the metrics, and trains.

    The first record of a start has the origins of settings and the environment, for whoever reads the run later.
    """
    run, mesh = state.run, state.mesh
    directory = log_directory(run)
    sinks = build_sinks(run.log, directory, mesh.rank, config_values=_config_values(run))
    try:
        if mesh.rank == 0:
            _write_config(directory / CONFIG_FILE, config_yaml)
        device = detect_device(
            run.train.device, local_rank=read_environment().local_rank // run.launch.ranks_per_device
        )
        facts: Mapping[str, Any] = {"environment": environment_facts(device), "origins": dict(origins)}
        for text in header_lines:
            for sink in sinks:
                sink.write(event_record(text, iteration=state.progress.iteration, **facts))
            facts = {}
        with report_out_of_memory(run, mesh.device, phase=lambda: f"iteration {state.progress.iteration + 1}"):
            return TrainLoop(state, loaders, sinks, device, started_s=started_s).run()
    finally:
        for sink in sinks:
            sink.close()


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


def _run_summary(run: RunConfig, length: RunLength, mesh: ParallelMesh, tokenizer: Tokenizer | None) -> str:
    samples = BatchSizeSchedule.from_config(run).samples_after(length.iterations)
    tokens = samples * run.model.seq_length
    text = f"{tokenizer.name}, {tokenizer.vocab_size:,} ids" if tokenizer is not None else "no tokenizer"
    return (
        f"{_parameter_counts_text(run)} on {mesh.describe()}, {mesh.device.type}; "
        f"{count_with_noun(length.iterations, 'iteration')}, {count_with_noun(samples, 'sample')}, "
        f"{count_with_noun(tokens, 'token')}; {text}"
    )


def _parameter_counts_text(run: RunConfig) -> str:
    count = partial(parameter_count, model_spec(run))
    active = "" if run.moe.num_experts is None else f" ({count(active=True):,} active)"
    return f"{count():,} parameters{active}"


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
