"""A model of transformers and ours in float64: the same logits, loss and gradients, to nine digits."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.models.hf import fill_model
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.build_run import build_model
from tests.hf.variant_zoo import VOCABULARY

LENGTH = 70
"""More than the 64 tokens of a chunk of transformers."""


class _Float64Torch:
    """`torch`, where float32 is float64: transformers computes the delta rule and norms in float32, whatever the model is in."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def random_float64_model(build: Callable[[], Any], modeling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(modeling, "torch", _Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.manual_seed(5)
    theirs = build().double().eval()
    theirs.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return theirs


def check_float64(theirs: Any, run: RunConfig, logical: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """`logical` names their tensors, or gradients of them, as ours; expert biases have no gradient."""
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    found = theirs(tokens, labels=tokens)
    found.loss.backward()
    model = build_model(run, ParallelMesh.single(torch.device("cpu")))
    assert isinstance(model.module, Decoder)
    fill_model(model.module, model.placements, logical(theirs.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(model.module.logits(tokens), found.logits, rtol=0, atol=1e-9)
    counted = torch.ones(2, LENGTH, dtype=torch.float64)
    counted[:, -1] = 0.0
    loss = model.train_step([Batch(tokens, tokens.roll(-1, dims=1), counted)])
    assert loss.item() == pytest.approx(found.loss.item(), rel=1e-10)
    named = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    named |= {name: buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")}
    wanted = {name: grad for name, grad in logical(named).items() if not name.endswith(".expert_bias")}
    grads = {
        piece.name: view for group in model.param_groups for piece, view in group_tensor_shards(group, group.grads())
    }
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-9 * grad.abs().max().item(), msg=name)
