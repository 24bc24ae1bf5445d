"""Formats of optimizer state: what they are, that they train, and that a run goes on from them to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petatron.mesh.mesh import ParallelMesh
from petatron.pretrained.load_checkpoint import load_checkpoint
from petatron.train.build_run import build_loader, build_model, build_optimizer
from petatron.train.custom_loop import save_checkpoint
from petatron.validate import resolve_config
from tests.checkpoint_chunks import checkpoint_chunks
from tests.longform import diagonal
from tests.parity.harness import TINY, tiny_run

NARROW = "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --train-iters 8"


class Training:
    """A run that can be stopped between any two steps."""

    def __init__(self, flags: str) -> None:
        run = tiny_run(flags)
        self.mesh = ParallelMesh.single()
        self.model = build_model(run, self.mesh)
        self.optimizer = build_optimizer(run, self.model)
        self.loader = iter(build_loader(run, self.mesh))

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(float(self.model.train_step(next(self.loader))))
            self.optimizer.step()
        return losses

    def state(self) -> dict[tuple, torch.Tensor]:
        return {
            (chunk.key, chunk.start): chunk.tensor.clone() for chunk in checkpoint_chunks(self.model, self.optimizer)
        }


def same(ours: dict[tuple, torch.Tensor], theirs: dict[tuple, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@diagonal(3)
@pytest.mark.parametrize("offload", ["", "--optimizer-cpu-offload --optimizer-offload-fraction 0.7", "disk"])
def test_a_run_goes_on_from_a_checkpoint_of_narrow_moments(tmp_path: Path, offload: str):
    place = offload.replace("disk", f"--optimizer-nvme-offload {tmp_path / 'scratch'}")
    whole = Training(NARROW)
    losses = whole.steps(5)

    first = Training(f"{NARROW} {place}")
    assert first.steps(3) == losses[:3]
    moments = {kind: view.dtype for kind, _, _, view in first.optimizer.moments()}
    assert moments == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    saved = first.state()
    save_checkpoint(str(tmp_path / "saved"), step=3, model=first.model, optimizer=first.optimizer)

    second = Training(f"{NARROW} {place}")
    assert load_checkpoint(str(tmp_path / "saved"), model=second.model, optimizer=second.optimizer) is not None
    assert same(second.state(), saved)
    second.loader = first.loader
    assert second.steps(2) == losses[3:]
    for kind, _, piece, view in second.optimizer.moments():
        [there] = [v for k, _, p, v in whole.optimizer.moments() if k == kind and p.name == piece.name]
        inside = tuple(slice(at, at + size) for at, size in zip(piece.start, piece.shape))
        assert torch.equal(view, there[inside]), (kind, piece.name)


def test_state_moves_from_one_format_to_another(tmp_path: Path):
    wide = Training("--bf16 --train-iters 8")
    wide.steps(2)
    save_checkpoint(str(tmp_path), step=2, model=wide.model, optimizer=wide.optimizer)
    narrow = Training(NARROW)
    load_checkpoint(str(tmp_path), model=narrow.model, optimizer=narrow.optimizer)
    for key, tensor in wide.state().items():
        assert torch.equal(narrow.state()[key], tensor.to(narrow.state()[key].dtype)), key


def test_narrow_moments_train_as_wide_ones_do():
    exact = Training("--train-iters 20").steps(16)
    narrow = Training("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --train-iters 20").steps(16)
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=0.01)


RULES = [
    ("--fp64 --exp-avg-dtype bf16", "--exp-avg-dtype bf16 cannot be combined with --fp64. Leave one of them out."),
    (
        "--fp64 --exp-avg-sq-dtype bf16",
        "--exp-avg-sq-dtype bf16 cannot be combined with --fp64. Leave one of them out.",
    ),
    ("--main-grads-dtype bf16", "--main-grads-dtype bf16 needs --bf16. Give it, or use fp32."),
    (
        "--bf16 --main-grads-dtype bf16 --dp 2 --data-parallel-sharding-strategy optim_grads",
        "--main-grads-dtype bf16 cannot be had with --data-parallel-sharding-strategy optim_grads, where fully_shard adds "
        "gradients up. Use fp32, or the strategy optim.",
    ),
    (
        "--optimizer-cpu-offload --optimizer-nvme-offload /tmp/x",
        "--optimizer-cpu-offload and --optimizer-nvme-offload are two places for the same state. Keep one of them.",
    ),
]


@pytest.mark.parametrize(("flags", "message"), RULES, ids=[flags for flags, _ in RULES])
def test_rules(flags: str, message: str):
    _, problems = resolve_config([*TINY.split(), *flags.split()], world_size=2 if "--dp 2" in flags else 1)
    assert [str(problem) for problem in problems] == [message]


def test_idle_settings_are_said_aloud():
    def notices(flags: str) -> set[str]:
        return set(resolve_config([*TINY.split(), *flags.split()])[0].notices)

    assert any(
        "--exp-avg-dtype has no effect: the optimizer is sgd" in n
        for n in notices("--optimizer sgd --exp-avg-dtype bf16")
    )
    assert any("--optimizer-offload-fraction has no effect" in n for n in notices("--optimizer-offload-fraction 0.5"))
    assert not any("fraction" in n for n in notices("--optimizer-nvme-path /tmp/x --optimizer-offload-fraction 0.5"))
    assert any("--cpu-optimizer has no effect" in n for n in notices("--cpu-optimizer --device cpu"))
    assert any("--use-precision-aware-optimizer" in n for n in notices("--use-precision-aware-optimizer"))
