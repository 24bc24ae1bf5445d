"""Context parallelism by itself: who holds what, and attention over ranks against attention over the whole sequence."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from petatron.kernels.attention.blockwise_attention import PartialAttention
from petatron.kernels.attention.document_layout import Documents, KeySpans
from petatron.kernels.attention.visibility import CAUSAL, Visibility
from petatron.layers.core_attention import CoreAttention
from petatron.mesh.comm_record import CommRecord
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import SequenceOrder
from petatron.parallel.context import apply_context_parallel, ring_attention, split_batch
from petatron.parallel.context.zigzag import contiguous_positions, sorted_by_position, sorted_by_rank, zigzag_positions
from tests import reference_attention as reference
from tests.dist import RankFailure, RankPool
from tests.longform import diagonal, every_second, later, one_in

S, B, E = 48, 2, 4
SCHEMES = {
    ("p2p", 2): (),
    ("p2p", 4): (),
    ("all_gather", 2): (),
    ("all_gather", 4): (),
    ("a2a", 2): (),
    ("a2a", 4): (),
    ("a2a+p2p", 4): (2, 2),
}
DOCUMENTS = torch.tensor([[0] * 7 + [7] * 10 + [17] * 1 + [18] * 30, [0] * 33 + [33] * 15])
CASES: dict[str, tuple[int, int, int | None, Tensor | None]] = {
    "plain": (4, 4, None, None),
    "grouped": (8, 4, None, None),
    "window": (4, 4, 5, None),
    "long window": (4, 4, 29, None),
    "documents": (4, 4, None, DOCUMENTS),
    "documents and window": (8, 4, 9, DOCUMENTS),
}


def axis(size: int, rank: int) -> Axis:
    return Axis("cp", size, rank, tuple(range(size)), None, CommRecord())


def held(size: int, rank: int, length: int) -> list[int]:
    return [position for run in zigzag_positions(rank, size, length) for position in run]


def inputs(heads: int, groups: int) -> list[Tensor]:
    """q, k, v of the whole sequence and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(heads * 10 + groups)
    return [torch.randn(S, B, n, E, dtype=torch.float64, generator=generator) for n in (heads, groups, groups, heads)]


