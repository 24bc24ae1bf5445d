"""`petatron bench train --memory`: what holds the memory of a step, by layer and purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from petatron.bench.measure.allocated_blocks_at_peak import MemoryBlock, StackFrame, blocks_at_peak
from petatron.bench.measure.peak_memory_breakdown import (
    OUTSIDE_LAYERS,
    MemoryPart,
    MemorySnapshot,
    _block_parts,  # pyright: ignore[reportPrivateUsage]
    snapshot_step,
)
from petatron.bench.measure.saved_tensors import SavedTensor, SavedTensorLog
from petatron.bench.peers.bench_workload import bench_spec, make_batches
from petatron.bench.peers.petatron_step import PetatronContender
from petatron.cli.bench import main
from petatron.estimate.activation_bytes import layer_bytes
from petatron.estimate.state_bytes import state_bytes
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.registry import model_spec

SMALL = (
    "--preset tiny-llama --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 64 --seq-length 16 --vocab-size 128 --micro-batch-size 2"
).split()
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]


@pytest.mark.parametrize("flags", [[], FP8], ids=["bf16", "fp8"])
def test_parts_are_those_of_the_formulas(flags: list[str]):
    spec = bench_spec([*SMALL, *flags])
    found = snapshot_step(PetatronContender(spec), make_batches(spec)[0], spec.device).as_json()["bytes"]
    of_layer = {
        name: sizes["1"] for name, sizes in found.items() if "1" in sizes and name.startswith("saved by ")
    }  # the second layer: the first also saves what all of them share
    shape = ActivationShape.from_config(spec.run, device="cpu")
    assert sum(of_layer.values()) == layer_bytes(model_spec(spec.run).layers[1], shape)
    assert of_layer["saved by mlp.down (bfloat16)"] == 32 * 2 * 64 * 2
    assert of_layer.get("saved by mlp.down (FP8)", 0) == (32 * 64 if flags else 0)
    state = state_bytes(spec.run)
    for purpose, size in (("gradients", state.gradients), ("master weights", state.master_weights)):
        assert sum(found[purpose].values()) == size
    assert sum(found["moments (exp_avg)"].values()) == state.moments // 2
    assert set(found["weights"]) == {OUTSIDE_LAYERS, "0", "1"}


def test_the_table_names_purposes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "found.json"
    quick = "--warmup-seconds 0 --steps 1 --block 1 --memory".split()
    assert main(["train", *quick, *SMALL, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["contenders"]
    assert found["petatron"]["memory"]["total"] > 0
    shown = capsys.readouterr().out
    assert "memory at the peak" in shown and "saved by mlp.down (bfloat16)" in shown and ", 2 layers" in shown


def event(action: str, address: int, size: int, *functions: str) -> dict[str, Any]:
    frames = [{"filename": f"/x/petatron/{name.split()[0]}", "name": name.split()[1], "line": 1} for name in functions]
    return {"action": action, "addr": address, "size": size, "frames": frames}


def test_the_peak_is_where_most_bytes_are_alive():
    before = [MemoryBlock(1, 100)]
    events = [
        event("alloc", 2, 50, "a.py f"),
        event("free_requested", 2, 50),
        event("segment_alloc", 9, 10_000),  # not a tensor
        event("alloc", 2, 60, "b.py g"),
        event("alloc", 3, 5, "c.py h"),
        event("free_requested", 1, 100),
        event("free_completed", 1, 100),
        event("alloc", 4, 99, "d.py i"),
    ]
    assert blocks_at_peak(before, events) == [
        MemoryBlock(1, 100),
        MemoryBlock(2, 60, (StackFrame("/x/petatron/b.py", "g"),)),
        MemoryBlock(3, 5, (StackFrame("/x/petatron/c.py", "h"),)),
    ]
    assert blocks_at_peak(before, events[5:6]) == before


def parts_of(block: MemoryBlock) -> list[MemoryPart]:
    owners = {7: [MemoryPart("weights", 0, 90)]}
    saved = {8: SavedTensor(8, 60, torch.float8_e4m3fn, "layers.3.mlp.down")}
    return [*_block_parts(block, owners, saved)]


def stack(*functions: str) -> tuple[StackFrame, ...]:
    return tuple(StackFrame(f"/x/petatron/{name.split()[0]}", name.split()[1]) for name in functions)


def test_a_block_is_named_by_owner_then_saver_then_function():
    forward = "parallel/pipeline/executor.py run"
    assert parts_of(MemoryBlock(7, 96)) == [MemoryPart("weights", 0, 90), MemoryPart("padding of state", None, 6)]
    assert parts_of(MemoryBlock(8, 64, stack("kernels/a.py f", forward))) == [
        MemoryPart("saved by mlp.down (FP8)", 3, 64)
    ]
    # The address was used again in backward.
    assert parts_of(MemoryBlock(8, 64, stack("kernels/a.py f"))) == [
        MemoryPart("backward or update: kernels/a.py f", None, 64)
    ]
    # At an address of state: a gradient that was allocated in the step, and an activation that was there before it.
    gradient = stack("sharding/bucket.py allocate", "parallel/data/gradient_reduction.py write_grad")
    assert parts_of(MemoryBlock(7, 90, gradient)) == [MemoryPart("weights", 0, 90)]
    assert [part.purpose for part in parts_of(MemoryBlock(7, 90, stack("kernels/a.py f", forward)))] == [
        "forward: kernels/a.py f"
    ]
    cast = stack("kernels/fp8/cast_and_gemm.py cast_tensor", "layers/ops/fp8_weight.py get", forward)
    assert [part.purpose for part in parts_of(MemoryBlock(9, 4, cast))] == ["FP8 weights"]
    assert [part.purpose for part in parts_of(MemoryBlock(9, 4))] == ["held between steps, or not by Python"]
    elsewhere = (StackFrame("/torch/x.py", "f"), *stack("kernels/a.py g", forward))
    assert [part.purpose for part in parts_of(MemoryBlock(9, 4, elsewhere))] == ["forward: kernels/a.py g"]


def test_a_snapshot_sums_layers():
    snapshot = MemorySnapshot([MemoryPart("a", 0, 1), MemoryPart("a", 0, 2), MemoryPart("a", None, 4)])
    assert snapshot.as_json() == {"total": 7, "bytes": {"a": {"0": 3, OUTSIDE_LAYERS: 4}}}


def test_saved_tensors_are_those_alive_at_once():
    linear = nn.Linear(4, 4, bias=False)
    log = SavedTensorLog({linear: "linear"}, linear.parameters())
    x = torch.randn(8, 4)
    with log.recording():
        for _ in range(2):
            linear(x.clone()).relu().sum().backward()
    assert {saved.module for saved in log.at_peak} == {"linear", "outside modules"}
    assert sum(saved.size for saved in log.at_peak) == 2 * 8 * 4 * 4
    log.close()
