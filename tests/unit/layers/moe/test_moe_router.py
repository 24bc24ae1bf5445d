"""Who is chosen, with what weight, and what is dropped; against definitions written out per token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from petatron.config.schema.model import MoEConfig
from petatron.layers.moe.load_balancing import SINGLE_RANK, expert_bias_update, sinkhorn
from petatron.layers.moe.router import Router

D, E, K = 6, 8, 3
MOE = MoEConfig(num_experts=E, moe_router_topk=K)


def build(**fields: object) -> Router:
    router = Router(D, E, replace(MOE, **fields)).double()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


def tokens(count: int = 20) -> Tensor:
    return torch.randn(count, 1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def route(router: Router, x: Tensor) -> list[dict[int, float]]:
    """For each token expert -> weight."""
    routing, _, _ = router(x, with_loss=False)
    pairs = zip(routing.experts_TK.tolist(), routing.weights_TK.tolist())
    return [{e: w for e, w in zip(experts, weights) if e < E} for experts, weights in pairs]


def logits(router: Router, x: Tensor) -> Tensor:
    return (x.flatten(0, 1) @ router.weight.t()).detach()


def same(found: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def test_softmax_over_the_chosen():
    router, x = build(), tokens()
    expected = []
    for row in logits(router, x):
        best = row.topk(K).indices.tolist()
        scale = sum(row[e].exp().item() for e in best)
        expected.append({e: row[e].exp().item() / scale for e in best})
    same(route(router, x), expected)


def test_softmax_before_choosing():
    router, x = build(moe_router_pre_softmax=True, moe_router_topk_scaling_factor=2.0), tokens()
    expected = []
    for row in logits(router, x).softmax(-1):
        expected.append({e: 2.0 * row[e].item() for e in row.topk(K).indices.tolist()})
    same(route(router, x), expected)


def test_sigmoid_is_divided_by_the_sum_of_the_chosen():
    router, x = build(moe_router_score_function="sigmoid"), tokens()
    expected = []
    for row in logits(router, x).sigmoid():
        best = row.topk(K).indices.tolist()
        expected.append({e: row[e].item() / sum(row[b].item() for b in best) for e in best})
    same(route(router, x), expected)
    one, scores = build(moe_router_score_function="sigmoid", moe_router_topk=1), logits(router, x).sigmoid()
    same(route(one, x), [{int(row.argmax()): row.max().item()} for row in scores])


def test_the_bias_chooses_but_does_not_weigh():
    router, x = build(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True), tokens()
    plain = route(router, x)
    assert router.expert_bias is not None
    router.expert_bias[5] = 10.0
    scores = logits(router, x).sigmoid()
    for row, chosen, before in zip(scores, route(router, x), plain, strict=True):
        assert 5 in chosen
        assert sum(chosen.values()) == pytest.approx(1.0)
        assert chosen[5] == pytest.approx((row[5] / sum(row[e] for e in chosen)).item())
        assert set(chosen) - {5} <= set(before)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_groups_limit_the_choice(score: str):
    router = build(moe_router_score_function=score, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk=2)
    x = tokens()
    ranking = logits(router, x) if score == "softmax" else logits(router, x).sigmoid()
    for row, chosen in zip(ranking, route(router, x), strict=True):
        best_of_group = row.view(4, 2).max(dim=1).values  # topk / group_topk = 1 expert decides
        allowed = {2 * g + i for g in best_of_group.topk(2).indices.tolist() for i in (0, 1)}
        best = sorted(allowed, key=lambda e: -row[e].item())[:2]
        assert set(chosen) == set(best)


def test_groups_are_ranked_by_the_sum_of_their_best():
    router = build(moe_router_num_groups=2, moe_router_group_topk=1, moe_router_topk=2)
    x = tokens()
    for row, chosen in zip(logits(router, x), route(router, x), strict=True):
        sums = row.view(2, 4).topk(2, dim=1).values.sum(1)
        assert {e // 4 for e in chosen} == {int(sums.argmax())}


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
def test_what_does_not_fit_is_dropped(policy: str, pad: bool):
    free = build()
    full = build(moe_expert_capacity_factor=0.5, moe_token_drop_policy=policy, moe_pad_expert_input_to_capacity=pad)
    x = tokens()
    before, after = route(free, x), route(full, x)
    capacity = 4  # ceil(20 x 3 / 8 x 0.5)
    for index in range(E):
        wanted = [(t, row[index]) for t, row in enumerate(before) if index in row]
        if policy == "probs":
            wanted.sort(key=lambda pair: -pair[1])
        kept = [(t, row[index]) for t, row in enumerate(after) if index in row]
        assert sorted(wanted[:capacity]) == sorted(kept), "the others keep their weights"
    routing, _, report = full(x, with_loss=False)
    assert routing.may_drop and routing.capacity == capacity and routing.pad_to_capacity == pad
    dropped = sum(map(len, before)) - sum(map(len, after))
    assert dropped > 0 and int(report[E]) == dropped
    assert report[:E].sum() == 60, "the report counts what the router asked for"


def test_capacity_is_at_most_all_and_at_least_one():
    roomy = build(moe_expert_capacity_factor=100.0, moe_pad_expert_input_to_capacity=True)
    assert roomy(tokens(), with_loss=False)[0].capacity == 20
    tight = build(moe_expert_capacity_factor=1e-6, moe_pad_expert_input_to_capacity=True)
    assert tight(tokens(), with_loss=False)[0].capacity == 1


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_product_is_made_in_the_precision_asked_for(dtype: str):
    router = build(moe_router_dtype=dtype).to(torch.bfloat16)
    x = tokens().to(torch.bfloat16)
    wide = torch.float32 if dtype == "fp32" else torch.float64
    exact = x.flatten(0, 1).to(wide) @ router.weight.to(wide).t()
    routing, _, _ = router(x, with_loss=False)
    assert routing.weights_TK.dtype == wide
    torch.testing.assert_close(
        routing.weights_TK, exact.gather(1, routing.experts_TK).softmax(-1), rtol=1e-6, atol=0.0, check_dtype=True
    )


def test_float64_stays_float64():
    routing, _, _ = build(moe_router_dtype="fp32")(tokens(), with_loss=False)
    assert routing.weights_TK.dtype == torch.float64


def test_jitter_only_in_training():
    router, x = build(moe_input_jitter_eps=0.5), tokens()
    still = build()
    assert route(router.eval(), x) == route(still, x)
    torch.manual_seed(0)
    first = route(router.train(), x)
    torch.manual_seed(0)
    assert route(router, x) == first != route(still, x)


def test_forced_balance_ignores_the_router_but_keeps_its_gradient():
    router, x = build(moe_router_force_load_balancing=True), tokens(4000)
    torch.nn.init.zeros_(router.weight)
    router.weight.data[0] = 100.0
    routing, _, report = router(x, with_loss=False)
    assert report[:E].max() / report[:E].mean() < 1.15
    routing.weights_TK[:, 0].sum().backward()
    assert router.weight.grad is not None and router.weight.grad.norm() > 0


def test_sinkhorn_is_doubly_even_and_chooses_in_training_only():
    values = torch.randn(40, 5, dtype=torch.float64) * 2
    even = sinkhorn(values, SINGLE_RANK)
    torch.testing.assert_close(even.sum(1), torch.full((40,), 1 / 40, dtype=torch.float64), rtol=1e-2, atol=0)
    torch.testing.assert_close(even.sum(0), torch.full((5,), 1 / 5, dtype=torch.float64), rtol=1e-2, atol=0)
    torch.testing.assert_close(sinkhorn(values + 500.0, SINGLE_RANK), even)  # nothing overflows
    router, x = build(moe_router_load_balancing_type="sinkhorn"), tokens(200)
    x[..., 0] = 1.0  # so that the first weight of an expert is a preference that all tokens share
    router.weight.data[2, 0] += 5.0
    in_training, in_use = router(x, with_loss=False)[2][:E], router.eval()(x, with_loss=False)[2][:E]
    assert in_training.max() < 120 and in_use.max() > 180
    scores = logits(router, x).softmax(-1)
    same(route(router, x), [{e: row[e].item() for e in row.topk(K).indices.tolist()} for row in scores])
    one = build(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1).eval()
    same(route(one, x), [{int(row.argmax()): row.max().item()} for row in logits(one, x).sigmoid()])


def test_the_bias_stays_float32_and_starts_at_zero():
    with torch.device("meta"):
        router = Router(D, E, replace(MOE, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"))
    router = router.to(torch.bfloat16).to_empty(device="cpu")
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias is not None and router.expert_bias.dtype == torch.float32
    assert router.expert_bias.tolist() == [0.0] * E
    router.expert_bias += 1.0
    assert router.double().expert_bias.tolist() == [1.0] * E and "expert_bias" in router.state_dict()


def test_bias_moves_against_the_load():
    bias = torch.tensor([0.5, 0.0, 0.0, -0.5])
    moved = expert_bias_update(bias, torch.tensor([9, 1, 4, 2]), 0.001)
    torch.testing.assert_close(moved, torch.tensor([0.499, 0.001, 0.0, -0.499]))


def test_so_many_experts_rank_a_group():
    """The best expert is in one group, the best two in the other."""
    settings = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2}
    ranking = torch.tensor([[9.0, 0.0, 0.0, 0.0, 6.0, 5.0, 0.0, 0.0]])
    for count, group in ((None, 1), (1, 0), (2, 1)):
        [chosen] = build(**settings, moe_router_group_score_topk=count)._topk_experts(ranking)
        assert {int(expert) // 4 for expert in chosen} == {group}
