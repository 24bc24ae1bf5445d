"""Calls of Python functions per layer on a GPU, where kernels are launched by hand."""

from __future__ import annotations

import pytest
import torch

from petatron.bench.measure.host_time import host_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLAGS = "--preset tiny-llama --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --bf16"


def test_calls_per_layer_are_bounded():
    """1,056 before any were saved."""
    calls = host_calls(FLAGS.split())
    assert 0 < calls.forward + calls.backward <= 400, calls
