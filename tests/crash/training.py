"""The run that is crashed: a tiny model in the real loop, saving every step, on a disk that a test may spoil."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from petatron.base.device import detect_device
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.digested_file_io import Disk, StoredFile
from petatron.checkpoint.manager import CheckpointManager, Retention
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loaders
from petatron.train.report.log_records import MetricRecord
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainLoop
from petatron.validate import load_config

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 --seq-length 8 --vocab-size 31 --mock-data "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --num-workers 0 --lr 1e-2 --lr-decay-iters 100 --global-batch-size 2 --micro-batch-size 1 "
    "--eval-iters 0 --log-interval 1 --save-interval 1 --make-vocab-size-divisible-by 2"
)


@dataclass(slots=True)
class Events:
    """A writer that keeps the messages of a run."""

    messages: list[str]

    def write(self, record: MetricRecord) -> None:
        if record["kind"] == "event":
            self.messages.append(record["message"])

    def close(self) -> None: ...


def tiny_run(flags: str, *, world_size: int = 1) -> RunConfig:
    return load_config([*TINY.split(), *flags.split()], world_size=world_size).config


def train(run: RunConfig, disk: Disk | None = None, events: Events | None = None) -> list[str]:
    """From the newest checkpoint (if there is one) to the end; the messages of the run."""
    torch.set_num_threads(1)
    events = events or Events([])
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    state = TrainState.build(run, mesh)
    config = run.checkpoint
    assert config.save is not None
    state.checkpoint_manager = CheckpointManager(
        config.save,
        mesh.control,
        world_axis=mesh.world,
        async_axis=mesh.background_control_axis() if config.async_save else None,
        disk=disk,
        retention=Retention(config.save_total_limit, config.save_retain_interval),
    )
    if config.load is not None:
        state.load(config.load)
    TrainLoop(state, build_loaders(run, mesh), [events], detect_device("cpu")).run()
    return events.messages


@dataclass(frozen=True, slots=True)
class Content:
    """What the uninterrupted run saved at each step: every file of it, by digest."""

    steps: dict[int, dict[str, StoredFile]]

    @classmethod
    def of(cls, folder: Path) -> Content:
        return cls(
            {step: dict(step_folder.read_manifest(path).files) for step, path in step_folder.list_steps(folder).items()}
        )


def check_folder(folder: Path, expected: Content, *, at_least: int | None = None) -> int | None:
    """Every published step is byte for byte what the uninterrupted run saved, and `latest` names one of them.

    at_least: the newest step that was there before. Returns the newest now.
    """
    for step, path in step_folder.list_steps(folder).items():
        manifest = step_folder.read_manifest(path)
        assert manifest.step == step and not step_folder.extra_files(path, manifest)
        assert dict(manifest.files) == expected.steps[step], f"step {step} is not that of the uninterrupted run"
        for name, stored in manifest.files.items():
            step_folder.check_content(path / name, stored)
    newest = step_folder.latest_step(folder)
    if (folder / step_folder.LATEST_FILE).exists():
        assert (folder / step_folder.LATEST_FILE).read_text().strip() == step_folder.step_name(newest or 0)
    assert at_least is None or (newest is not None and newest >= at_least), f"{newest} is older than {at_least}"
    return newest
