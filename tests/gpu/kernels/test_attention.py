"""Attention on a CUDA device against the reference: kernels with log-sum-exp, tiles, windows, documents, blocks of keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import AttentionCall, attention, block_attention, chosen_kernel, flash
from petatron.kernels.attention.blockwise_attention import (
    AttentionBackwardInputs,
    PartialAttention,
    block_backward,
    zero_qkv_grads,
)
from petatron.kernels.attention.document_layout import Documents, KeySpans
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.attention.visible_key_intervals import BlockMask, VisibleKeys
from tests import reference_attention as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH = 1500
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
HEADS = [(4, 4), (8, 2), (4, 1)]


def starts_on_device() -> Tensor:
    rows = [[700, 3, 797], [1499, 1]]
    return torch.tensor([[sum(r[:i]) for i, n in enumerate(r) for _ in range(n)] for r in rows], device="cuda")


def inputs(heads: int, groups: int, dtype: torch.dtype, width: int = 64) -> tuple[list[Tensor], list[Tensor]]:
    """In the precision asked for, and the same numbers in float64; q, k and v are slices of one tensor, as in a layer."""
    torch.manual_seed(heads + groups)
    whole = torch.randn(LENGTH, 2, heads + 2 * groups, width, device="cuda").to(dtype)
    parts = whole.split((heads, groups, groups), dim=2)
    return [x.detach().requires_grad_() for x in parts], [x.detach().double().requires_grad_() for x in parts]


def with_gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad(out, tensors, weights.to(out.dtype))]


def assert_close(ours: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    """Relative to the largest of all: a token that sees only itself has queries and keys without any gradient."""
    scale = max(float(true.abs().max()) for true in wanted)
    for mine, true in zip(ours, wanted, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - true).abs().max()) <= BOUNDS[dtype] * scale


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize(("window", "documents"), [(None, False), (300, False), (None, True), (300, True), (1, False)])
def test_causal_attention(dtype: torch.dtype, heads: int, groups: int, window: int | None, documents: bool):
    rounded, exact = inputs(heads, groups, dtype)
    starts = starts_on_device() if documents else None
    packed = None if starts is None else Documents.of(starts)
    ours = with_gradients(attention(*rounded, Visibility(window=window, documents=packed)), rounded)
    wanted = with_gradients(reference.attention(*exact, window=window, document_starts_BS=starts), exact)
    assert_close(ours, wanted, dtype)


SEEN = {
    "full": (Visibility.full(), "dense"),
    "full, window": (Visibility.full(window=300), "FlashAttention of unequal lengths"),
    "full, documents": (Visibility.full(), "FlashAttention of unequal lengths"),
    "full, documents and window": (Visibility.full(window=300), "FlashAttention of unequal lengths"),
    "full, padding": (Visibility.full(), "FlashAttention of unequal lengths"),
    "prefix, documents": (Visibility.prefix(), "blocks and tiles"),
    "causal, window and first tokens": (Visibility(window=300, first_k=5), "blocks and tiles"),
}
"""What a token sees, and the kernel of half precision."""


def documents_of(name: str) -> Documents | None:
    starts, device = starts_on_device().cpu().numpy(), torch.device("cuda")
    if "padding" in name:
        return Documents.of_lengths(np.array([900, LENGTH]), LENGTH).to(device)
    if "prefix" in name:
        return Documents.build(starts, in_prefix_BS=np.arange(LENGTH) < starts + 130).to(device)
    return Documents.build(starts).to(device) if "documents" in name else None


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", SEEN)
def test_what_a_token_sees(dtype: torch.dtype, name: str):
    rounded, exact = inputs(8, 2, dtype)
    documents, (visibility, kernel) = documents_of(name), SEEN[name]
    visibility = visibility.of_batch(documents)
    if dtype in (torch.bfloat16, torch.float16):
        assert chosen_kernel(AttentionCall(*rounded, visibility)).name == kernel
    segments = torch.zeros(2, LENGTH, dtype=torch.int64) if documents is None else documents.starts_BS.cpu()
    in_prefix = (torch.arange(LENGTH) < segments + 130) if "prefix" in name else None
    narrowed = {"window": visibility.window, "first_k": visibility.first_k, "in_prefix_BS": in_prefix}
    seen = reference.visible(visibility.kind, segments, **narrowed).cuda()
    ours = with_gradients(attention(*rounded, visibility), rounded)
    assert_close(ours, with_gradients(reference.masked_attention(*exact, seen), exact), dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_full_attention_in_documents_of_one_length(dtype: torch.dtype):
    rounded, exact = ([x.detach()[:1024].requires_grad_() for x in tensors] for tensors in inputs(8, 2, dtype))
    starts = (torch.arange(1024) // 512 * 512).expand(2, 1024)
    visibility = Visibility.full().of_batch(Documents.of(starts).to(torch.device("cuda")))
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() == (9, 0):
        assert chosen_kernel(AttentionCall(*rounded, visibility)).name == "dense, of equal documents"
    seen = reference.visible("full", starts).cuda()
    ours = with_gradients(attention(*rounded, visibility), rounded)
    assert_close(ours, with_gradients(reference.masked_attention(*exact, seen), exact), dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("lengths", [None, (700, 333)])
def test_cross_attention(dtype: torch.dtype, lengths: tuple[int, int] | None):
    """To 700 keys of another sequence, of which a row may have fewer."""
    rounded, exact = ([x[0], *(y.detach()[:700].requires_grad_() for y in x[1:])] for x in inputs(8, 2, dtype))
    spans = None if lengths is None else KeySpans.of_lengths(torch.tensor(lengths, device="cuda"), LENGTH)
    seen = torch.arange(700, device="cuda") < torch.tensor(lengths or (700, 700), device="cuda")[:, None, None]
    ours = with_gradients(attention(*rounded, Visibility.cross().of_batch(None, spans)), rounded)
    wanted = reference.masked_attention(*exact, seen.expand(2, LENGTH, 700))
    assert_close(ours, with_gradients(wanted, exact), dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("window", "documents"), [(None, False), (300, False), (None, True)])
def test_values_narrower_than_keys(dtype: torch.dtype, window: int | None, documents: bool):
    """The widths of DeepSeek's latent attention."""
    rounded, exact = inputs(4, 4, dtype, width=192)
    rounded[2], exact[2] = (x[2].detach()[..., :128].requires_grad_() for x in (rounded, exact))
    starts = starts_on_device() if documents else None
    packed = None if starts is None else Documents.of(starts)
    ours = with_gradients(attention(*rounded, Visibility(window=window, documents=packed)), rounded)
    wanted = with_gradients(reference.attention(*exact, window=window, document_starts_BS=starts), exact)
    assert_close(ours, wanted, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("window", "documents"), [(None, False), (300, True)])
