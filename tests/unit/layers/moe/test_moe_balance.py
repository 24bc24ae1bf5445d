"""Balancing losses and reports against their definitions, and split over ranks that each add their share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from petatron.config.schema.model import MoEConfig
from petatron.layers.moe.load_balancing import ReductionGroup, attach_aux_loss, expert_counts, router_health
from petatron.layers.moe.router import Router

S, B, D, E, K = 8, 3, 5, 4, 2
MOE = MoEConfig(num_experts=E, moe_router_topk=K, moe_aux_loss_coeff=0.3)


def build(**fields: object) -> Router:
    router = Router(D, E, replace(MOE, **fields)).double()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


def tokens(batch: int = B, seed: int = 1) -> Tensor:
    return torch.randn(S, batch, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scores_and_choices(router: Router, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    logits = x_TD @ router.weight.t()
    if router.moe.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    else:
        scores = logits.softmax(-1)
    return scores, logits.topk(K).indices


def switch_loss(router: Router, x_TD: Tensor, counted: Tensor | None = None) -> Tensor:
    """E sum f P; f of other tokens than P if `counted` is given."""
    scores, chosen = scores_and_choices(router, x_TD)
    if counted is not None:
        _, chosen = scores_and_choices(router, counted)
    total = torch.zeros((), dtype=torch.float64)
    for index in range(E):
        share = sum(row.tolist().count(index) for row in chosen) / chosen.numel()
        total = total + share * scores[:, index].mean()
    return E * total


def check(loss: Tensor | None, expected: Tensor, router: Router) -> None:
    assert loss is not None
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(value, router.weight)[0] for value in (loss, expected))
    torch.testing.assert_close(ours, theirs)
    assert ours.norm() > 1e-4


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_aux_loss(score: str):
    router, x = build(moe_router_score_function=score), tokens()
    _, loss, _ = router(x, with_loss=True)
    check(loss, 0.3 * switch_loss(router, x.flatten(0, 1)), router)


def test_sequence_aux_loss():
    router, x = build(moe_router_load_balancing_type="seq_aux_loss"), tokens()
    _, loss, _ = router(x, with_loss=True)
    check(loss, 0.3 * sum(switch_loss(router, x[:, b]) for b in range(B)) / B, router)


def test_z_loss():
    router, x = build(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.01), tokens()
    _, loss, _ = router(x, with_loss=True)
    check(loss, 0.01 * (x.flatten(0, 1) @ router.weight.t()).exp().sum(-1).log().square().mean(), router)


def test_both_losses_are_added():
    router, x = build(moe_z_loss_coeff=0.01), tokens()
    parts = [build()(x, with_loss=True)[1], build(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.01)(x, with_loss=True)[1]]
    torch.testing.assert_close(router(x, with_loss=True)[1], parts[0] + parts[1])


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_an_even_load_costs_one(kind: str):
    router = Router(E, E, replace(MOE, moe_router_load_balancing_type=kind, moe_router_topk=1, moe_aux_loss_coeff=1.0))
    torch.nn.init.eye_(router.weight)
    x = 3.0 * torch.eye(E).repeat(2, 1)[:, None]
    _, loss, _ = router(x, with_loss=True)
    assert loss is not None and loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize("fields", [{"moe_router_load_balancing_type": "none"}, {"moe_aux_loss_coeff": 0.0}])
def test_no_loss(fields: dict[str, object]):
    assert build(**fields)(tokens(), with_loss=True)[1] is None
    assert build()(tokens(), with_loss=False)[1] is None


def shares(router: Router, parts: list[Tensor], kind: str, replicas: int = 1) -> list[Tensor]:
    """Each rank's share of the loss, the sums over ranks made by hand. `parts` are replicas x ranks of a sequence group."""
    ranks = len(parts) // replicas
    batch = 1 if kind != "seq_aux_loss" else parts[0].shape[1]
    every = []
    for part in parts:
        _, chosen = scores_and_choices(router, part.flatten(0, 1))
        every.append(
            torch.stack(
                [
                    torch.bincount(chosen.view(part.shape[0], -1, K)[:, b].flatten(), minlength=E)
                    for b in range(part.shape[1])
                ]
            )
        )
    if batch == 1:
        every = [counts.sum(0, keepdim=True) for counts in every]
    found = []
    for index, part in enumerate(parts):
        group = every[index // ranks * ranks : (index // ranks + 1) * ranks]
        router.sequence_group = ReductionGroup(ranks, lambda counts, group=group: counts.copy_(sum(group)))
        router.stage_group = ReductionGroup(len(parts), lambda counts: counts.copy_(sum(every)))
        _, loss, _ = router(part, with_loss=True)
        assert loss is not None
        found.append(loss)
    return found


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_shares_of_the_ranks_of_a_sequence_add_up(kind: str):
    router, x = build(moe_router_load_balancing_type=kind, moe_z_loss_coeff=0.01), tokens()
    _, whole, _ = router(x, with_loss=True)
    assert whole is not None
    check(sum(shares(router, list(x.chunk(4)), kind)), whole, router)


def test_global_aux_loss_counts_the_load_of_all_replicas():
    router = build(moe_router_load_balancing_type="global_aux_loss")
    first, second = tokens(2, seed=1), tokens(2, seed=2)
    parts = [*first.chunk(2), *second.chunk(2)]
    found = sum(shares(router, parts, "global_aux_loss", replicas=2)) / 2  # mean over the two micro-batches
    everything = torch.cat([first, second], dim=1).flatten(0, 1)
    expected = 0.3 * sum(switch_loss(router, x.flatten(0, 1), everything) for x in (first, second)) / 2
    check(found, expected, router)
    torch.testing.assert_close(expected, 0.3 * switch_loss(router, everything))


def test_attach_gives_the_loss_a_gradient_of_one():
    x = torch.randn(3, requires_grad=True)
    weight = torch.tensor(2.0, requires_grad=True)
    y = attach_aux_loss(x * 1.0, weight * 5.0)
    assert torch.equal(y, x)
    (y * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 2.0, 3.0]
    assert weight.grad is not None and weight.grad.item() == 5.0


def test_reports_of_parts_add_up_to_the_report_of_the_whole():
    router, x = build(moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.1), tokens()
    _, _, whole = router(x, with_loss=True)
    router.sequence_group = ReductionGroup(4)
    parts = [router(part, with_loss=True)[2] for part in x.chunk(4)]
    torch.testing.assert_close(sum(parts), whole)
    assert expert_counts(whole).sum() == S * B * K


def test_health():
    router, x = build(moe_z_loss_coeff=0.01, moe_expert_capacity_factor=0.5), tokens()
    routing, loss, report = router(x, with_loss=True)
    scores, chosen = scores_and_choices(router, x.flatten(0, 1))
    counts = torch.bincount(chosen.flatten(), minlength=E)
    health = router_health(report + report)  # two micro-batches
    assert health.load_max_over_mean == pytest.approx(counts.max().item() / counts.double().mean().item())
    assert health.entropy == pytest.approx(-(scores * scores.log()).sum(-1).mean().item())
    assert health.dropped == pytest.approx((routing.experts_TK == E).double().mean().item()) and health.dropped > 0
    z = (x.flatten(0, 1) @ router.weight.t()).logsumexp(-1)
    assert health.z == pytest.approx(z.square().mean().item())
    assert loss is not None and health.extra_loss == pytest.approx(loss.item())


def test_health_at_its_limits():
    even = Router(D, E, replace(MOE, moe_router_topk=E)).double()
    torch.nn.init.zeros_(even.weight)
    health = router_health(even(tokens(), with_loss=False)[2])
    assert health.load_max_over_mean == 1.0 and health.entropy == pytest.approx(math.log(E)) and health.dropped == 0
    assert health.z == pytest.approx(math.log(E) ** 2)
    assert router_health(torch.zeros(E + 6)).load_max_over_mean == 0.0, "no tokens yet"
