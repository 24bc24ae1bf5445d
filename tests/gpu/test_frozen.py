"""Frozen parameters on a GPU: the predicted peak is the measured one, overlap and captured steps leave frozen weights as they are."""

from __future__ import annotations

import pytest
import torch

from petatron.base.device import detect_device
from petatron.bench.memory import CASES, measure_on_gpu
from petatron.bench.peers.bench_workload import bench_spec
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import build_loader, build_model, build_optimizer
from petatron.validate import load_config
from tests.gpu.test_step import MODEL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BELOW = "--freeze embedding.* layers.0.*"


@pytest.mark.parametrize("name", ["1b-last-two-layers", "1b-frozen-below", "llava-projector"])
def test_llama_1b_trains_in_the_predicted_memory(name: str):
    info = detect_device("cuda")
    spec = bench_spec(f"--preset {CASES[name].flags} --device cuda".split())
    found = measure_on_gpu(spec, info)
    if found.measured is None:
        pytest.skip(found.reason)
    assert found.ratio == pytest.approx(1.0, abs=0.03), found.describe()


@pytest.mark.parametrize(
    "flags",
    [
        f"{BELOW} --overlap-grad-reduce",
        f"{BELOW} --cuda-graphs on",
        "--train-only *norm* --cuda-graphs on",
        "--freeze layers.* --cuda-graphs on",
        f"{BELOW} --fp8-format hybrid --fp8-recipe tensorwise",
        f"{BELOW} --optimizer muon",
        f"{BELOW} --optimizer soap",
        f"{BELOW} --optimizer adafactor",
    ],
)
def test_frozen_weights_stay_to_the_bit(flags: str):
    run = load_config(f"{MODEL} --device cuda --train-iters 20 {flags}".split()).config
    model = build_model(run, ParallelMesh.single(torch.device("cuda", torch.cuda.current_device())))
    optimizer = build_optimizer(run, model)
    frozen = [group for group in model.param_groups if not group.spec.trainable]
    before = [weight.clone() for group in frozen for weight in group.weights()]
    losses = []
    for batches in build_loader(run, model.mesh):
        losses.append(model.train_step(batches))
        optimizer.step()
    assert before and all(map(torch.equal, before, (weight for group in frozen for weight in group.weights())))
    assert losses[-1] < losses[0]
