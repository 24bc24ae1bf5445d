"""Both ends of a model: over a vocabulary that is spread over ranks, and with a loss that is made in chunks of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from petatron.kernels import embedding_grad as embedding_reference
from petatron.kernels import fused_linear_cross_entropy as linear_cross_entropy
from petatron.layers.vocabulary.embedding import TokenEmbedding
from petatron.layers.vocabulary.output_head import OutputHead
from petatron.layers.vocabulary.vocabulary_shard import VocabShard
from petatron.models.batch import Batch
from petatron.parallel.tensor_parallel import set_weight_grad_target
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement
from tests.kernels.loss_cases import Ranks
from tests.run_stage import run_stage
from tests.unit.layers.test_linear_op import Buffers, leaf
from tests.unit.models.test_activations import BASE, LLAMA, batch_of, build, run_of

S, B, D = 5, 2, 3


def vocabulary(ranks: Ranks, rank: int, size: int, pad_to: int) -> VocabShard:
    """The rows that a rank of a real run holds."""
    pieces = compute_placement(
        "head", (size,), Shard(tp=0, pad_to=pad_to), ModelParallelCoordinate(ranks.count, rank)
    ).tensor_shards
    return VocabShard(
        vocab_size=size,
        first_id=pieces[0].start[0] if pieces else size,
        num_ids=pieces[0].shape[0] if pieces else 0,
        all_reduce_max_sum=ranks.exchanges(rank),
        all_gather_logits=lambda x: ranks.all_of(rank, x).flatten(0, 1),
    )


def padded_table(size: int, length: int, *, padding: float) -> Tensor:
    table = torch.full((length, D), padding, dtype=torch.float64)
    table[:size] = torch.randn(size, D, dtype=torch.float64)
    return table


@pytest.mark.parametrize("known", [False, True])
@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 40), count=st.integers(1, 4), pad_to=st.integers(1, 8), chunk=st.integers(1, S * B))
def test_losses_over_ranks(size: int, count: int, pad_to: int, chunk: int, known: bool):
    """Every rank has all losses, its summand of the input's gradient and its rows of the weight's; padding gets none."""
    torch.manual_seed(size * 100 + count * 10 + pad_to)
    local = -(-size // (pad_to * count)) * pad_to
    table = padded_table(size, local * count, padding=1e3)
    x, targets = torch.randn(S, B, D, dtype=torch.float64), torch.randint(size, (S, B))
    weights = torch.rand(S, B, dtype=torch.float64)
    ranks = Ranks(count)

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        head = OutputHead(local, D, tied=False)
        head.weight = nn.Parameter(table[rank * local : (rank + 1) * local].clone())
        head.vocab_shard = vocabulary(ranks, rank, size, pad_to)
        mine = x.clone().requires_grad_()
        losses = head.losses(mine, None, targets, loss_weights_SB=weights if known else None)
        return losses.detach(), *torch.autograd.grad((losses * weights).sum(), (mine, head.weight))

    leaves = x.clone().requires_grad_(), table[:size].clone().requires_grad_()
    logits = leaves[0] @ leaves[1].t()
    true = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(S, B)
    true_x, true_table = torch.autograd.grad((true * weights).sum(), leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_cross_entropy, "CHUNK_BYTES", chunk * local * 8)
        results = ranks.run(work)
    for losses, _, _ in results:
        torch.testing.assert_close(losses, true, rtol=0, atol=1e-11)
    torch.testing.assert_close(sum(grad for _, grad, _ in results), true_x, rtol=0, atol=1e-11)
    joined = torch.cat([grad for _, _, grad in results])
    torch.testing.assert_close(joined[:size], true_table, rtol=0, atol=1e-11)
    assert not joined[size:].any()


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 40), count=st.integers(1, 4), pad_to=st.integers(1, 8))
def test_lookup_and_whole_logits_over_ranks(size: int, count: int, pad_to: int):
    torch.manual_seed(size)
    local = -(-size // (pad_to * count)) * pad_to
    table = padded_table(size, local * count, padding=0.0)
    ids, hidden = torch.randint(size, (4, 2)), torch.randn(4, 2, D, dtype=torch.float64)
    ranks = Ranks(count)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        mine = table[rank * local : (rank + 1) * local]
        embedding = TokenEmbedding(size, D)
        embedding.weight, embedding.vocab_shard = nn.Parameter(mine), vocabulary(ranks, rank, size, pad_to)
        return embedding(ids.t()), embedding.vocab_shard.full_logits(hidden @ mine.t())

    results = ranks.run(work)
    assert torch.equal(torch.stack([rows for rows, _ in results]).sum(0), table[ids])
    for _, logits in results:
        torch.testing.assert_close(logits, hidden @ table[:size].t())


class Watched:
    """The plain kernel, and where the gradients lie that it gets."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def embedding_grad(self, ids_T: Tensor, grad_TD: Tensor, out_VD: Tensor, *, accumulate: bool) -> None:
        self.places.append(grad_TD.data_ptr())
        embedding_reference.embedding_grad(ids_T, grad_TD, out_VD, accumulate=accumulate)


