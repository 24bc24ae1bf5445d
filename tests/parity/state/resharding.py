"""Lives of a run in different layouts: what was learnt in one is found again, by logical tensor, in another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from petatron.base.device import detect_device
from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.build_run import build_loaders
from petatron.train.report.log_records import MetricRecord
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainLoop
from petatron.validate import load_config
from petatron.verify.proof_matrix import MatrixEntry, parse_entry
from petatron.verify.record_trace import TracedShard, assemble_tensors
from tests.dist import RankPool
from tests.parity.harness import tiny_run

STOP, END = 2, 3
SMALL_BATCH = "--global-batch-size 8"
"""Half of what the matrix has: for up to four ranks it is two micro-batches or more in every pipeline."""
_MORE = {
    "dense": "",
    "deep": "",
    "gpt": "--no-untie-embeddings-and-output-weights",
    "moe": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "muon": "",
}
_TRAINING = f"--hidden-dropout 0 --attention-dropout 0 --train-iters {END} --eval-iters 0 --log-interval 1"


@dataclass(slots=True)
class Life:
    """What a rank saw: its state when it began, at STOP and at its end, and the losses between."""

    began: list[TracedShard]
    losses: dict[int, float] = field(default_factory=dict)
    skipped: int = 0
    at_stop: list[TracedShard] = field(default_factory=list)
    ended: list[TracedShard] = field(default_factory=list)


def parts_of(state: TrainState) -> list[TracedShard]:
    """Everything that a checkpoint is to keep of this rank, replicas too."""
    found = [
        _part("weight", piece.name, piece.logical_shape, piece.start, view)
        for group in state.model.param_groups
        for piece, view in group_tensor_shards(group, group.weights())
    ]
    found += [
        _part("master", piece.name, piece.logical_shape, piece.start, view)
        for _, piece, view in state.optimizer.master_weights()
    ]
    found += [
        _part(kind, piece.name, piece.logical_shape, piece.start, view)
        for kind, _, piece, view in state.optimizer.moments()
    ]
    found += [
        _part("router", name, x.shape, (0,) * x.dim(), x) for name, x in state.model.router_statistics.expert_biases()
    ]
    return found


def _part(kind: str, name: str, shape: Sequence[int], start: Sequence[int], view: Tensor) -> TracedShard:
    return TracedShard(kind, name, tuple(shape), tuple(start), view.detach().clone().contiguous())


def live(run: RunConfig) -> Life:
    """On one rank: from the checkpoint, if one is named, to the end of the run."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(Layout.from_config(run.parallel), rank)
    state = TrainState.build(run, mesh)
    if run.checkpoint.load is not None:
        assert state.load(run.checkpoint.load)
    life = Life(parts_of(state))

    class Watch:
        def write(self, record: MetricRecord) -> None:
            if record["kind"] == "train":
                life.losses[record["iteration"]] = record["lm_loss"]
                life.skipped += record["skipped"]
                if record["iteration"] == STOP:
                    life.at_stop = parts_of(state)

        def close(self) -> None: ...

    TrainLoop(state, build_loaders(run, mesh), [Watch()], detect_device("cpu")).run()
    life.ended = parts_of(state)
    return life


def whole(parts: Sequence[list[TracedShard]]) -> dict[tuple[str, str], Tensor]:
    """Logical tensors from the parts of all ranks; copies of a part must agree, and nothing may be missing."""
    tensors = assemble_tensors(part for rank in parts for part in rank)
    for part in (part for rank in parts for part in rank):
        own = tensors[part.kind, part.name][part.slices()]
        assert torch.equal(own, part.values.to(torch.float64)), f"ranks differ in {part.kind} {part.name}"
    gaps = [key for key, x in tensors.items() if x.isnan().any()]
    assert not gaps, f"no rank has all of {gaps}"
    return tensors


def check_resume(
    ranks: RankPool,
    folder: Path,
    model: str,
    layout: str,
    *,
    world_size: int,
    tensors: Collection[str] = (),
    saved_in: str = "--tp 2 --sequence-parallel",
    saving_ranks: int = 2,
    live_rank: Callable[[RunConfig], Life] = live,
) -> None:
    """Assert that a layout begins with what another one saved, to the bit, and that its losses are those of going on.

    `tensors`: some that the checkpoint has to have. `live_rank` is of a module that ranks have to import.
    """
    steps = f"{model} --train-iters {END} --log-interval 1"
    saving, loading = f"--save {folder} --save-interval {STOP}", f"--load {folder} --ckpt-step {STOP}"
    first = tiny_run(f"{steps} {saving} {saved_in}", world_size=saving_ranks, dtype="float64")
    lives = ranks.run(live_rank, saving_ranks, first)
    then = tiny_run(f"{steps} {loading} {layout}", world_size=world_size, dtype="float64")
    resumed = ranks.run(live_rank, world_size, then)
    at_stop, began = whole([one.at_stop for one in lives]), whole([one.began for one in resumed])
    assert at_stop.keys() == began.keys()
    assert set(tensors) <= {name for _, name in began}
    for key, values in at_stop.items():
        assert torch.equal(began[key], values), key
    for step in range(STOP + 1, END + 1):
        assert resumed[-1].losses[step] == pytest.approx(lives[0].losses[step], rel=1e-12)


def configured(found: MatrixEntry, flags: str) -> RunConfig:
    words = f"{found.model_flags} {_MORE[found.model]} {_TRAINING} {found.flags} {flags}".split()
    return load_config(words, world_size=found.world_size).config


@cache
def _fits(name: str) -> bool:
    try:
        configured(parse_entry(name), "--fp64")
    except ConfigError:
        return False
    return True


_SIZES = {"tp": (2, 1, 4), "pp": (2, 1, 4), "cp": (1, 2), "dp": (1, 2, 4), "ep": (2, 1, 4), "etp": (1, 2)}
_FORMS = {
    "tp": ("-sp", ""),
    "pp": ("", "-vpp2", "-zbv", "-zbh1", "-uneven", "-gpipe"),
    "cp": ("", "-gather", "-a2a"),
    "dp": ("-zero1", "-fsdp", "-zero2", "", "-zero1-copies2", "-fsdp-copies2"),
    "ep": ("", "-gather"),
    "etp": ("",),
}


@st.composite
def layouts(draw: st.DrawFn, model: str, most_ranks: int) -> str:
    """The name of a layout that suits a model, from all axes; rules that refuse one are the config's."""
    parts, world_size = [], 1
    for axis, sizes in _SIZES.items():
        if axis in ("ep", "etp") and model != "moe":
            continue
        size = draw(st.sampled_from(sizes))
        if size > 1 or axis in ("ep", "etp"):
            parts.append(f"{axis}{size}{draw(st.sampled_from(_FORMS[axis]))}")
        world_size *= size if axis not in ("ep", "etp") else 1
    assume(2 <= world_size <= most_ranks)
    name = f"{model}:{'.'.join(parts)}"
    assume(_fits(name))
    return name
