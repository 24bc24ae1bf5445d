"""Encoders equal those of transformers, padded, with masked tokens: logits, losses and gradients, from their files and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import petatron
from petatron.base.errors import ConfigError
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.hf import from_hf_config, to_logical
from petatron.models.masked_language_model import ORDER_LOGITS
from petatron.sharding.flat_shard import group_tensor_shards
from tests.dist import RankPool
from tests.hf.encoder_zoo import ENCODERS, encoder_truth, saved
from tests.hf.ours import Computed, assemble
from tests.longform import diagonal, later

BOUND = 5e-5


@dataclass(frozen=True, slots=True)
class Encoded:
    """What one rank computed; outputs are there where one stage is the whole model and a rank has whole sequences."""

    logits: Tensor | None
    order_logits: Tensor | None
    training: Computed


def encode(folder: str, layout: dict[str, Any], batch: Batch, with_order: bool, collects: bool) -> Encoded:
    """Opens this rank's part of a folder's model, and computes outputs, loss and gradients."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    flags = ["--sequence-parallel"] * (layout.get("tp", 1) > 1) + ["--micro-batch-size", "3", "--seq-length", "16"]
    model = petatron.from_pretrained(folder, ParallelMesh(Layout(**layout), rank), flags=flags)
    for stage in model.stages.values():
        stage.eval()
    wanted = ["logits", *[ORDER_LOGITS] * with_order] if collects else []
    [outputs] = model.forward([batch], collect=wanted) if collects else [{}]
    loss = model.train_step([batch])
    grads = [
        (piece, view.clone())
        for group in model.param_groups
        for piece, view in group_tensor_shards(group, group.grads())
    ]
    return Encoded(outputs.get("logits"), outputs.get(ORDER_LOGITS), Computed(loss, loss, loss.item(), grads))


LAYOUTS = {"tp1": {}, "tp2-sp": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
AT_ONCE = {("bert", "tp2-sp"), ("modernbert", "cp2"), ("roberta", "pp2"), ("megatron-bert", "cp2")}
CASES = [
    (name, layout) if layout == "tp1" or (name, layout) in AT_ONCE else later(name, layout)
    for name in ENCODERS
    for layout in LAYOUTS
]


@diagonal(3)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_an_encoder_equals_that_of_transformers(ranks: RankPool, name: str, layout: str, tmp_path: Path):
    true, sizes = encoder_truth(name), LAYOUTS[layout]
    world_size, with_order = 2 if sizes else 1, true.order_logits is not None
    collects = not {"pp", "cp"} & sizes.keys()
    folder = str(saved(name, tmp_path))
    args = (folder, sizes, true.batch, with_order, collects)
    parts = [encode(*args)] if world_size == 1 else ranks.run(encode, world_size, *args)
    for part in parts:
        assert part.training.loss == pytest.approx(true.loss, rel=1e-6)
        if collects:
            assert part.logits is not None
            torch.testing.assert_close(part.logits[true.is_token], true.logits[true.is_token], rtol=0, atol=BOUND)
        if collects and with_order:
            torch.testing.assert_close(part.order_logits, true.order_logits, rtol=0, atol=BOUND)
    spec = petatron.from_pretrained(folder).spec
    family = true.model.config.model_type
    wanted = to_logical(family, dict(true.grads), spec)
    grads = assemble([part.training for part in parts])
    assert grads.keys() == wanted.keys()
    for key, value in wanted.items():
        # A key's bias shifts all scores of a query alike, so its gradient is zero but for rounding.
        bound = 1e-5 if key.endswith("attention.k.bias") else 1e-6 + 2e-5 * value.abs().max().item()
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=bound, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ENCODERS)
def test_transformers_reads_what_is_written(name: str, tmp_path: Path):
    true = encoder_truth(name)
    petatron.from_pretrained(saved(name, tmp_path / "theirs")).save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == true.model.config.model_type
    again, report = type(true.model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for key, value in true.model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "relative positions": (
        {"model_type": "bert", "position_embedding_type": "relative_key"},
        "position_embedding_type",
    ),
    "decoder": ({"model_type": "roberta", "is_decoder": True}, "is_decoder"),
    "activation": ({"model_type": "bert", "hidden_act": "mish"}, "hidden_act"),
    "some biases": ({"model_type": "modernbert", "mlp_bias": True}, "attention_bias"),
    "kinds of layers": ({"model_type": "modernbert", "layer_types": ["chunked_attention"] * 22}, "layer_types"),
    "prediction activation": ({"model_type": "modernbert", "classifier_activation": "mish"}, "classifier_activation"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_encoder_here_cannot_express_is_refused_by_its_key(case: str):
    config, key = REFUSED[case]
    with pytest.raises(ConfigError, match=key):
        from_hf_config(config)
