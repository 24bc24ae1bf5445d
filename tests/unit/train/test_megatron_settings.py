"""Settings of Megatron's that change what a run does: its schedule, the numbering of ranks, weight decay, checkpoints that stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petatron.base.errors import CheckpointError
from petatron.mesh.rank_layout import Layout
from tests.dist import RankPool
from tests.parity.harness import tiny_run
from tests.unit.train.test_loop import SMALL, finish, start

RESUMED = "--train-iters 8 --lr 9e-3 --lr-decay-style cosine --weight-decay 0.3"


def test_the_schedule_of_the_checkpoint_is_followed(tmp_path: Path):
    _, _, writer = finish("--train-iters 8")
    first, loop, _ = start(tiny_run(f"{SMALL} --train-iters 8 --exit-interval 4 --save {tmp_path}"))
    loop.run()
    run = tiny_run(f"{SMALL} {RESUMED} --load {tmp_path} --use-checkpoint-opt_param-scheduler --save {tmp_path}")
    state, loop, resumed = start(run)
    assert state.load(str(tmp_path)) and state.progress.iteration == 4
    assert state.lr_schedule == first.lr_schedule and state.weight_decay_schedule.end == 0.1
    assert not any("lr " in change for change in state.resume_changes)
    loop.run()
    assert resumed.column("lr") == writer.column("lr")[4:]
    again, _, _ = start(tiny_run(f"{SMALL} --train-iters 8 --load {tmp_path}"))
    assert again.load(str(tmp_path)), "the checkpoint records the schedule that was followed"


def test_another_schedule_is_refused_without_a_flag(tmp_path: Path):
    finish(f"--train-iters 3 --save {tmp_path}")
    state, _, _ = start(tiny_run(f"{SMALL} {RESUMED} --load {tmp_path}"))
    with pytest.raises(CheckpointError, match="--use-checkpoint-opt-param-scheduler to go on with the checkpoint's"):
        state.load(str(tmp_path))


def test_weight_decay_of_qk_norms():
    def trained(flags: str) -> dict[str, torch.Tensor]:
        state, _, _ = finish(f"--qk-layernorm --train-iters 1 --lr-warmup-iters 0 --weight-decay 0.5 {flags}")
        return {name: weight.detach().clone() for name, weight in state.model.module.named_parameters()}

    plain, decayed = trained(""), trained("--apply-wd-to-qk-layernorm")
    changed = {name for name, weight in decayed.items() if not torch.equal(weight, plain[name])}
    assert changed == {"layers.0.attention.q_norm.weight", "layers.0.attention.k_norm.weight"}
    assert all((decayed[name] < plain[name]).all() for name in changed)


def test_stages_come_before_replicas_with_tp_pp_dp_mapping():
    plain = Layout.from_config(tiny_run("--pp 2 --dp 2 --tp 2", world_size=8).parallel)
    mapped = Layout.from_config(tiny_run("--pp 2 --dp 2 --tp 2 --use-tp-pp-dp-mapping", world_size=8).parallel)
    assert plain.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mapped.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mapped.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mapped.groups("world") == [tuple(range(8))]
    assert all(mapped.group_of(axis, 5) in mapped.groups(axis) for axis in ("pp", "dp", "tp", "losses", "edp", "stage"))


def _losses(flags: str) -> list[float]:
    run = tiny_run(flags, world_size=4)
    _, loop, writer = start(run)
    loop.run()
    return writer.column("lm_loss")


def test_the_numbering_of_ranks_changes_no_loss(ranks: RankPool):
    layout = "--num-layers 2 --seq-length 8 --vocab-size 37 --log-interval 1 --train-iters 3 --pp 2 --dp 2"
    plain, mapped = (ranks.run(_losses, 4, f"{layout} {flag}") for flag in ("", "--use-tp-pp-dp-mapping"))
    assert mapped == plain and len(plain[0]) == 3


def test_retained_checkpoints_are_multiples_and_the_newest(tmp_path: Path):
    finish(f"--train-iters 7 --save-interval 1 --save-retain-interval 3 --save {tmp_path}")
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("step-*")) == [3, 6, 7]
