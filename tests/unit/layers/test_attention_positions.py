"""Linear biases of scores, chunks and temperatures against their definitions, and with transformers' slopes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from petatron.kernels.attention import attention
from petatron.kernels.attention.document_layout import Documents, cut_into_chunks
from petatron.kernels.attention.visibility import Visibility
from petatron.layers.alibi_and_temperature import AlibiBias, AttentionTemperature, alibi_slopes, l2_norm

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 11, 2, 6, 2, 5


def heads(count: int) -> Tensor:
    return torch.randn(LENGTH, BATCH, count, WIDTH, dtype=torch.float64)


def by_definition(q: Tensor, k: Tensor, v: Tensor, bias_HST: Tensor, visible_ST: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (k, v))
    scores = torch.einsum("sbhe,tbhe->bhst", q, k) / math.sqrt(WIDTH) + bias_HST
    return torch.einsum("bhst,tbhe->sbhe", scores.masked_fill(~visible_ST, -torch.inf).softmax(-1), v)


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 12, 40])
def test_slopes_are_those_of_bloom(count: int):
    theirs = build_alibi_tensor(torch.ones(1, 2), count, torch.float64)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(count), dtype=torch.float64), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("offset", [0, 4000])
@pytest.mark.parametrize("ranks", [1, 2])
def test_wider_heads_have_the_bias(ranks: int, offset: int):
    q, k, v = heads(HEADS), heads(GROUPS), heads(GROUPS)
    at = torch.arange(LENGTH)
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)
    wanted = by_definition(q, k, v, -slopes[:, None, None] * (at[:, None] - at), causal())
    each, groups = HEADS // ranks, GROUPS // ranks
    parts = []
    for rank in range(ranks):
        bias = AlibiBias(HEADS)
        bias.tensor_rank = (rank, ranks)
        own_kv = slice(rank * groups, (rank + 1) * groups)
        wide_q, wide_k = bias.widen(q[:, :, rank * each : (rank + 1) * each], k[:, :, own_kv], at + offset)
        parts.append(attention(wide_q, wide_k, v[:, :, own_kv]))
    torch.testing.assert_close(torch.cat(parts, dim=2), wanted, rtol=0, atol=1e-11)


def test_positions_are_exact_in_half_precision():
    """Distances far into a sequence are those at its start: nothing of a position is rounded."""
    bias, q, k = AlibiBias(2), torch.zeros(3, 1, 2, 8).bfloat16(), torch.zeros(3, 1, 2, 8).bfloat16()
    near, far = (bias.widen(q, k, torch.arange(first, first + 3)) for first in (0, 65_533))
    scores = [torch.einsum("sbhe,tbhe->hst", *(x.float() for x in pair)) for pair in (near, far)]
    differences = [part - part[..., :1] for part in scores]
    torch.testing.assert_close(differences[0], differences[1], rtol=0, atol=2e-2)
    assert (differences[0][0, 0].diff() > 0.1).all()


@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 20])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_end_what_a_token_sees(chunk: int, packed: bool):
    q, k, v = heads(HEADS), heads(GROUPS), heads(GROUPS)
    starts = torch.tensor([0] * 4 + [4] * (LENGTH - 4)) if packed else torch.zeros(LENGTH, dtype=torch.long)
    documents = Documents.of(starts.expand(BATCH, -1)) if packed else None
    number = (torch.arange(LENGTH) - starts) // chunk
    same = (starts[:, None] == starts) & (number[:, None] == number)
    wanted = by_definition(q, k, v, torch.zeros(()), causal() & same)
    found = attention(q, k, v, Visibility(chunk=chunk, documents=documents))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_chunks_of_one_size_are_made_once():
    made = [cut_into_chunks(None, 4, batch=2, length=8, device=torch.device("cpu")) for _ in range(2)]
    assert made[0] is made[1] and made[0].cu_seqlens.tolist() == [0, 4, 8, 12, 16]


def test_a_temperature_begins_after_its_floor():
    q = torch.ones(6, 1, 2, 3, dtype=torch.float64)
    found = AttentionTemperature(0.5, 2).apply(q, torch.arange(6))[:, 0, 0, 0]
    steps = [0, 1, 1, 2, 2, 3]
    torch.testing.assert_close(found, torch.tensor([1 + 0.5 * math.log1p(step) for step in steps], dtype=torch.float64))
    shifted = AttentionTemperature(0.5, 2).apply(
        q.expand(6, 2, 2, 3), torch.stack((torch.arange(6), torch.arange(3, 9)))
    )
    assert torch.equal(shifted[:3, 1], shifted[3:, 0])


def test_a_norm_without_weights():
    x = heads(2)
    torch.testing.assert_close(l2_norm(x, 0.0).square().mean(-1), torch.ones(LENGTH, BATCH, 2, dtype=torch.float64))
    assert l2_norm(x.bfloat16(), 1e-5).dtype == torch.bfloat16
