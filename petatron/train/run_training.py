"""Runs a whole training run on this rank: opens everything, reports every problem, then trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from petatron.base.errors import ConfigError, Problem, TrainError
from petatron.base.log import get_logger
from petatron.base.safe_files import write_atomic
from petatron.config import LoadedConfig, RunConfig
from petatron.config.saved_config import saved_yaml, without_private_paths
from petatron.history.metrics_file import METRICS_FILE
from petatron.history.run_settings import CONFIG_FILE
from petatron.mesh.diagnose.watchdog import Watchdog
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rendezvous import Rendezvous
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import launch
from petatron.train.check_and_open_run import OpenedRun, RunSource, RunStart, check_start, open_run
from petatron.train.report.closing_summary import summary_record
from petatron.train.report.earlier_loss_curves import read_history
from petatron.train.report.log_records import MetricWriter, event_record
from petatron.train.report.memory_capacity_and_oom import report_out_of_memory
from petatron.train.report.metric_writers import build_writers
from petatron.train.report.run_header import environment_versions
from petatron.train.report.suggested_commands import suggested_commands
from petatron.train.state.check_run_dirs import lock_save_dir
from petatron.train.training_loop import TrainingResult, TrainLoop

_log = get_logger(__name__)


def run_training(
    loaded: LoadedConfig,
    *,
    subcommands: Collection[str] = (),
    open_source: Callable[[RunStart], RunSource] | None = None,
) -> TrainingResult:
    """Trains as configured; every rank calls it. Nothing is computed before files, folders and data are checked.

    `subcommands` are those of the command line, which the closing summary may advise. `open_source` returns what the run trains on, if that
    is no dataset; its checks are before anything is built.

    >>> import contextlib, io, tempfile
    >>> from petatron.validate import load_config
    >>> flags = f"--mock-data --lr 1e-3 --train-iters 2 --eval-iters 0 --save {tempfile.mkdtemp()} --live off".split()
    >>> with contextlib.redirect_stdout(io.StringIO()) as lines:
    ...     outcome = run_training(load_config(flags, preset="tiny-llama"))
    >>> outcome.iteration, "lm loss" in lines.getvalue()
    (2, True)
    """
    if loaded.config.rollout.rollout_prompts and open_source is None:
        rule, fix = "are answered and learned from by petatron posttrain", "Start that, or leave it out."
        raise ConfigError([Problem("--rollout-prompts", " ".join(loaded.config.rollout.rollout_prompts), rule, fix)])
    start = check_start(loaded)
    for notice in loaded.notices:
        _log.info("note: %s", notice)
    run, source = start.loaded.config, None if open_source is None else open_source(start)
    with lock_save_dir(run.checkpoint.save, rank=read_environment().rank):
        mesh = launch(run)
        with build_watchdog(mesh, timeout_minutes=run.parallel.distributed_timeout_minutes):
            try:
                return _run_loop(start, open_run(start, mesh, source), subcommands)
            finally:
                if source is not None:
                    source.close()


def build_watchdog(mesh: ParallelMesh, *, timeout_minutes: float) -> Watchdog:
    """Builds the watchdog of this rank's communication."""
    environment, device = read_environment(), mesh.device
    busy = (lambda: not torch.cuda.current_stream(device).query()) if mesh.backend == "nccl" else None
    # Our own launcher ends the other ranks of its machine.
    peers = partial(Rendezvous, environment) if environment.store_file is None else None
    return Watchdog(mesh.record, timeout_s=60 * timeout_minutes, device_busy=busy, connect_peers=peers)


def _run_loop(start: RunStart, opened: OpenedRun, subcommands: Collection[str]) -> TrainingResult:
    """Opens the writers, writes the settings next to the metrics, trains, and writes the closing summary, however it ends.

    Of a failure the summary is written only to the log, since its own report follows on the console.
    """
    run, state, directory = opened.state.run, opened.state, log_directory(opened.state.run)
    writers = open_writers(start, opened, directory)
    try:
        loop = opened.build_loop(writers, started_s=start.started_s)
        write_summary = partial(_write_summary, start, loop, writers, directory, subcommands)
        with report_out_of_memory(run, state.mesh.device, phase=lambda: f"iteration {state.progress.iteration + 1}"):
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
    finally:
        close_writers(writers)


def open_writers(start: RunStart, opened: OpenedRun, directory: Path, *, console: bool = True) -> list[MetricWriter]:
    """Opens the writers of a run folder, with the settings beside them, and writes the first records.

    The first one has the origins of settings and the environment, for whoever reads the run later.
    """
    run, iteration = opened.state.run, opened.state.progress.iteration
    settings = asdict(without_private_paths(run))
    writers = build_writers(
        run.log,
        directory,
        opened.state.mesh.rank,
        config_values={key: value for section in settings.values() for key, value in section.items()},
        on_gpu=opened.device.kind == "cuda",
        resumed_iteration=iteration,
        console=console,
    )
    try:
        if opened.state.mesh.rank == 0:
            _write_config(directory / CONFIG_FILE, saved_yaml(start.loaded))
        _write_header(start, writers, opened, iteration=iteration)
    except BaseException:
        close_writers(writers)
        raise
    return writers


def close_writers(writers: Sequence[MetricWriter]) -> None:
    for writer in writers:
        writer.close()


def _write_header(start: RunStart, writers: Sequence[MetricWriter], opened: OpenedRun, *, iteration: int) -> None:
    origins = {path: str(origin) for path, origin in start.loaded.origins.items() if origin.is_explicit}
    # The console has shown warnings of the data when the data was opened.
    details = [*start.header.details(), *(f"WARNING: {text}" for text in opened.loaders.warnings)]
    records = [event_record(text, iteration=iteration) for text in opened.header_lines]
    records += [event_record(text, iteration=iteration, detail=True) for text in details]
    records[0] |= {"environment": environment_versions(opened.device), "origins": origins}
    for writer in writers:
        for record in records:
            writer.write(record)


def _write_summary(
    start: RunStart,
    loop: TrainLoop,
    writers: Sequence[MetricWriter],
    directory: Path,
    subcommands: Collection[str],
    outcome: str,
    **fields: Any,
) -> None:
    if not writers:
        return
    run, totals, environment = start.loaded.config, loop.totals, read_environment()
    commands = suggested_commands(
        run,
        subcommands=subcommands,
        log_dir=directory,
        train_iters=loop.train_iters,
        complete=totals.iteration >= loop.train_iters,
        saved=totals.saved_iteration is not None,
        environment=environment,
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
    for writer in writers:
        writer.write({**record, **fields})


def _write_config(path: Path, config_yaml: str) -> None:
    """Replaces whatever exists: an earlier run's settings, or a link that came with the folder."""
    try:
        write_atomic(path, config_yaml)
    except OSError as error:
        raise TrainError(
            f"Cannot write {path}: {error.strerror}. Settings are always kept; choose a writable --log-dir."
        ) from error


def log_directory(run: RunConfig) -> Path:
    """Returns the folder of metrics and the resolved config."""
    chosen = run.log.log_dir or run.checkpoint.save
    return Path(chosen) if chosen else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
