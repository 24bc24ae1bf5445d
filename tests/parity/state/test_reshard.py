"""What is saved in one layout is found in any other: every weight, master weight, moment and router's bias exactly, and
training goes on as it would have."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from petatron.verify.proof_matrix import MatrixEntry, parse_entry
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import tiny_run
from tests.parity.state.resharding import END, SMALL_BATCH, STOP, Life, configured, layouts, live, whole

LOSS = {"--fp64": 1e-9, "": 1e-5}
MOMENTS = ("exp_avg", "exp_avg_sq")


def _live(ranks: RankPool, found: MatrixEntry, flags: str) -> list[Life]:
    return ranks.run(live, found.world_size, configured(found, flags))


def _two_layers(*names: str) -> str:
    """Enough where no rank has several stages, and there are no more stages than layers."""
    if any(form in name for name in names for form in ("vpp", "zbv", "uneven", "pp4")):
        return ""
    return f"--num-layers 2 {'--moe-layer-freq [0,1]' if names[0].startswith('moe') else ''}"


def _move(
    ranks: RankPool,
    folder: str | Path,
    saved_in: str,
    loaded_in: str,
    *,
    then: str = "--fp64",
    now: str = "--fp64",
    batch: str = SMALL_BATCH,
) -> tuple[list[Life], list[Life]]:
    """The life in the first layout, which saves on its way, and the life in the second one that begins there."""
    size = f"{batch} {_two_layers(saved_in, loaded_in) if batch else ''}"
    first = _live(ranks, parse_entry(saved_in), f"--save {folder} --save-interval {STOP} {then} {size}")
    second = _live(ranks, parse_entry(loaded_in), f"--load {folder} --ckpt-step {STOP} {now} {size}")
    assert [sorted(life.losses) for life in second] == [[*range(STOP + 1, END + 1)]] * len(second)
    return first, second


def _check_same_state(first: list[Life], second: list[Life], *, moments: bool = True) -> None:
    """Master weights, moments and what routers learnt are the same; the model's own weights are the masters, rounded."""
    before, after = whole([life.at_stop for life in first]), whole([life.began for life in second])
    assert before.keys() == after.keys()
    kinds = {kind for kind, _ in before}
    assert {"weight", "master", *MOMENTS} <= kinds
    for (kind, name), values in after.items():
        if kind != "weight":
            expected = before[kind, name] if moments or kind not in MOMENTS else torch.zeros_like(values)
            assert torch.equal(values, expected), (kind, name)
    for part in (part for life in second for part in life.began):
        if part.kind == "weight":
            assert torch.equal(part.values, before["master", part.name][part.slices()].to(part.values.dtype)), part.name
    for kind in (*MOMENTS, "router"):
        held = [values for (found, _), values in before.items() if found == kind]
        assert kind not in kinds or any(values.any() for values in held), f"{kind} says nothing"


def _check_pair(ranks: RankPool, saved_in: str, loaded_in: str, *, precision: str, batch: str = SMALL_BATCH) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = _move(ranks, folder, saved_in, loaded_in, then=precision, now=precision, batch=batch)
    _check_same_state(first, second)
    for life in second:
        for iteration, loss in life.losses.items():
            assert loss == pytest.approx(first[0].losses[iteration], rel=LOSS[precision]), iteration
    if precision == "--fp64":
        ended = whole([life.ended for life in first])
        for key, values in whole([life.ended for life in second]).items():
            torch.testing.assert_close(
                values, ended[key], rtol=1e-7, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
            )


def _pairs(model: str, most_ranks: int) -> st.SearchStrategy[tuple[str, str]]:
    one = layouts(model, most_ranks)
    return st.tuples(one, one)


