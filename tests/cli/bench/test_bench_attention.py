"""The measurement of attention runs, and says what it counts."""

from __future__ import annotations

import torch

from petatron.bench.ops import attention as bench_attention
from petatron.bench.ops.attention import SHAPES, AttentionShape


def test_a_small_table():
    found = dict(bench_attention.measure(torch.device("cpu"), repeat=1, warmup_s=0.0))
    assert found["attention"] == (
        "PyTorch's choice, tiles for documents and windows; not cuDNN: the device is no NVIDIA GPU"
    )
    assert "FLOP/s; scaled_dot_product_attention" in found["attention plain"]
    assert found["attention packed"].endswith("FLOP/s")


def test_flops_are_those_of_what_is_visible():
    whole, halves = AttentionShape("", ((8,),), 2, 1, 4), AttentionShape("", ((4, 4),), 2, 1, 4)
    assert whole.flops == 3.5 * 2 * 64 * 2 * 4 == 2 * halves.flops


def test_rows_of_a_shape_are_equally_long():
    for shape in SHAPES:
        assert (
            len({sum(row) for row in shape.document_lengths}) == 1
            and min(min(row) for row in shape.document_lengths) >= 1
        )
