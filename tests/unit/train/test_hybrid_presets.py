"""The presets of hybrids, at a toy size: they learn, and go on with text afterwards."""

from __future__ import annotations

import pytest

from petatron.infer.engine import Engine
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import build_model
from petatron.validate import load_config
from tests.longform import later
from tests.parity.harness import train

SMALL = (
    "--hidden-size 32 --seq-length 24 --vocab-size 67 --mock-data --num-workers 0 --eval-iters 0 --global-batch-size 8 "
    "--micro-batch-size 8 --train-iters 12 --lr 2e-2 --init-method-std 0.1 --mamba-head-dim 8 --mamba-state-dim 8"
)
ATTENTION = "--ffn-hidden-size 48 --num-attention-heads 4 --num-query-groups 2 --kv-channels 8 --mamba-num-heads 8"
PRESETS = {
    "mamba2-130m": "--num-layers 2",
    "nemotron-h-8b": f"--hybrid-layer-pattern M-M*- --num-layers 5 {ATTENTION}",
    "falcon-h1-0.5b": f"--hybrid-layer-pattern P-P- --num-layers 4 --logits-scaling 1 {ATTENTION}",
    "bamba-9b": f"--hybrid-layer-pattern M-*-M- --num-layers 6 {ATTENTION}",
}


@pytest.mark.parametrize("preset", [later("mamba2-130m"), "nemotron-h-8b", later("bamba-9b"), "falcon-h1-0.5b"])
def test_a_small_one_learns_and_generates(preset: str):
    run = load_config(f"{SMALL} {PRESETS[preset]}".split(), preset=preset).config
    losses = [step.loss for step in train(run)]
    assert losses[-1] < losses[0] - 0.3, losses
    [[answer]] = Engine(build_model(run, ParallelMesh.single())).complete([[1, 2]], SamplingParams(max_new_tokens=4))
    assert len(answer.ids) == 4