def _few(count: int) -> settings:
    """The same examples every time; a pair is as small as it gets, so nothing is shrunk."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def test_dense(ranks: RankPool):
    _check_pair(ranks, "dense:pp2-vpp2.dp2-zero1", "dense:tp2-sp.dp2-fsdp", precision="--fp64")


@pytest.mark.matrix
@_few(1)
@given(pair=_pairs("gpt", 4))
def test_gpt(ranks: RankPool, pair: tuple[str, str]):
    assume(pair[0] != pair[1])
    _check_pair(ranks, *pair, precision="--fp64")


@_few(1)
@given(pair=_pairs("moe", 4))
def test_experts(ranks: RankPool, pair: tuple[str, str]):
    assume(pair[0] != pair[1])
    _check_pair(ranks, *pair, precision="--fp64")


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["--fp64", ""])
@pytest.mark.parametrize("model", ["dense", "deep", "gpt", "moe"])
def test_many_pairs(ranks: RankPool, model: str, precision: str):
    @_few(12 if precision else 4)
    @given(pair=_pairs(model, 8))
    def check(pair: tuple[str, str]) -> None:
        assume(pair[0] != pair[1])
        _check_pair(ranks, *pair, precision=precision, batch="")

    check()


@pytest.mark.matrix
def test_single_precision(ranks: RankPool):
    _check_pair(ranks, "gpt:pp2-zbv", "gpt:dp2-fsdp", precision="")


# Weights in two precisions


@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    [
        ("moe:dp2-zero1.ep2", "moe:tp2-sp"),
        later("moe:dp2-fsdp.ep2", "moe:tp2-sp.pp2-zbv"),
        later("dense:tp2-sp.dp2-zero1", "dense:pp2-vpp2.dp2-fsdp"),
    ],
)
def test_masters_of_reduced_precision(ranks: RankPool, tmp_path: Path, saved_in: str, loaded_in: str):
    first, second = _move(ranks, tmp_path, saved_in, loaded_in, then="--bf16", now="--bf16")
    _check_same_state(first, second)
    assert {part.values.dtype for part in second[0].began if part.kind == "master"} == {torch.float32}
    for iteration, loss in second[0].losses.items():
        assert loss == pytest.approx(first[0].losses[iteration], rel=0.02)


@diagonal(2)
@pytest.mark.parametrize(
    ("then", "now", "loaded_in"),
    [
        ("--bf16", "", "dense:tp2"),
        ("", "--bf16", "dense:dp2-fsdp"),
        later("--bf16", "", "dense:dp2-fsdp"),
        later("", "--bf16", "dense:tp2-sp.dp2-zero2"),
        later("--fp16 --initial-loss-scale 1024", "--bf16", "dense:cp2.dp2-zero1"),
    ],
)
def test_another_precision_in_another_layout(ranks: RankPool, tmp_path: Path, then: str, now: str, loaded_in: str):
    _check_same_state(*_move(ranks, tmp_path, "dense:dp2-zero1", loaded_in, then=then, now=now))


def test_there_and_back(ranks: RankPool, tmp_path: Path):
    """A part of the run in full precision, between two in a reduced one."""
    size = f"{SMALL_BATCH} --num-layers 2"
    first = _live(ranks, parse_entry("dense:dp2-zero1"), f"--save {tmp_path} --exit-interval 1 --bf16 {size}")
    second = _live(ranks, parse_entry("dense:pp2"), f"--save {tmp_path} --load {tmp_path} --exit-interval 2 {size}")
    third = _live(ranks, parse_entry("dense:tp2"), f"--load {tmp_path} --bf16 {size}")
    assert [sorted(lives[0].losses) for lives in (first, second, third)] == [[1], [2], [3]]
    for before, after in ((first, second), (second, third)):
        saved, found = whole([life.ended for life in before]), whole([life.began for life in after])
        for key, values in saved.items():
            assert key[0] == "weight" or torch.equal(values, found[key]), key


def test_weights_alone(ranks: RankPool, tmp_path: Path):
    """Without moments the run goes on where it was, and moments begin at nothing."""
    first, second = _move(ranks, tmp_path, "moe:dp2-zero1.ep2", "moe:pp2", then="--bf16", now="--bf16 --no-load-optim")
    _check_same_state(first, second, moments=False)


# Bitwise in the same layout, through saves that are written while training goes on


SCALED = "--fp16 --initial-loss-scale 1e6 --loss-scale-window 2 --hysteresis 1"


@diagonal(2)
@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        (SCALED, 1),
        ("--bf16 --dp 2 --use-distributed-optimizer --overlap-param-gather", 2),
        (f"{SCALED} --pp 2 --dp 2 --use-distributed-optimizer", 4),
        later("--bf16 --pp 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2", 2),
    ],
)
def test_bitwise_through_the_background(ranks: RankPool, tmp_path: Path, flags: str, world_size: int):
    flags += f" --hidden-dropout 0.1 --attention-dropout 0.1 --train-iters {END} --log-interval 1"

    def alive(more: str) -> list[Life]:
        return ranks.run(live, world_size, tiny_run(f"{flags} {more}", world_size=world_size))

    first = alive(f"--save {tmp_path} --save-interval 1 --async-save")
    second = alive(f"--load {tmp_path} --ckpt-step {STOP}")
    if "--fp16" in flags:
        assert 0 < sum(life.skipped for life in first[:1]) < END, "some steps overflow, some do not"
    for one, two in zip(first, second):
        assert {iteration: one.losses[iteration] for iteration in two.losses} == two.losses
        assert sorted(two.losses) == [*range(STOP + 1, END + 1)]
        for a, b in zip(one.ended, two.ended, strict=True):
            assert (a.kind, a.name, a.start) == (b.kind, b.name, b.start) and torch.equal(a.values, b.values), a.name
