"""Which of a layer's autograd nodes are one: a norm, an activation, the merging of heads, each with the GEMM of its output."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from petatron.layers.moe.moe_layer import MoELayer, SharedExpertRun
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.tensor_parallel import set_weight_grad_target
from petatron.train.build_run import build_model
from petatron.validate import load_config
from tests.run_stage import run_stage

FLAGS = (
    "--preset tiny-llama --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --no-compile "
    "--device cpu --no-bf16 --micro-batch-size 1"
)
FUSED, GEMM = "_FusedFunctionGemm", "_GemmFunction"


def model_of(flags: str) -> ParallelModel:
    run = load_config([*FLAGS.split(), *flags.split()], require_training=False).config
    return build_model(run, ParallelMesh.single(torch.device("cpu")))


def nodes_of(model: ParallelModel) -> Counter[str]:
    """Nodes of a forward pass, by the name of their function."""
    tokens = torch.arange(16).reshape(1, 16)
    losses = run_stage(model.module, Batch(tokens, tokens, torch.ones(1, 16)))
    found, seen, waiting = Counter[str](), set[object](), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found[type(node).__name__.removesuffix("Backward")] += 1
            waiting += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        ("", 4),  # norm and qkv, heads and out, norm and gate with up, activation and down
        ("--normalization LayerNorm --activation gelu --add-bias-linear", 4),
        ("--attention-output-gate", 3),  # the gate is between heads and out
        ("--fp8-format hybrid", 0),  # a GEMM may cast its input a second time
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 0),
    ],
    ids=["llama", "gpt", "gated", "fp8", "recompute"],
)
def test_a_function_and_the_gemm_of_its_output_are_one_node(flags: str, fused: int):
    found = nodes_of(model_of(flags))
    assert found[FUSED] == fused, found
    if "recompute" not in flags:
        assert found[FUSED] + found[GEMM] == 4, found


def test_without_a_target_autograd_sees_every_gemm():
    model = model_of("")
    set_weight_grad_target(model.module, None)
    found = nodes_of(model)
    assert found[FUSED] == 0 and found[GEMM] == 4, found


def test_the_first_half_of_a_shared_expert_has_its_activation(monkeypatch: pytest.MonkeyPatch):
    """It is computed beside the dispatch of tokens, not after it."""
    experts = "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 32"
    [layer] = [module for module in model_of(experts).module.modules() if isinstance(module, MoELayer)]
    assert layer.shared is not None
    applied: list[int] = []
    kernels = layer.shared.act.kernels
    original = kernels.gated_activation

    class Counted:
        def __getattr__(self, name: str) -> object:
            return getattr(kernels, name)

        def gated_activation(self, *args: object, **options: object) -> object:
            applied.append(1)
            return original(*args, **options)

    monkeypatch.setattr(layer.shared.act, "kernels", Counted())
    run = SharedExpertRun(layer, layer.shared, RecomputableOutput(torch.randn(16, 32, requires_grad=True), None))
    run.first_half()
    assert applied == [1]
    run.output()
    assert applied == [1]
