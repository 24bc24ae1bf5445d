"""`petatron bench train --against hf` with experts: both sides train the same objective in the same precision."""

from __future__ import annotations

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.bench.peers import build, problems
from petatron.bench.peers.bench_workload import bench_spec, make_batches
from petatron.bench.peers.huggingface import TransformersContender
from petatron.cli.bench import main
from tests.longform import diagonal

SMALL = (
    "--device cpu --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 16 --vocab-size 67 --micro-batch-size 2 --lr 2e-3"
).split()


def losses(name: str, *flags: str, steps: int = 10) -> list[float]:
    spec = bench_spec(["--preset", "mixtral-slice", *SMALL, *flags])
    contender, batches = build(name, spec), make_batches(spec)
    return [float(contender.step(batches[number % len(batches)])) for number in range(steps)]


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / theirs[0]


@diagonal(3)
@pytest.mark.parametrize(
    "flags",
    ["", "--moe-z-loss-coeff 0.1", "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3"],
)
def test_ten_float32_steps_with_experts_agree(flags: str):
    ours, theirs = (losses(name, "--no-bf16", *flags.split()) for name in ("petatron", "hf"))
    assert largest_difference(ours, theirs) < 1e-5
    assert ours[-1] < ours[0]


def test_the_balancing_loss_is_part_of_the_comparison():
    """Without it on one side alone, losses are further apart than rounding explains."""
    balanced = losses("petatron", "--no-bf16", "--moe-aux-loss-coeff", "0.5")
    assert largest_difference(balanced, losses("hf", "--no-bf16", "--moe-aux-loss-coeff", "0")) > 1e-4


def test_experts_of_transformers_compute_in_bf16():
    """`grouped_mm` is unknown to autocast, so their weights are cast when they are read; gradients stay float32."""
    spec = bench_spec(["--preset", "mixtral-slice", *SMALL])
    contender = build("hf", spec)
    assert isinstance(contender, TransformersContender)
    seen: list[torch.dtype] = []
    experts = [module for module in contender._model.modules() if hasattr(module, "gate_up_proj")]
    for module in experts:
        module.register_forward_hook(lambda module, inputs, output: seen.append(module.gate_up_proj.dtype))
    contender.step(make_batches(spec)[0])
    assert seen == [torch.bfloat16] * 2
    assert {parameter.dtype for parameter in contender._model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--moe-expert-capacity-factor 1", "--moe-expert-capacity-factor changes the training of experts"),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0",
            "sinkhorn changes the training of experts",
        ),
        ("--moe-input-jitter-eps 0.1", "--moe-input-jitter-eps changes the training of experts"),
        ("--moe-router-force-load-balancing", "--moe-router-force-load-balancing changes the training"),
        ("--moe-router-num-groups 2 --moe-router-group-topk 1", "--moe-router-num-groups 2 balances groups of experts"),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            "--moe-router-enable-expert-bias changes the training",
        ),
        ("--fp64", "--against hf is measured in bf16 and float32 alone"),
    ],
)
def test_training_that_transformers_does_not_have_is_refused(flags: str, message: str):
    with pytest.raises(ConfigError) as error:
        main(["train", "--against", "hf", "--preset", "mixtral-slice", *SMALL, *flags.split()])
    assert message in str(error.value)


def test_groups_without_a_balancing_loss_are_no_problem_of_the_loss():
    flags = "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-aux-loss-coeff 0".split()
    found = problems("hf", bench_spec(["--preset", "mixtral-slice", *SMALL, *flags]))
    assert not any("balances groups" in str(problem) for problem in found)
