"""Rules that need more than single elements train the same model in every layout, and their state is found again in any other.

Of each rule, the default suite has the layouts that differ most; `make test-matrix` has all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from petatron.verify.proof_matrix import parse_entry
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.state.resharding import SMALL_BATCH, STOP, Life, configured, live, whole
from tests.parity.state.test_muon import ZERO1, ZERO2, ZERO3, check
from tests.parity.state.test_resume import ITERATIONS, trained

RULES = {
    "muon": "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2",
    "lion": "--optimizer lion",
    "adafactor": "--optimizer adafactor --adafactor-beta1 0.9 --adafactor-scale-parameter",
    "soap": "--optimizer soap --soap-precondition-frequency 2",
}
KINDS = {
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "lion": {"lion_momentum"},
    "soap": {"soap_exp_avg", "soap_exp_avg_sq", "soap_left", "soap_right_basis", "exp_avg", "exp_avg_sq"},
    "adafactor": {"adafactor_exp_avg", "adafactor_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"},
}
"""The state of each rule in a run, its scalar optimizer's included."""
MODEL = "--train-iters 2 --num-query-groups 2"
EXPERTS = (
    f"{MODEL} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16"
)
STOPPED_AT = 2


def cases(*layouts: tuple[str, int, str]) -> list[Any]:
    """Every rule in every layout; in the default suite those that a layout names (`all`: each)."""
    return [
        pytest.param(rule, layout, world_size, id=f"{rule}-{layout}", marks=() if chosen else [pytest.mark.matrix])
        for layout, world_size, default in layouts
        for rule in RULES
        for chosen in [default == "all" or rule in default.split()]
    ]


@diagonal(4)
@pytest.mark.parametrize(
    ("rule", "layout", "world_size"),
    cases(
        ("--tp 2", 2, ""),
        ("--tp 2 --sequence-parallel", 2, ""),
        ("--tp 4 --sequence-parallel", 4, "muon adafactor soap"),
        ("--pp 2", 2, "muon"),
        ("--dp 2", 2, ""),
        (f"--dp 2 {ZERO1}", 2, "lion"),
        (f"--dp 4 {ZERO1} --ddp-bucket-size 1 --overlap-grad-reduce --overlap-param-gather", 4, "muon soap"),
        (f"--tp 2 --dp 2 {ZERO1}", 4, ""),
        (f"--cp 2 --dp 2 {ZERO1} --num-distributed-optimizer-instances 2", 4, ""),
        (f"--dp 2 {ZERO2}", 2, "muon"),
        (f"--dp 4 {ZERO3}", 4, ""),
        (f"--dp 4 --num-distributed-optimizer-instances 2 {ZERO3}", 4, ""),
        (f"--tp 2 --dp 2 --sequence-parallel {ZERO3}", 4, "muon adafactor soap"),
        (f"--pp 2 --dp 2 {ZERO3}", 4, ""),
    ),
)
def test_dense(ranks: RankPool, rule: str, layout: str, world_size: int):
    check(ranks, layout, f"{RULES[rule]} {MODEL}", world_size)


@diagonal(3)
@pytest.mark.parametrize(
    ("rule", "layout", "world_size"),
    cases(
        ("--dp 2 --ep 2", 2, ""),
        ("--tp 2 --expert-tensor-parallel-size 2", 2, "muon adafactor"),
        (f"--tp 2 --dp 2 --ep 2 {ZERO1}", 4, "muon"),
        (f"--dp 4 --ep 2 {ZERO1} --ddp-bucket-size 1", 4, ""),
        (f"--dp 4 --ep 2 {ZERO3}", 4, "muon soap"),
        (f"--dp 2 --tp 2 --expert-tensor-parallel-size 1 {ZERO2}", 4, ""),
    ),
)
def test_experts(ranks: RankPool, rule: str, layout: str, world_size: int):
    check(ranks, layout, f"{RULES[rule]} {EXPERTS}", world_size)


@diagonal(3)
@pytest.mark.parametrize(
    ("rule", "layout", "world_size"),
    cases(
        ("--bf16", 1, ""),
        ("--fp16 --initial-loss-scale 1e6 --loss-scale-window 2 --hysteresis 1", 1, "all"),
        (f"--tp 2 --dp 2 {ZERO1} --bf16 --overlap-grad-reduce --overlap-param-gather", 4, "muon soap"),
        (f"--dp 2 {ZERO3} --bf16", 2, ""),
    ),
)
def test_resume_is_bitwise(ranks: RankPool, tmp_path: Path, rule: str, layout: str, world_size: int):
    flags = RULES[rule]
    uninterrupted = trained(ranks, f"{layout} {flags}", world_size)
    saved = f"--save {tmp_path / 'saved'}"
    stopped = trained(ranks, f"{layout} {flags} {saved} --exit-interval {STOPPED_AT}", world_size)
    moved = [values for (key, _), values in stopped[0][1].items() if key.split("/")[0] in KINDS[rule]]
    assert any(values.any() for values in moved), "some step before the stop has moved the weights"
    resumed = trained(ranks, f"{layout} {flags} --load {tmp_path / 'saved'}", world_size)
    for (losses, tensors), (wanted, kept) in zip(resumed, uninterrupted, strict=True):
        assert sorted(losses) == [*range(STOPPED_AT + 1, ITERATIONS + 1)]
        assert losses == {step: wanted[step] for step in losses}
        assert tensors.keys() == kept.keys()
        for key, values in tensors.items():
            assert torch.equal(values, kept[key]), key


@diagonal(4)
@pytest.mark.parametrize(
    ("rule", "saved_in", "loaded_in"),
    [
        (rule, saved_in, loaded_in) if rule in default.split() else later(rule, saved_in, loaded_in)
        for saved_in, loaded_in, default in (
            ("dense:dp2-zero1", "dense:tp2", "lion"),
            ("dense:tp2.dp2-zero1", "dense:dp4-fsdp", ""),
            ("dense:dp2-fsdp", "dense:dp1", ""),
            ("dense:dp1", "dense:tp2-sp.pp2", ""),
            ("moe:dp4-zero1.ep2", "moe:tp2.etp2", "muon adafactor soap"),
            ("moe:tp2.etp2", "moe:dp4-zero2.ep2", ""),
        )
        for rule in RULES
    ],
)
def test_reshard(ranks: RankPool, tmp_path: Path, rule: str, saved_in: str, loaded_in: str):
    """Weights and all state are found again exactly, and training goes on as it would have."""

    def lives(layout: str, flags: str) -> list[Life]:
        entry = parse_entry(layout)
        return ranks.run(live, entry.world_size, configured(entry, f"{RULES[rule]} --fp64 {SMALL_BATCH} {flags}"))

    first = lives(saved_in, f"--save {tmp_path} --save-interval {STOP}")
    second = lives(loaded_in, f"--load {tmp_path} --ckpt-step {STOP}")
    before, after = whole([life.at_stop for life in first]), whole([life.began for life in second])
    assert {kind for kind, _ in before} >= {"weight", *KINDS[rule]}
    assert before.keys() == after.keys()
    assert all(torch.equal(values, before[key]) for key, values in after.items())
    ended = whole([life.ended for life in first])
    for key, values in whole([life.ended for life in second]).items():
        torch.testing.assert_close(values, ended[key], rtol=1e-7, atol=1e-9)
