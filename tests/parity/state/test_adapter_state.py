"""Adapters start beside a model that lacks them, in every layout alike, and resume bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petatron.layers.adapters.adapter import MAGNITUDE
from tests.dist import RankFailure, RankPool
from tests.heard import heard
from tests.parity.harness import BOUNDS, check_traces, tiny_run, train
from tests.parity.state.test_new_head import save_base, start
from tests.parity.state.test_resume import ITERATIONS, STOP, trained

LORA = "--adapter lora --adapter-rank 2 --adapter-dropout 0.2"
DORA = "--adapter dora --adapter-rank 2"


@pytest.mark.parametrize("form", ["run", "folder"])
def test_adapters_start_beside_a_model(tmp_path: Path, form: str):
    base = save_base(tmp_path / "base", "", form=form)
    with heard("petatron.pretrained.load_checkpoint") as lines:
        started = start(f"{DORA} --pretrained-checkpoint {base}")
    theirs, drawn = start("--seed 7"), start(DORA)
    assert all(torch.equal(started[name], tensor) for name, tensor in theirs.items())
    for name in drawn.keys() - theirs.keys():
        weight = theirs.get(f"{name.rpartition('.')[0]}.weight")
        if name.endswith(MAGNITUDE):
            torch.testing.assert_close(started[name], weight.norm(dim=1))
        else:
            assert torch.equal(started[name], drawn[name])
    assert lines[0].startswith("the adapters are new: ")


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --sequence-parallel", 2),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
        ("--pp 2 --dp 2 --use-distributed-optimizer", 4),
    ],
)
def test_every_layout_starts_alike(ranks: RankPool, tmp_path: Path, layout: str, world_size: int):
    flags = f"--pretrained-checkpoint {save_base(tmp_path / 'base', '')} {DORA} --num-query-groups 4"
    alone = train(tiny_run(flags, dtype="float64"))
    run = tiny_run(f"{flags} {layout}", world_size=world_size, dtype="float64")
    check_traces(ranks, run, alone, BOUNDS["float64"])


@pytest.mark.parametrize(("layout", "world_size"), [(f"{LORA} --bf16", 1), (f"{DORA} --tp 2 --sequence-parallel", 2)])
def test_a_resumed_run_is_the_run_that_was_not_stopped(ranks: RankPool, tmp_path: Path, layout: str, world_size: int):
    whole = trained(ranks, layout, world_size)
    trained(ranks, f"{layout} --save {tmp_path} --exit-interval {STOP}", world_size)
    after = trained(ranks, f"{layout} --save {tmp_path} --load {tmp_path}", world_size)
    for rank in range(world_size):
        assert max(after[rank][0]) == ITERATIONS
        for key, tensor in whole[rank][1].items():
            assert torch.equal(after[rank][1][key], tensor), key


def test_a_run_does_not_go_on_with_other_adapters(ranks: RankPool, tmp_path: Path):
    trained(ranks, f"{LORA} --save {tmp_path} --exit-interval {STOP}", 1)
    for flags in ("", LORA.replace("rank 2", "rank 3"), DORA):
        with pytest.raises(RankFailure, match=r"adapter"):
            trained(ranks, f"{flags} --load {tmp_path}", 1)
