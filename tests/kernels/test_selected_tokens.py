"""Tokens selected at positions equal indexing, in both memory orders, gradients included."""

from __future__ import annotations

import pytest
import torch

from petatron.layers.selected_tokens import place_tokens, select_tokens


@pytest.mark.parametrize("batch_first", [False, True])
def test_selected_tokens_and_their_gradients_are_those_of_indexing(batch_first: bool):
    torch.manual_seed(3)
    shape = (3, 7, 5) if batch_first else (7, 3, 5)
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    x_SBD = leaf.transpose(0, 1) if batch_first else leaf
    positions = torch.stack([torch.randperm(7)[:4] for _ in range(3)])
    selected = select_tokens(x_SBD, positions)
    wanted = torch.stack([x_SBD[positions[row], row] for row in range(3)], dim=1)
    assert torch.equal(selected, wanted)
    weights = torch.randn_like(wanted)
    [grad] = torch.autograd.grad((selected * weights).sum(), leaf)
    [wanted_grad] = torch.autograd.grad((wanted * weights).sum(), leaf)
    assert torch.equal(grad, wanted_grad)
    values = place_tokens(selected[..., 0], positions, 7)
    for row in range(3):
        assert torch.equal(values[positions[row], row], selected[:, row, 0])
    assert torch.count_nonzero(values) == 12
