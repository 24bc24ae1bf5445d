"""Triton's attention of key intervals against its plain twin in float64: what is visible, biases near and far, shared heads, no keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import attention
from petatron.kernels.attention import key_interval_attention as plain
from petatron.kernels.attention.document_layout import Documents, KeySpans
from petatron.kernels.attention.score_modifiers import ScoreRules
from petatron.kernels.attention.visibility import Visibility

pytest.importorskip("triton")
from petatron.kernels.triton.attention import key_interval_attention as fused
from tests.longform import diagonal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUND = 1e-3
"""Norm of the difference over the norm, of float16."""


@dataclass(frozen=True, slots=True)
class Case:
    """distances: columns of the table; None: no biases. keys: of another sequence."""

    visible: str
    distances: int | None = None
    length: int = 100
    heads: int = 2
    groups: int = 2
    width: int = 16
    keys: int | None = None

    def visibility(self) -> Visibility:
        lengths = np.array([self.length * 2 // 3, self.length])
        documents = Documents.of_lengths(lengths, self.length).to(DEVICE)
        spans = KeySpans.of_lengths(torch.tensor([self.keys or 0, 0]), self.length).to(DEVICE)
        return {
            "causal": Visibility(),
            "full": Visibility.full(),
            "causal documents": Visibility(documents=documents),
            "full documents": Visibility("full", documents=documents),
            "window": Visibility.full(window=20),
            "cross": Visibility.cross(),
            "spans, one of them empty": Visibility("cross", key_spans=spans),
        }[self.visible]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        generator, keys = torch.Generator().manual_seed(5), self.keys or self.length

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, torch.float16)

        q = drawn(2, self.length, self.heads, self.width).transpose(0, 1)  # batch first in memory
        kv = drawn(keys, 2, 2 * self.groups, self.width)
        k, v = kv.split(self.groups, dim=2)
        return q, k, v, None if self.distances is None else drawn(self.heads, self.distances)


CASES = [
    Case("causal", 33),
    Case("full", 33),
    Case("full", 301, length=70),
    Case("full", 9, heads=4, groups=2),
    Case("causal documents", 33, heads=2, groups=1),
    Case("full documents", 33),
    Case("window", 33, width=32),
    Case("causal", length=40),
    Case("cross", keys=80),
    Case("spans, one of them empty", keys=80),
]


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape
    return float((ours.detach().double() - true.detach()).norm() / true.detach().norm().clamp(min=1e-30))


@diagonal(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(case: Case):
    q, k, v, bias = case.tensors()
    visibility = case.visibility()
    exact = [None if x is None else x.double().requires_grad_() for x in (q, k, v, bias)]
    ours = [
        None if x is None else x.clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v, bias)
    ]
    true = plain.key_interval_attention(*exact[:3], visibility, exact[3], plain)
    found = plain.key_interval_attention(*ours[:3], visibility, ours[3], fused)
    assert found.stride() == q.stride() and far(found, true) < BOUND
    grad = torch.randn_like(true)
    leaves = [[x for x in tensors if x is not None] for tensors in (ours, exact)]
    of_ours = torch.autograd.grad(found, leaves[0], grad.half())
    for mine, theirs in zip(of_ours, torch.autograd.grad(true, leaves[1], grad), strict=True):
        assert far(mine, theirs) < BOUND
    again = torch.autograd.grad(
        plain.key_interval_attention(*ours[:3], visibility, ours[3], fused), leaves[0], grad.half()
    )
    assert all(torch.equal(one, other) for one, other in zip(of_ours, again, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_twin_is_blocks_and_tiles(case: Case):
    q, k, v, bias = (None if x is None else x.double().requires_grad_() for x in case.tensors())
    visibility, leaves = case.visibility(), [x for x in (q, k, v, bias) if x is not None]
    rules = None if bias is None else ScoreRules(bias_HD=bias)
    wanted = attention(q, k, v, visibility, rules=rules)
    found = plain.key_interval_attention(q, k, v, visibility, bias, plain)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    grad = torch.randn_like(wanted)
    for ours, true in zip(*(torch.autograd.grad(y, leaves, grad) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-11)


def test_attention_uses_it_for_biases_and_spans_without_dropout():
    case = Case("full documents", 33)
    q, k, v, bias = case.tensors()
    rules = ScoreRules(bias_HD=bias)
    wanted = attention(q, k, v, case.visibility(), rules=rules, interval_kernels=fused)
    assert torch.equal(wanted, plain.key_interval_attention(q, k, v, case.visibility(), bias, fused))
    for tensors in ((q.float(), k.float(), v.float()), (q[..., :8], k[..., :8], v[..., :8])):
        assert fused.unsupported_tensors_reason(tensors[0], tensors[2]) is not None
