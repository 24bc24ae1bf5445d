"""A micro-batch without sequences, or of sequences without tokens, changes nothing of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.train.build_run import build_model
from tests.longform import diagonal
from tests.parity.harness import tiny_run

MODELS = {
    "llama": "",
    "gpt": "--normalization LayerNorm --activation gelu --add-bias-linear --position-embedding-type learned_absolute",
    "qk-norm": "--qk-layernorm",
    "gate": "--attention-output-gate",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 16",
    "fp8": "--hidden-size 64 --ffn-hidden-size 96 --fp8-format hybrid --fp8-recipe tensorwise",
    "fp8 output grad": "--hidden-size 64 --fp8-format hybrid --fp8-output-head-backward --vocab-size 128",
    "latent": "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8",
    "recurrent": "--hybrid-layer-pattern M-*G --num-layers 4 --mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 "
    "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4",
    "mtp": "--mtp-num-layers 1",
    "alibi": "--position-embedding-type alibi",
    "window": "--window-size 4 --softmax-type learnable",
    "delayed fp8": "--hidden-size 64 --ffn-hidden-size 96 --fp8-format hybrid --fp8-recipe delayed",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
}


def batch_of(*shape: int) -> Batch:
    tokens = torch.arange(torch.Size(shape).numel()).view(shape) % 64
    return Batch(tokens, tokens.flip(-1), torch.ones(shape))


def step_of(flags: str, batches: list[Batch]) -> list[Tensor]:
    """The losses of a step and of an evaluation, and all gradients."""
    model = build_model(tiny_run(flags), ParallelMesh.single())
    losses = [model.train_step(batches), *model.evaluate(batches)]
    return [*losses, *(grad.clone() for group in model.param_groups for grad in group.grads())]


SHAPES = [(0, 16), (2, 0), (0, 0)]
# Recurrences need a token.
CASES = [(model, shape) for model in MODELS for shape in SHAPES if model != "recurrent" or shape[1] > 0]


@diagonal(4)
@pytest.mark.parametrize(("model", "shape"), CASES)
def test_an_empty_micro_batch_changes_nothing(model: str, shape: tuple[int, int]):
    whole = batch_of(2, 16)
    for found, wanted in zip(
        step_of(MODELS[model], [whole, batch_of(*shape)]), step_of(MODELS[model], [whole]), strict=True
    ):
        assert found.isfinite().all() and torch.equal(found, wanted)