class Holder(nn.Module):
    """A model with one core attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.core = CoreAttention(dropout=dropout)


class TestOrder:
    @given(size=st.integers(1, 6), chunk=st.integers(1, 4))
    def test_every_position_has_one_owner_and_work_is_even(self, size: int, chunk: int):
        length = 2 * size * chunk
        owned = [held(size, rank, length) for rank in range(size)]
        assert sorted(itertools.chain(*owned)) == list(range(length))
        assert len({sum(position + 1 for position in positions) for positions in owned}) == 1

    @settings(deadline=None)
    @given(groups=st.integers(1, 4), ranks=st.integers(1, 4), chunk=st.integers(1, 3))
    def test_a_block_of_ranks_holds_the_zigzag_over_blocks(self, groups: int, ranks: int, chunk: int):
        size = groups * ranks
        length = 2 * size * chunk
        for group in range(groups):
            members = range(group * ranks, (group + 1) * ranks)
            rows = torch.tensor([position for rank in members for position in held(size, rank, length)])
            if size > 1:
                pooled = sorted_by_position(rows, ranks)
                assert pooled.tolist() == held(groups, group, length)
                assert torch.equal(sorted_by_rank(pooled, ranks), rows)

    def test_a_length_that_cannot_be_cut(self):
        with pytest.raises(AssertionError, match="12 tokens cannot be cut into 2 x 4 chunks"):
            zigzag_positions(0, 4, 12)


class TestSplitBatch:
    def batch(self, **changes: Any) -> Batch:
        tokens = torch.arange(32).view(2, 16)
        return Batch(tokens, tokens + 1, tokens.to(torch.float32), **changes)

    def test_parts(self):
        part = split_batch(self.batch(), axis(2, 1))
        assert part.tokens.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23, 24, 25, 26, 27]]
        assert torch.equal(part.labels, part.tokens + 1) and torch.equal(part.loss_mask, part.tokens.float())
        assert part.positions is not None and part.positions.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
        assert part.documents is None

    def test_positions_are_cut_and_documents_are_not(self):
        own = torch.arange(32).view(2, 16) % 5
        documents = Documents.of(torch.arange(16).sub(torch.arange(16) % 5).expand(2, 16))
        part = split_batch(self.batch(positions=own, documents=documents), axis(4, 0))
        assert part.positions is not None and torch.equal(part.positions, own[:, [0, 1, 14, 15]])
        assert part.documents is documents

    def test_in_contiguous_order(self):
        part = split_batch(self.batch(), axis(4, 1), order="contiguous")
        assert part.positions is not None and part.positions.tolist() == [4, 5, 6, 7]
        assert part.tokens.tolist() == [[4, 5, 6, 7], [20, 21, 22, 23]]

    @pytest.mark.parametrize("order", ["zigzag", "contiguous"])
    def test_all_ranks_have_every_position_once(self, order: SequenceOrder):
        parts = [split_batch(self.batch(), axis(4, rank), order=order).positions for rank in range(4)]
        assert sorted(torch.cat([part for part in parts if part is not None]).tolist()) == list(range(16))

    def test_other_arrays_are_cut_where_they_are_declared(self):
        """Two lengths, a sequence in the last dimension, and an array without one."""
        arrays = {
            "image": torch.arange(6).view(2, 3),
            "frames": torch.arange(16).view(2, 8),
            "bias": torch.arange(32).view(1, 2, 16),
        }
        dims = {"image": None, "bias": -1}
        part = split_batch(Batch(arrays=arrays, sequence_dims=dims), axis(2, 1))
        assert part["image"] is arrays["image"]
        assert part["frames"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
        assert part["bias"][0].tolist() == [list(range(4, 12)), list(range(20, 28))]
        assert part.positions is not None and part.positions.tolist() == [2, 3, 4, 5], "those of the first array"
        assert part.sequence_dim("bias") == -1

    def test_a_length_that_cannot_be_cut_into_parts(self):
        with pytest.raises(AssertionError, match="6 tokens cannot be cut into 4 parts"):
            contiguous_positions(0, 4, 6)

    def test_one_rank_keeps_the_batch(self):
        batch = self.batch()
        assert split_batch(batch, axis(1, 0)) is batch


def attend(comm_type: str, sizes: tuple[int, ...], case: tuple) -> dict[str, object]:
    """On one rank: this rank's part of the output and of the three gradients, where they lie, and what traveled."""
    heads, groups, window, starts = case
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ParallelMesh(Layout(cp=size), rank)
    model = Holder()
    apply_context_parallel(model, mesh, comm_type=comm_type, hierarchical_sizes=sizes)
    positions = held(size, rank, S)
    q, k, v, grad = (x[positions] for x in inputs(heads, groups))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = mesh.record.count
    documents = None if starts is None else Documents.of(starts)
    out = model.core(*leaves, Visibility(window=window, documents=documents))
    half = mesh.record.count
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    events = mesh.record.events(since=before)
    return {
        "positions": positions,
        "found": found,
        "forward": Counter((e.axis, e.op, e.elements, e.bytes) for e in events if e.sequence_number <= half),
        "backward": Counter((e.axis, e.op, e.elements, e.bytes) for e in events if e.sequence_number > half),
    }


