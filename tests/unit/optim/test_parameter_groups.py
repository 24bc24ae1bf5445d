"""Optimizer groups: which learning rate and multiplier each parameter of a model is updated with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import petatron
from petatron.layers.spec.param_spec import ParamSpec
from petatron.models.optimizer_groups import optimizer_group
from petatron.models.registry import model_spec
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.train.build_run import build_loader, build_model, build_optimizer
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.validate import load_config

RUN = "--mock-data --num-layers 1 --train-iters 3 --global-batch-size 2 --num-workers 0 --fp64 --eval-iters 0"
# Without momentum, clipping and decay, a step moves a weight by the learning rate times its gradient.
PLAIN = f"{RUN} --optimizer sgd --sgd-momentum 0 --clip-grad 0 --weight-decay 0 --lr 0.5 --lr-decay-style constant"


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def rates_of(flags: str, *, steps: int = 1, group_rule=None) -> dict[str, float]:
    """The learning rate that each parameter's last step shows, by name."""
    run = petatron.load("tiny-llama", f"{PLAIN} {flags}".split(), world_size=1).config
    mesh = petatron.launch(run)
    state = TrainState.build(run, mesh, model=build_model(run, mesh, group_rule=group_rule))
    loader = build_loader(run, mesh)
    for _ in range(steps):
        before = weights_of(state.model.module)
        train_step(state, next(loader))
    grads = {slot.name: group.param_grad(slot) for group in state.model.param_groups for slot in group.params}
    return {
        name: float((before[name] - after).norm() / grads[name].norm())
        for name, after in weights_of(state.model.module).items()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_decoupled_rate_is_that_of_embedding_and_output_head(tied: bool):
    rates = rates_of(f"--decoupled-lr 0.125 --{'no-' * tied}untie-embeddings-and-output-weights")
    decoupled = {name for name, rate in rates.items() if rate == pytest.approx(0.125)}
    assert decoupled == {"embedding.weight"} | (set() if tied else {"head.weight"})
    assert all(rate == pytest.approx(0.5) for name, rate in rates.items() if name not in decoupled)


def test_decoupled_rate_follows_its_schedule():
    flags = "--decoupled-lr 0.125 --lr-decay-style linear --lr-decay-iters 2 --decoupled-min-lr 0.0625 --min-lr 0.25"
    rates = rates_of(flags, steps=2)
    assert rates["embedding.weight"] == pytest.approx((0.125 + 0.0625) / 2)
    assert rates["norm.weight"] == pytest.approx((0.5 + 0.25) / 2)


def test_multiplier_of_a_group_from_python():
    def half_in_layers(name: str, param: ParamSpec) -> GroupSpec:
        return GroupSpec(rule="sgd", lr_scale=0.5 if name.startswith("layers.") else 1.0)

    rates = rates_of("", group_rule=half_in_layers)
    assert {name.startswith("layers."): round(rate, 6) for name, rate in rates.items()} == {True: 0.25, False: 0.5}


def test_decoupled_rate_without_a_schedule_is_the_flag():
    """As in a loop of one's own, which calls step() with nothing."""
    run = petatron.load("tiny-llama", f"{PLAIN} --decoupled-lr 0.125".split(), world_size=1).config
    model = build_model(run, petatron.launch(run))
    before = weights_of(model.module)
    model.train_step(next(build_loader(run, model.mesh)))
    build_optimizer(run, model).step()
    moved = {name: (before[name] - after).norm() for name, after in weights_of(model.module).items()}
    grads = {slot.name: g.param_grad(slot) for g in model.param_groups for slot in g.params}
    assert float(moved["embedding.weight"] / grads["embedding.weight"].norm()) == pytest.approx(0.125)
    assert float(moved["norm.weight"] / grads["norm.weight"].norm()) == pytest.approx(0.5)


@pytest.mark.parametrize(("optimizer", "rule"), [("adam", "adam"), ("sgd", "sgd"), ("muon", "adam")])
def test_groups_of_every_optimizer_with_a_decoupled_rate(optimizer: str, rule: str):
    flags = "--position-embedding-type learned_absolute --untie-embeddings-and-output-weights"
    run = petatron.load(
        "tiny-llama", f"{RUN} {flags} --lr 1e-3 --decoupled-lr 1e-4 --optimizer {optimizer}".split()
    ).config
    found = {name: optimizer_group(run.optim, name, param) for name, param in model_spec(run).params().items()}
    assert found["embedding.weight"] == found["head.weight"] == GroupSpec(rule=rule, decoupled_lr=True)
    assert not found["position.weight"].decoupled_lr
    assert not found["layers.0.mlp.down.weight"].decoupled_lr


def test_minimum_without_a_decoupled_rate_is_named():
    notices = load_config(f"{RUN} --lr 1e-3 --decoupled-min-lr 1e-5".split(), preset="tiny-llama").notices
    assert "--decoupled-min-lr has no effect: there is no --decoupled-lr" in notices
