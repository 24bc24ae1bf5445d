"""`petatron bench train` on a GPU: memory, events and the profiler give sensible numbers, beside a peer and alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from petatron.cli.bench import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FLAGS = (
    "--preset llama-1b --device cuda --num-layers 2 --hidden-size 512 --num-attention-heads 8 --num-query-groups 2 "
    "--ffn-hidden-size 1024 --seq-length 1024 --vocab-size 4096 --micro-batch-size 2 --warmup-seconds 0.1 --steps 6 --block 3"
)


def test_speed_memory_and_breakdown(tmp_path: Path):
    path = tmp_path / "found.json"
    assert main(["train", *FLAGS.split(), "--against", "hf", "--breakdown", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    ours, theirs = found["contenders"]["petatron"], found["contenders"]["hf"]
    weights = found["model"]["parameters"]
    for values in (ours, theirs):
        # bf16 and four fp32 copies, or four fp32 copies, and some activations
        assert 16 * weights < values["peak_bytes"] < 16 * weights + 4e9
        assert 0 < values["held_bytes"] < values["peak_bytes"]
        assert values["loss"]["falls"]
    assert found["ratio"]["hf"]["largest_loss_difference"] < 1e-2
    shares = ours["breakdown"]["ms"]
    assert shares["GEMM"] > 0 and shares["attention"] > 0 and shares["elementwise"] > 0 and shares["optimizer"] > 0
    busy = sum(ms for name, ms in shares.items() if name != "idle")
    assert ours["breakdown"]["step_ms"] == pytest.approx(busy + shares["idle"], rel=0.05)
    assert shares["other"] < 0.1 * busy, ours["breakdown"]["top"]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="FP8 needs capability 9.0"
)
def test_fp8_beside_our_own_bf16(tmp_path: Path):
    """Both of them in one process, with memory of their own."""
    path = tmp_path / "found.json"
    assert main(["train", *FLAGS.split(), "--fp8-recipe", "tensorwise", "--against", "bf16", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    eight, wide = found["contenders"]["petatron"], found["contenders"]["bf16"]
    assert not found["apart"] and not found["in_pairs"] and len(found["ratio"]["bf16"]["pairs"]) == 2
    assert eight["losses"] != wide["losses"] and found["ratio"]["bf16"]["largest_loss_difference"] < 1e-2
    for values in (eight, wide):
        assert 16 * found["model"]["parameters"] < values["held_bytes"] < values["peak_bytes"]
        assert values["loss"]["falls"]
