"""Soft caps and sinks against the definition: a softmax over all scores and one more, in float64, with autograd's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import attention, block_attention
from petatron.kernels.attention.score_modifiers import ScoreRules
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.attention.visible_key_intervals import BlockMask, VisibleKeys

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 13, 2, 4, 2, 6


def definition(q: Tensor, k: Tensor, v: Tensor, window: int | None, rules: ScoreRules) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (k, v))
    scores = torch.einsum("sbhe,tbhe->bhst", q, k) * WIDTH**-0.5
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or LENGTH)), -torch.inf)
    if rules.sinks_H is not None:
        scores = torch.cat((scores, rules.sinks_H.view(1, HEADS, 1, 1).expand(BATCH, -1, LENGTH, -1)), dim=-1)
    return torch.einsum("bhst,tbhe->sbhe", scores.softmax(-1)[..., :LENGTH], v)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.8, False), (None, True), (0.8, True)])
def test_output_and_gradients_are_those_of_the_definition(window: int | None, softcap: float | None, has_sinks: bool):
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = drawn(LENGTH, BATCH, HEADS, WIDTH), *(drawn(LENGTH, BATCH, GROUPS, WIDTH) for _ in range(2))
    sinks = drawn(HEADS) if has_sinks else None
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    rules = ScoreRules(softcap, sinks)
    visibility = Visibility(window=window)
    visible = VisibleKeys.of(visibility, LENGTH, q.device)
    tiled = BlockMask((range(LENGTH),), (range(LENGTH),), visible, tile_size=5)
    wanted = definition(q, k, v, window, rules)
    grad = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    wanted_grads = torch.autograd.grad(wanted, inputs, grad)
    for out in (attention(q, k, v, visibility, rules=rules), block_attention(q, k, v, tiled, rules=rules)):
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
        for found, true in zip(torch.autograd.grad(out, inputs, grad), wanted_grads, strict=True):
            torch.testing.assert_close(found, true, rtol=0, atol=1e-12)
