"""Two passes in turns: who runs when, and what happens when one of them fails; then the turns of a whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.decoder import Decoder
from petatron.parallel.pipeline.combined_forward_backward import CombinedForwardBackward
from petatron.train.build_run import build_loader, build_model
from tests.dist import RankPool
from tests.parity.harness import tiny_run
from tests.unit.parallel.test_expert_overlap import LoggedExchanges


class Passes:
    """Two passes that log what they do, with a wait after each word."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.combined = CombinedForwardBackward(torch.device("cpu"))

    def of(self, words: str) -> Callable[[], None]:
        def work() -> None:
            for word in words.split():
                if word == "fail":
                    raise ValueError("broken")
                self.log.append(word)
                self.combined.switch_to_other_pass()

        return work

    def run(self, forward: str, backward: str) -> list[str]:
        self.combined.run(self.of(forward), self.of(backward))
        return self.log


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_passes_take_turns_at_every_wait():
    assert Passes().run("a b c", "x y z") == ["a", "x", "b", "y", "c", "z"]


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [("a", "x y z", "a x y z"), ("a b c", "x", "a x b c"), ("", "x y", "x y"), ("a b", "", "a b"), ("", "", "")],
)
def test_what_is_left_of_the_longer_one_runs_alone(forward: str, backward: str, expected: str):
    assert Passes().run(forward, backward) == expected.split()


def test_alone_nothing_is_handed_over():
    passes = Passes()
    passes.of("a b")()
    assert passes.log == ["a", "b"]


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [("a fail", "x y z", "a x"), ("fail", "x y", ""), ("a b c", "x fail", "a x b"), ("a b", "fail", "a")],
)
def test_a_failure_stops_the_other_at_its_next_wait(forward: str, backward: str, expected: str):
    passes = Passes()
    with pytest.raises(ValueError, match="broken"):
        passes.run(forward, backward)
    assert passes.log == expected.split()
    passes.log.clear()
    assert passes.run("a b", "x") == ["a", "x", "b"], "and the next two run"


def test_ctrl_c_is_raised_and_stops_the_backward_pass():
    passes = Passes()

    def interrupted() -> None:
        passes.combined.switch_to_other_pass()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        passes.combined.run(interrupted, passes.of("x y z"))
    assert passes.log == ["x"]


def test_a_failure_inside_autograd_is_raised_as_it_is():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            passes.combined.switch_to_other_pass()
            raise LookupError("in the backward pass")

    passes = Passes()
    y = Broken.apply(torch.ones(2, requires_grad=True)).sum()  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(LookupError, match="in the backward pass"):
        passes.combined.run(passes.of("a b c"), y.backward)
    assert passes.log == ["a", "b"]


def test_two_pairs_at_a_time_are_a_mistake():
    passes = Passes()
    with pytest.raises(AssertionError, match="combined already"):
        passes.combined.run(lambda: passes.combined.run(passes.of("a"), passes.of("x")), passes.of("y"))


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall --dp 2 --ep 2 "
    "--overlap-moe-expert-parallel-comm"
)


class _Log(list[str]):
    """Words with the pass they belong to: the forward pass has the thread that made this."""

    def __init__(self) -> None:
        super().__init__()
        self._forward = threading.get_ident()

    def append(self, word: str) -> None:
        super().append(f"{'F' if threading.get_ident() == self._forward else 'B'} {word}")


def _host_events(flags: str) -> list[str]:
    """What the host does in one step: attention of either pass, starts and waits of the all-to-all of tokens."""
    torch.set_num_threads(1)
    run = tiny_run(flags, world_size=2)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = build_model(run, mesh)
    log = _Log()
    for stage in model.stages.values():
        assert isinstance(stage, Decoder)
        for block in stage.layers.values():
            attention = block.get_submodule("attention")
            attention.register_forward_hook(lambda *_: log.append("attention"))
            attention.register_full_backward_pre_hook(lambda *_: log.append("attention"))
    batches = next(iter(build_loader(run, mesh)))
    with LoggedExchanges(log):
        model.train_step(batches)
    return list(log)


def test_attention_runs_while_the_other_micro_batchs_all_to_all_is_in_flight(ranks: RankPool):
    """Two layers, two micro-batches: F0, then F1 and B0 combined, then B1. Every rank does the same in the same order."""
    found = ranks.run(_host_events, 2, f"{EXPERTS} --micro-batch-size 2 --global-batch-size 8")
    assert found[0] == found[1]
    alone = ["F attention", "F start", "F wait", "F start", "F wait"] * 2
    combined = """
    F attention, F start, B start, F wait,
    F start, B wait, B start, F wait,
    F attention, F start, B wait,
    B attention, B start, F wait,
    F start, B wait, B start, F wait,
    B wait, B attention
    """
    steady = [word.strip() for word in combined.split(",")]
    last = ["F start", "F wait", "F start", "F wait", "F attention"] * 2
    assert found[0] == [*alone, *steady, *last]
    # The third all-to-all of the forward pass is a dispatch; the backward pass differentiates attention meanwhile. The second
    # of the backward pass is that of its gradients; the forward pass computes attention meanwhile.
    starts = [at for at, word in enumerate(steady) if word == "F start"]
    assert "B attention" in steady[starts[2] : steady.index("F wait", starts[2])]
    starts = [at for at, word in enumerate(steady) if word == "B start"]
    assert "F attention" in steady[starts[1] : steady.index("B wait", starts[1])]


def _collectives(flags: str) -> list[tuple[str, str]]:
    torch.set_num_threads(1)
    run = tiny_run(flags, world_size=4)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = build_model(run, mesh)
    before = mesh.record.count
    model.train_step(next(iter(build_loader(run, mesh))))
    return [(event.axis, event.op) for event in mesh.record.events(since=before)]


def test_every_rank_issues_its_collectives_in_the_same_order(ranks: RankPool):
    """Over all axes: tensor-parallel gathers of one pass come between expert all-to-alls of the other."""
    flags = f"--tp 2 --etp 1 {EXPERTS} --micro-batch-size 1 --global-batch-size 8 --use-distributed-optimizer"
    first, *others = ranks.run(_collectives, 4, flags)
    assert all(other == first for other in others)
    without = ranks.run(_collectives, 4, f"{flags} --no-overlap-moe-expert-parallel-comm")[0]
    assert sorted(first) == sorted(without) and first != without


def test_without_the_flag_every_pass_waits_for_itself(ranks: RankPool):
    flags = f"{EXPERTS} --no-overlap-moe-expert-parallel-comm --micro-batch-size 2 --global-batch-size 8"
    found = ranks.run(_host_events, 2, flags)[0]
    for at, word in enumerate(found):
        assert word != "F start" or found[at + 1] == "F wait"
