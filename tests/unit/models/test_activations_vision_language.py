"""The bytes that a model of images keeps for the backward pass: formula against what really stays in memory; and its model FLOPs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from petatron.config import RunConfig
from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.estimate.flops import flops_formula, model_flops_per_token
from petatron.estimate.memory.forecast import recompute_plans
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.image_text_batch import make_image_text_batch
from petatron.models.registry import model_spec
from petatron.plan.model_parts import model_parts
from petatron.train.build_run import build_model
from tests.unit.models.kept import kept_bytes
from tests.unit.models.test_activations import LLAMA, build, measured, recompute, run_of

_IMAGES = (
    f"{LLAMA} --model-type vlm --num-layers 2 --vision-num-layers 2 --vision-hidden-size 24 --vision-num-attention-heads 2 "
    "--vision-ffn-hidden-size 40 --vision-patch-size 2 --image-token-id 7 --max-patches 64 --seq-length 80"
)
MODELS = {
    "siglip": f"{_IMAGES} --vision-image-size 16 --position-embedding-type rope",
    "clip": f"{_IMAGES} --vision-image-size 16 --vision-input-norm --no-vision-patch-bias --no-vision-final-norm "
    "--vision-activation quick_gelu --position-embedding-type rope",
    "qwen": f"{_IMAGES} --vision-position-embedding-type rope --vision-merge-size 2 --vision-window-size 8 "
    "--vision-full-attention-layers 1 --vision-activation swiglu --vision-normalization RMSNorm --no-vision-final-norm --projector-norm",
    "shuffled": f"{_IMAGES} --vision-image-size 16 --vision-merge-size 2 --projector-num-layers 1",
}
RECOMPUTE = {
    "nothing": MemoryConfig(),
    "attention": MemoryConfig(recompute_granularity="selective", recompute_modules=("attention", "mlp")),
    "uniform": MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}

BYTES_OF_KEYS = 16
"""What the reference of attention keeps of each patch to know which keys it sees; no kernel on a GPU does."""


def batch_of(run: RunConfig) -> Batch:
    model, random = run.model, np.random.default_rng(5)
    merge, samples = model.vision_merge_size, []
    for _ in range(run.train.micro_batch_size):
        text = random.integers(8, 100, model.seq_length + 1)
        text[1 : 1 + 64 // merge**2] = 7
        pixels = random.integers(0, 256, (64, 12), dtype=np.uint8)
        mask = np.ones(model.seq_length + 1)
        samples.append({"tokens": text, "loss_mask": mask, "patches": pixels, "grids": np.array([[1, 8, 8]])})
    return make_image_text_batch(samples, model)


def of_masks(batch: Batch) -> int:
    kinds = 1 + (batch.window_documents is not None)
    return kinds * BYTES_OF_KEYS * batch["patches"].shape[1]


@pytest.mark.parametrize("kind", MODELS)
def test_kept_bytes_are_those_of_the_formula(kind: str):
    run, found = run_of(MODELS[kind]), dict[str, tuple[int, int]]()
    for name in RECOMPUTE:
        model, streams = build(run)
        plan = recompute(run, model, RECOMPUTE[name], streams)
        batch = batch_of(run)
        measured(model, batch)  # what attention makes of documents, once for all layers
        known = list(batch.arrays.values())
        found[name] = measured(model, batch, known=known) - of_masks(batch), plan.saved_bytes
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


def test_flops_are_those_of_patches_vectors_and_text():
    """Of 64 patches, 16 vectors of them and 80 tokens: layer 0 sees windows of 16 patches, layer 1 all."""
    run = run_of(MODELS["qwen"])
    patches, width, inner, length, hidden, ffn, vocab = 64, 24, 40, 80, 32, 48, 136
    between = run.model.projector_hidden_size
    assert between is not None
    encoder = patches * (6 * 2 * (4 * width**2 + 3 * width * inner) + 12 * width * (16 + patches))
    outside = patches * 4 * (3 * 2 * 2 * run.model.vision_temporal_patch_size) * width
    outside += patches // 4 * 6 * (4 * width * between + between * hidden)
    attention = 2 * hidden * hidden + 2 * hidden * (run.model.num_query_groups or 0) * (run.model.kv_channels or 0)
    decoder = length * 6 * (2 * (attention + 3 * hidden * ffn) + hidden * vocab) + 2 * 6 * hidden * length**2
    spec = model_spec(run)
    assert model_flops_per_token(spec) * length == pytest.approx(encoder + outside + decoder)
    parts = model_parts(spec)
    drawn = [part.flops for part in (*parts.before, *(part for _, part in parts.between), *parts.after)]
    drawn += [part.flops * group.repeats for group in parts.groups for layer in group.layers for part in layer]
    padding = vocab - (run.model.vocab_size or 0)
    assert sum(drawn) == pytest.approx(parts.flops - 6 * hidden * padding)
    assert "12 d P (A P + W w)" in flops_formula(images=True) and "P" not in flops_formula()


@pytest.mark.parametrize("kind", MODELS)
def test_a_projector_that_is_trained_alone_keeps_what_the_formula_says(kind: str):
    """Nothing of the encoder, and of the decoder what the gradients of its inputs need."""
    run = run_of(f"{MODELS[kind]} --freeze-LM --freeze-ViT")
    model = build_model(run, ParallelMesh.single())
    batch, module = batch_of(run), model.module.train()
    model.gradient_reducer.start_step(1)
    weights = {LM_LOSS: torch.rand(batch.labels.t().shape, dtype=torch.float64)}
    parts = [*batch.arrays.values(), *weights.values(), *module.parameters()]
    parts += [grads.flat for group in model.param_groups for grads in group.bucket_grads]  # pyright: ignore[reportAttributeAccessIssue]

    def kept() -> int:
        return kept_bytes(lambda: module(batch, {}, loss_weights=weights).losses[LM_LOSS], without=parts)[0]

    kept()  # what attention makes of documents, once for all layers
    [plan], [free] = recompute_plans(run, device="cpu"), recompute_plans(run_of(MODELS[kind]), device="cpu")
    assert plan.num_without_backward == 2
    assert kept() - of_masks(batch) == plan.saved_bytes < free.saved_bytes
