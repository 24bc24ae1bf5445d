"""Scales of FP8 blocks: every element gets the one of its block, whatever part of the matrix is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.manifest import BlockScale
from petatron.checkpoint.load.dequantize import apply_scale, read_scale, scale_shape
from petatron.sharding.boxes import Box


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_part_of_a_matrix_gets_its_own_scales(data: st.DataObject):
    shape, block = (data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12))) for _ in range(2))
    begin = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(data.draw(st.integers(1, whole - at)) for whole, at in zip(shape, begin))
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=draw, dtype=torch.float64)
    scale = torch.rand(scale_shape(shape, block), generator=draw)
    whole = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    box = Box(begin, size)
    part = values[box.slices()].clone()
    apply_scale(part, box, scale, block)
    torch.testing.assert_close(part, (values * whole)[box.slices()], rtol=0, atol=0)


def test_scales_are_float32_matrices(tmp_path: Path):
    save_file({"half": torch.ones(2, 2).half(), "row": torch.ones(2), "good": torch.eye(2)}, tmp_path / "a.safetensors")
    assert torch.equal(read_scale(tmp_path, BlockScale("a.safetensors", "good", (8, 8))), torch.eye(2))
    for name in ("half", "row", "none"):
        with pytest.raises(CheckpointError, match=f"lacks {name} as a matrix of float32"):
            read_scale(tmp_path, BlockScale("a.safetensors", name, (8, 8)))
