"""Flat buffers: parameters become views, decayed and undecayed apart, last layer first."""

import torch
from torch import nn

from petatron.mesh.flat import flatten_parameters
from petatron.mesh.spec import Section, Shard, TensorSplit, place
from petatron.models.decoder import takes_weight_decay


def test_parameters_are_views_that_keep_their_values():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    x = torch.randn(5, 3)
    out = model(x)
    placements = {n: place(n, tuple(p.shape), Shard(), TensorSplit()) for n, p in model.named_parameters()}
    groups = flatten_parameters(model, placements, takes_weight_decay)
    assert torch.equal(model(x), out)
    plain, decayed = groups
    assert [slot.name for slot in decayed.slots] == ["2.weight", "0.weight"] and decayed.decay
    assert [slot.name for slot in plain.slots] == ["2.bias", "1.bias", "1.weight", "0.bias"] and not plain.decay
    for group in groups:
        group.weights.mul_(2.0)
        assert group.weights.numel() == sum(slot.parameter.numel() for slot in group.slots)
        for slot in group.slots:
            assert torch.equal(slot.parameter.detach(), 2.0 * before[slot.name])
            assert slot.parameter.data_ptr() == group.view(group.weights, slot).data_ptr()


def test_pieces_are_views_of_the_logical_sections():
    model = nn.Module()
    model.qkv = nn.Linear(2, 8, bias=False)
    shard = Shard(tp=0, sections=(Section("q", 4, 2), Section("k", 2, 1), Section("v", 2, 1)))
    placements = {"qkv.weight": place("a.qkv.weight", (8, 2), shard, TensorSplit())}
    [group] = flatten_parameters(model, placements, takes_weight_decay)
    found = {piece.name: view for piece, view in group.pieces(group.weights)}
    assert list(found) == ["a.q.weight", "a.k.weight", "a.v.weight"]
    found["a.k.weight"].fill_(7.0)
    assert model.qkv.weight.detach()[4:6].eq(7.0).all() and not model.qkv.weight.detach()[6:].eq(7.0).any()


def test_dtypes_do_not_mix():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False, dtype=torch.bfloat16))
    placements = {n: place(n, (2, 2), Shard(), TensorSplit()) for n, _ in model.named_parameters()}
    groups = flatten_parameters(model, placements, takes_weight_decay)
    assert sorted((group.slots[0].name, group.weights.dtype, group.grads.dtype) for group in groups) == [
        ("0.weight", torch.float32, torch.float32),
        ("1.weight", torch.bfloat16, torch.float32),
    ]