@pytest.mark.parametrize("takes", [False, True])
def test_the_gradient_of_a_table_over_ranks(takes: bool):
    """Ids that no rank has, in the padded end of the table too, add nothing; gradients reach the kernel without a copy."""
    size, count, local = 37, 4, 10
    table = padded_table(size, local * count, padding=1e3)
    ids, grad = torch.randint(-3, local * count + 3, (4, 50)), torch.randn(4, 50, D, dtype=torch.float64)
    ids[0, :3] = torch.tensor([-1, size, size + 1])
    here = (ids >= 0) & (ids < size)
    ranks = Ranks(count)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        embedding = TokenEmbedding(size, D)
        embedding.weight = nn.Parameter(table[rank * local : (rank + 1) * local].clone())
        embedding.vocab_shard = vocabulary(ranks, rank, size, pad_to=5)
        embedding.kernels = watched = Watched()
        buffers = Buffers(embedding.weight)
        embedding.weight_grad_target = buffers.queue() if takes else None
        first, second = embedding(ids), embedding(ids)
        for found in (first, second):
            found.backward(grad.transpose(0, 1))
        assert watched.places == [grad.data_ptr()] * 2
        total = buffers.out[embedding.weight] if takes else embedding.weight.grad
        assert total is not None
        return first.detach(), total

    results = ranks.run(work)
    rows = torch.where(here.unsqueeze(-1), table[ids.clamp(0, size - 1)], 0)
    assert torch.equal(torch.stack([found for found, _ in results]).sum(0), rows.transpose(0, 1))
    true = torch.zeros(local * count, D, dtype=torch.float64).index_add_(0, ids[here], grad[here])
    torch.testing.assert_close(torch.cat([total for _, total in results]), 2 * true, rtol=0, atol=1e-13)


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("sizes", [[S * B], [3, 3, 3, 1]])
def test_chunks_of_two_micro_batches(monkeypatch: pytest.MonkeyPatch, sizes: list[int], known: bool, takes: bool):
    """The first micro-batch overwrites what the last step has left, and of it the first chunk only; all others add."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", sizes[0] * 11 * 8)
    head = OutputHead(11, D, tied=False).double()
    assert head.weight is not None
    weight = nn.init.normal_(head.weight)
    chunks: list[int] = []

    def watched(logits: Tensor, *args) -> Tensor:
        chunks.append(len(logits))
        return linear_cross_entropy.losses_and_gradient_(logits, *args)

    head.kernels = replace(linear_cross_entropy.REFERENCE, losses_and_gradient_=watched)
    buffers = Buffers(weight)
    head.weight_grad_target = buffers.queue() if takes else None
    true_total = torch.zeros_like(weight)
    for _ in range(2):
        x, targets, weights = leaf(S, B, D), torch.randint(11, (S, B)), torch.rand(S, B).double()
        losses = head.losses(x, None, targets, loss_weights_SB=weights if known else None)
        (losses * weights).sum().backward()
        true = F.cross_entropy((x @ weight.t()).flatten(0, 1), targets.flatten(), reduction="none").view(S, B)
        true_x, true_weight = torch.autograd.grad((true * weights).sum(), (x, weight))
        true_total += true_weight
        torch.testing.assert_close(losses, true, rtol=0, atol=1e-13)
        torch.testing.assert_close(x.grad, true_x, rtol=0, atol=1e-13)
        total = buffers.out[weight] if takes else weight.grad
        torch.testing.assert_close(total, true_total, rtol=0, atol=1e-13)
    assert chunks == sizes * 2


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_no_tokens_have_a_gradient_of_zero(known: bool, takes: bool):
    head = OutputHead(11, D, tied=False).double()
    assert head.weight is not None
    buffers = Buffers(nn.init.normal_(head.weight))
    head.weight_grad_target = buffers.queue() if takes else None
    weights = torch.ones(0, B).double() if known else None
    head.losses(leaf(0, B, D), None, torch.zeros(0, B, dtype=torch.int64), loss_weights_SB=weights).sum().backward()
    found = buffers.out[head.weight] if takes else head.weight.grad
    assert found is not None and torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("flags", [f"{BASE} --hidden-dropout 0", LLAMA], ids=["tied", "untied"])
def test_chunks_change_no_gradient_of_a_model(monkeypatch: pytest.MonkeyPatch, flags: str):
    run = run_of(flags)
    model, _ = build(run, dtype=torch.float64)
    batch = batch_of(run)
    batches = [Batch(batch.tokens.roll(at, 1), batch.labels.roll(at, 1), batch.loss_mask) for at in range(2)]
    weights = torch.rand(batch.tokens.t().shape, dtype=torch.float64)

    def train() -> dict[str, Tensor]:
        buffers = Buffers(*model.parameters())
        set_weight_grad_target(model, buffers.queue())
        model.zero_grad()
        for batch in batches:
            (run_stage(model, batch, loss_weights_SB=weights) * weights).sum().backward()
        assert model.head is not None and (model.head.weight is None) == (flags != LLAMA)
        taken = {name: buffers.out[weight] for name, weight in model.named_parameters() if weight not in buffers.fresh}
        assert "embedding.weight" in taken and ("head.weight" in taken) == (flags == LLAMA)
        return taken | {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    whole = train()
    assert whole.keys() == dict(model.named_parameters()).keys()
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 5 * 131 * 8)
    for name, ours in train().items():
        torch.testing.assert_close(ours, whole[name], rtol=0, atol=1e-12, msg=name)
