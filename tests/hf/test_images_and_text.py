"""Models that read images equal those of transformers: logits, losses and gradients, from their files and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import petatron
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.hf import to_logical
from petatron.sharding.flat_shard import group_tensor_shards
from tests.dist import RankPool
from tests.hf.images_and_text_zoo import LENGTH, MODELS, saved, truth
from tests.hf.ours import Computed, assemble
from tests.longform import diagonal, later

BOUND = 1e-4


def compute(folder: str, layout: dict[str, Any], batch: Batch, collects: bool) -> tuple[Tensor | None, Computed]:
    """Opens this rank's part of a folder's model, and computes logits, loss and gradients."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    flags = ["--sequence-parallel"] * (layout.get("tp", 1) > 1)
    flags += ["--micro-batch-size", "2", "--seq-length", str(LENGTH)]
    flags += ["--encoder-pipeline-model-parallel-size", "1"] * (layout.get("pp", 1) > 1)
    model = petatron.from_pretrained(folder, ParallelMesh(Layout(**layout), rank), flags=flags)
    for stage in model.stages.values():
        stage.eval()
    [outputs] = model.forward([batch], collect=["logits"]) if collects else [{}]
    loss = model.train_step([batch])
    grads = [
        (piece, view.clone())
        for group in model.param_groups
        for piece, view in group_tensor_shards(group, group.grads())
    ]
    return outputs.get("logits"), Computed(loss, loss, loss.item(), grads)


LAYOUTS = {"tp1": {}, "tp2-sp": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
AT_ONCE = {("llava", "tp2-sp"), ("qwen2.5-vl", "cp2"), ("smolvlm", "pp2")}
CASES = [
    (name, layout) if layout == "tp1" or (name, layout) in AT_ONCE else later(name, layout)
    for name in MODELS
    for layout in LAYOUTS
]


@diagonal(3)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_model_of_images_equals_that_of_transformers(ranks: RankPool, name: str, layout: str, tmp_path: Path):
    true, sizes = truth(name), LAYOUTS[layout]
    collects = not {"pp", "cp"} & sizes.keys()
    args = (str(saved(name, tmp_path)), sizes, true.batch, collects)
    parts = ranks.run(compute, 2, *args) if sizes else [compute(*args)]
    for logits, training in parts:
        assert training.loss == pytest.approx(true.loss, rel=1e-5)
        if logits is not None:
            torch.testing.assert_close(logits, true.logits, rtol=0, atol=BOUND)
    spec = petatron.from_pretrained(args[0]).spec
    wanted = to_logical(true.model.config.model_type, dict(true.grads), spec)
    grads = assemble([training for _, training in parts])
    assert grads.keys() == wanted.keys()
    for key, value in wanted.items():
        bound = 1e-6 + 1e-4 * value.abs().max().item()
        torch.testing.assert_close(grads[key], value, rtol=1e-3, atol=bound, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_written(name: str, tmp_path: Path):
    true = truth(name)
    petatron.from_pretrained(saved(name, tmp_path / "theirs")).save_pretrained(tmp_path / "ours")
    again, report = type(true.model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    # The norm after the layers that LLaVA's decoder reads is built and not computed.
    assert all("post_layernorm" in key for key in report["missing_keys"]) and not report["unexpected_keys"]
    assert "llava" in name or not report["missing_keys"]
    state = again.state_dict()
    for key, value in true.model.state_dict().items():
        assert key not in state or "post_layernorm" in key or torch.equal(state[key], value), key
