"""Builds the hooks of a run from its settings: checks of results, timers, memory, energy, copies for Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from petatron.base.log import get_logger
from petatron.config.schema.run import RunConfig
from petatron.train.hooks.energy import EnergyMeter, open_energy_counter
from petatron.train.hooks.megatron_copies import MegatronCopies
from petatron.train.hooks.memory_hooks import GarbageCollection, MemoryHistory, UnusedMemory
from petatron.train.hooks.progress_file import ProgressFile
from petatron.train.hooks.replica_check import ReplicaCheck
from petatron.train.hooks.rerun_validation import ResultValidation
from petatron.train.hooks.step_hook import StepHook, StepHooks
from petatron.train.hooks.step_timers import StepTimers
from petatron.train.state.train_state import TrainState

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepInstruments:
    """The hooks of a step, and the two among them that a step itself calls."""

    hooks: StepHooks
    timers: StepTimers
    validation: ResultValidation


def build_instruments(state: TrainState, *, flops_per_token: float | None = None) -> StepInstruments:
    """Returns the instruments of this rank; without `flops_per_token` those that a step alone calls."""
    timers, validation = StepTimers(state.run.log, state.mesh), ResultValidation(state.run.train, state.model)
    others = [] if flops_per_token is None else _build_hooks(state, flops_per_token=flops_per_token)
    return StepInstruments(StepHooks([timers, validation, *others]), timers, validation)


def _tell_what_needs_a_gpu(run: RunConfig) -> None:
    """Logs the settings that do nothing on a CPU; before the launch `--device auto` may still be a GPU."""
    asked = {
        "--empty-unused-memory-level": run.train.empty_unused_memory_level,
        "--log-energy": run.log.log_energy,
        "--record-memory-history": run.log.record_memory_history,
    }
    for flag in (flag for flag, value in asked.items() if value):
        _log.warning("%s has no effect: the CPU computes", flag)


def _build_hooks(state: TrainState, *, flops_per_token: float) -> list[StepHook]:
    """Returns the hooks of this rank, in the order in which they are called."""
    run, mesh, hooks = state.run, state.mesh, list[StepHook]()
    on_gpu = mesh.device.type == "cuda"
    if not on_gpu:
        _tell_what_needs_a_gpu(run)
    if run.train.check_weight_hash_across_dp_replicas_interval is not None:
        hooks.append(ReplicaCheck(state.model, run.train.check_weight_hash_across_dp_replicas_interval))
    if run.train.empty_unused_memory_level and on_gpu:
        hooks.append(UnusedMemory(run.train.empty_unused_memory_level))
    if run.log.log_progress and run.checkpoint.save is not None and mesh.rank == 0:
        hooks.append(
            ProgressFile(
                Path(run.checkpoint.save),
                state.progress,
                num_devices=mesh.world.size,
                flops_per_token=flops_per_token,
            )
        )
    source, copies, manager = run.checkpoint.save, run.checkpoint.save_megatron, state.checkpoint_manager
    if source is not None and copies is not None and manager is not None and mesh.rank == 0:
        hooks.append(MegatronCopies(Path(source), Path(copies), run, manager))
    if run.log.log_energy and on_gpu:
        hooks.append(EnergyMeter(open_energy_counter(mesh.device), mesh.control))
    if run.log.record_memory_history and on_gpu and mesh.rank == 0:
        hooks.append(MemoryHistory(Path(run.log.memory_snapshot_path)))
    if run.train.manual_gc:
        hooks.append(
            GarbageCollection(run.train.manual_gc_interval, collects_around_evaluation=run.train.manual_gc_eval)
        )
    return hooks