def test_pieces(dtype: torch.dtype, window: int | None, documents: bool):
    """What context parallelism uses in every precision: kernels for whole pieces and tiles for the others."""
    rounded, exact = inputs(8, 2, dtype)
    starts = starts_on_device() if documents else None
    visibility = Visibility(window=window, documents=None if starts is None else Documents.of(starts))
    visible = VisibleKeys.of(visibility, LENGTH, torch.device("cuda"))
    whole = (range(LENGTH),)
    ours = with_gradients(block_attention(*rounded, BlockMask(whole, whole, visible)), rounded)
    wanted = with_gradients(reference.attention(*exact, window=window, document_starts_BS=starts), exact)
    assert_close(ours, wanted, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_blocks_of_keys_are_merged(dtype: torch.dtype, heads: int, groups: int):
    rounded, exact = inputs(heads, groups, dtype)
    q, k, v = (x.detach() for x in rounded)
    runs = [range(900, LENGTH), range(333), range(333, 900)]
    partial = PartialAttention(q, value_width=v.shape[-1])
    for run in runs:
        partial.attend_block(k[run.start : run.stop], v[run.start : run.stop], BlockMask((range(LENGTH),), (run,)))
    out = partial.out_SBHE.to(dtype)
    wanted = with_gradients(reference.attention(*exact), exact)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape).to(dtype)
    answered = AttentionBackwardInputs.of(q, out_SBHE=out, lse_BHS=partial.lse_BHS, grad_SBHE=grad)
    dq, dk, dv = zero_qkv_grads(q, k, v)
    for run in runs:
        rows = slice(run.start, run.stop)
        mask = BlockMask((range(LENGTH),), (run,))
        block_backward(answered, k[rows], v[rows], mask, grads=(dq, dk[rows], dv[rows]))
    assert_close([out, *(x.to(dtype) for x in (dq, dk, dv))], wanted, dtype)


def test_half_precision_has_kernels_and_others_have_tiles():
    def query(dtype: torch.dtype, width: int = 64) -> Tensor:
        return torch.empty(1, 1, 1, width, dtype=dtype, device="cuda")

    assert flash.supports(query(torch.bfloat16), query(torch.bfloat16))
    assert not flash.supports(query(torch.float32), query(torch.float32))
    assert not flash.supports(query(torch.bfloat16, 20), query(torch.bfloat16, 20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_keeps_the_mean(dtype: torch.dtype):
    q, k, v = (x.detach() for x in inputs(4, 4, dtype)[0])
    torch.manual_seed(0)
    sums = attention(q, k, torch.ones_like(v), Visibility(documents=Documents.of(starts_on_device())), dropout=0.3)
    assert not torch.allclose(sums, torch.ones_like(sums))
    assert abs(sums.double().mean().item() - 1.0) < 0.02