@diagonal(3)
@pytest.mark.parametrize("case", every_second(CASES))
@pytest.mark.parametrize(("comm_type", "size"), SCHEMES)
def test_equals_attention_over_the_whole_sequence(ranks: RankPool, comm_type: str, size: int, case: str):
    heads, groups, window, starts = CASES[case]
    q, k, v, grad = inputs(heads, groups)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = reference.attention(*leaves, window=window, document_starts_BS=starts)
    wanted = [out, *torch.autograd.grad(out, leaves, grad)]
    for answer in ranks.run(attend, size, comm_type, SCHEMES[comm_type, size], CASES[case]):
        for mine, true in zip(answer["found"], wanted, strict=True):
            torch.testing.assert_close(mine, true[answer["positions"]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_few_key_value_heads(ranks: RankPool, comm_type: str):
    """Where heads are not exchanged, a single key/value head is enough."""
    q, k, v, grad = inputs(3, 1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = reference.attention(*leaves, document_starts_BS=DOCUMENTS)
    wanted = [out, *torch.autograd.grad(out, leaves, grad)]
    for answer in ranks.run(attend, 4, comm_type, (), (3, 1, None, DOCUMENTS)):
        for mine, true in zip(answer["found"], wanted, strict=True):
            torch.testing.assert_close(mine, true[answer["positions"]], rtol=0, atol=1e-12)


KEYS = 24
"""Of the sequence that cross attention sees."""
PADDING = torch.arange(S) >= torch.tensor([[39], [48]])
PADDED = (DOCUMENTS.masked_fill(PADDING, 0), PADDING.numpy())
IN_PREFIX = torch.arange(S) < DOCUMENTS + torch.tensor([[9], [5]])
SEEN: dict[str, Visibility] = {
    "full": Visibility.full(),
    "full, window": Visibility.full(window=7),
    "full, documents and padding": Visibility.full(),
    "prefix": Visibility.prefix(),
    "prefix, window and first tokens": Visibility("prefix", window=6, first_k=2),
    "causal, first tokens": Visibility(window=5, first_k=3),
    "causal, chunks": Visibility(chunk=10),
    "full, biased": Visibility("full", bias="relative"),
    "cross": Visibility.cross(),
    "cross, padded keys": Visibility.cross(),
}


def of_batch(name: str) -> Visibility:
    if name == "cross, padded keys":
        return SEEN[name].of_batch(None, KeySpans.of_lengths(torch.tensor([17, KEYS]), S))
    if name in ("full, documents and padding", "causal, chunks"):
        return SEEN[name].of_batch(Documents.build(PADDED[0].numpy(), is_padding_BS=PADDED[1]))
    if name.startswith("prefix"):
        return SEEN[name].of_batch(Documents.build(DOCUMENTS.numpy(), in_prefix_BS=IN_PREFIX.numpy()))
    return SEEN[name]


def seen_inputs(name: str) -> list[Tensor]:
    """q, k, v, the gradient of the output, and a table of biases; cross attention has other keys."""
    generator, keys = torch.Generator().manual_seed(5), KEYS if name.startswith("cross") else S
    shapes = [(S, B, 8, E), (keys, B, 4, E), (keys, B, 4, E), (S, B, 8, E), (8, 31)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def attend_to_all_kinds(comm_type: str, sizes: tuple[int, ...]) -> dict[str, list[Tensor]]:
    """On one rank: the output and the gradients of q, k, v and biases for every visibility."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = Holder()
    apply_context_parallel(model, ParallelMesh(Layout(cp=size), rank), comm_type=comm_type, hierarchical_sizes=sizes)
    results = {}
    for name in SEEN:
        q, k, v, grad, bias = seen_inputs(name)
        queries, keys = held(size, rank, S), held(size, rank, k.shape[0])
        leaves = [x.requires_grad_() for x in (q[queries], k[keys], v[keys], bias)]
        table = leaves[3] if name.endswith("biased") else None
        out = model.core(*leaves[:3], of_batch(name), None, table)
        grads = torch.autograd.grad(out, leaves[: 3 if table is None else 4], grad[queries])
        results[name] = [out.detach(), *grads]
    return results


@cache
def seen_alone(name: str) -> list[Tensor]:
    """The same of the whole sequence, with a dense mask."""
    q, k, v, grad, bias = seen_inputs(name)
    leaves = [x.requires_grad_() for x in (q, k, v, *([bias] if name.endswith("biased") else []))]
    if name.startswith("cross"):
        lengths = torch.tensor([17, KEYS] if name.endswith("keys") else [KEYS, KEYS])
        dense = torch.arange(KEYS) < lengths[:, None, None].expand(B, S, 1)
    else:
        documents, visibility = of_batch(name).documents, SEEN[name]
        segments = torch.zeros(B, S, dtype=torch.int64) if documents is None else documents.starts_BS
        narrowed = {"window": visibility.window, "chunk": visibility.chunk, "first_k": visibility.first_k}
        dense = reference.visible(visibility.kind, segments, **narrowed, in_prefix_BS=IN_PREFIX)
    out = reference.masked_attention(*leaves[:3], dense, bias_HD=leaves[3] if len(leaves) == 4 else None)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@diagonal(2)
@pytest.mark.parametrize(("comm_type", "size"), one_in(3, SCHEMES))
def test_every_visibility_is_that_of_the_whole_sequence(ranks: RankPool, comm_type: str, size: int):
    answers = ranks.run(attend_to_all_kinds, size, comm_type, SCHEMES[comm_type, size])
    for name in SEEN:
        out, q, k, v, *bias = seen_alone(name)
        for rank, answer in enumerate(answers):
            queries, keys = held(size, rank, S), held(size, rank, k.shape[0])
            wanted = (out[queries], q[queries], k[keys], v[keys])
            for mine, true in zip(answer[name][:4], wanted, strict=True):
                torch.testing.assert_close(
                    mine, true, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
                )
        for table in bias:
            torch.testing.assert_close(sum(answer[name][4] for answer in answers), table, rtol=0, atol=1e-11)


def test_heads_that_cannot_be_exchanged(ranks: RankPool):
    with pytest.raises(RankFailure, match="2 ranks do not divide the heads they exchange"):
        ranks.run(attend, 2, "a2a", (), (3, 1, None, None))


@diagonal(2)
@pytest.mark.parametrize("case", [later("grouped"), "documents and window"])
@pytest.mark.parametrize(("comm_type", "size"), SCHEMES)
def test_what_travels_is_what_theory_says(ranks: RankPool, comm_type: str, size: int, case: str):
    """The table in the module's docstring, event by event, in both directions, whatever is masked."""
    heads, groups, *_ = CASES[case]
    token = B * E
    local = S // size
    key, q = local * groups * token, local * heads * token

    def events(axis_name: str, op: str, times: int, elements: int) -> Counter:
        return Counter({(axis_name, op, elements, 8 * elements): times})

    def shifts(axis: str, count: int, elements: int) -> Counter:
        """What a rank passes on around the ring, and as much that it takes."""
        return events(axis, "send", count, elements) + events(axis, "receive", count, elements)

    if comm_type == "p2p":
        forward = shifts("cp", 2 * (size - 1), key)
        backward = shifts("cp", 4 * (size - 1), key)
    elif comm_type == "all_gather":
        forward = events("cp", "all_gather", 1, size * 2 * key)
        backward = forward + events("cp", "reduce_scatter", 1, size * 2 * key)
    else:
        exchange = "cp" if comm_type == "a2a" else "cp/2"
        swaps = events(exchange, "all_to_all", 1, q + 2 * key) + events(exchange, "all_to_all", 1, q)
        ring_attention = size // 2 if comm_type == "a2a+p2p" else 1
        # Two ranks have pooled their tokens and halved their heads: a step of the ring is as large as without.
        forward = swaps + shifts("cp%2", 2 * (ring_attention - 1), key)
        backward = swaps + shifts("cp%2", 4 * (ring_attention - 1), key)
    for answer in ranks.run(attend, size, comm_type, SCHEMES[comm_type, size], CASES[case]):
        assert answer["forward"] == +forward
        assert answer["backward"] == +backward


def drop(comm_type: str, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Outputs with every weight equal and every value one: 1 on average, and the gradient of the values' sum."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ParallelMesh(Layout(cp=size), rank)
    model = Holder(dropout=0.25).train()
    apply_context_parallel(model, mesh, comm_type=comm_type, hierarchical_sizes=sizes)
    torch.manual_seed(rank)
    batch = 300
    q, k = (torch.zeros(S // size, batch, 4, E, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.ones(S // size, batch, 4, E, dtype=torch.float64, requires_grad=True)
    out = model.core(q, k, v, CAUSAL)
    out.sum().backward()
    model.eval()
    torch.testing.assert_close(model.core(q, k, v, CAUSAL), torch.ones_like(v), msg="no dropout outside training")
    assert v.grad is not None
    return out.detach(), v.grad


@diagonal(2)
@pytest.mark.parametrize(("comm_type", "size"), [("p2p", 4), ("all_gather", 2), ("a2a", 2), ("a2a+p2p", 4)])
def test_dropout(ranks: RankPool, comm_type: str, size: int):
    """The mean stays, and the backward pass drops what the forward pass dropped: the sums over both sides agree."""
    answers = ranks.run(drop, size, comm_type, SCHEMES[comm_type, size])
    total, back = sum(out.sum() for out, _ in answers), sum(grad.sum() for _, grad in answers)
    torch.testing.assert_close(total, back)
    for out, _ in answers:
        assert not torch.allclose(out, torch.ones_like(out))
        assert abs(out.mean().item() - 1.0) < 0.01


def test_one_rank_keeps_its_core():
    model = Holder()
    attend = model.core.attend
    apply_context_parallel(model, ParallelMesh.single(), comm_type="p2p")
    assert model.core.attend is attend


def events_before_each_computation() -> tuple[list[int], list[int]]:
    """How many events have been recorded when each block of keys is computed with, forward and backward."""
    mesh = ParallelMesh(Layout(cp=dist.get_world_size()), dist.get_rank())
    model = Holder()
    apply_context_parallel(model, mesh, comm_type="p2p")
    q, k, v, _ = (x[held(mesh.cp.size, mesh.rank, S)].requires_grad_() for x in inputs(4, 4))
    forward, backward = [], []
    attend, back = PartialAttention.attend_block, ring_attention.block_backward

    def watched_attend(*args: Any, **kwargs: Any) -> None:
        forward.append(mesh.record.count)
        attend(*args, **kwargs)

    def watched_back(*args: Any, **kwargs: Any) -> None:
        backward.append(mesh.record.count - forward[-1])
        back(*args, **kwargs)

    with mock.patch.object(PartialAttention, "attend_block", watched_attend):
        out = model.core(q, k, v, CAUSAL)
    with mock.patch.object(ring_attention, "block_backward", watched_back):
        out.sum().backward()
    return forward, backward


def test_the_next_keys_travel_while_one_computes(ranks: RankPool):
    """Each step has begun to pass on two tensors and to take two when it computes; gradients follow one step behind."""
    for forward, backward in ranks.run(events_before_each_computation, 4):
        assert forward == [4, 8, 12, 12]
        assert backward == [4, 8, 16, 20]
