"""Encoder-decoders equal those of transformers on padded pairs of texts: logits, losses and gradients, from their files and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import T5ForConditionalGeneration

import petatron
from petatron.base.errors import ConfigError
from petatron.data.masked.packed_rows import packed_documents
from petatron.kernels.attention.document_layout import KeySpans
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.hf import from_hf_config, to_logical
from petatron.sharding.flat_shard import group_tensor_shards
from tests.dist import RankPool
from tests.hf.encoder_decoder_zoo import ENCODER_DECODERS, encoder_decoder_truth, saved
from tests.hf.ours import Computed, assemble
from tests.longform import diagonal, later

BOUND = 1e-4


def compute(folder: str, layout: dict[str, Any], batch: Batch, collects: bool) -> tuple[Tensor | None, Computed]:
    """Opens this rank's part of a folder's model, and computes logits, loss and gradients."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    flags = ["--sequence-parallel"] * (layout.get("tp", 1) > 1)
    flags += ["--micro-batch-size", "3", "--seq-length", "24", "--decoder-seq-length", "16"]
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
AT_ONCE = {("t5", "tp2-sp"), ("flan-t5-odd", "cp2"), ("mt5", "pp2")}
CASES = [
    (name, layout) if layout == "tp1" or (name, layout) in AT_ONCE else later(name, layout)
    for name in ENCODER_DECODERS
    for layout in LAYOUTS
]


@diagonal(3)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_an_encoder_decoder_equals_that_of_transformers(ranks: RankPool, name: str, layout: str, tmp_path: Path):
    true, sizes = encoder_decoder_truth(name), LAYOUTS[layout]
    collects = not {"pp", "cp"} & sizes.keys()
    args = (str(saved(name, tmp_path)), sizes, true.batch, collects)
    parts = ranks.run(compute, 2, *args) if sizes else [compute(*args)]
    for logits, training in parts:
        assert training.loss == pytest.approx(true.loss, rel=1e-6)
        if logits is not None:
            torch.testing.assert_close(logits[true.is_token], true.logits[true.is_token], rtol=0, atol=BOUND)
    spec = petatron.from_pretrained(args[0]).spec
    wanted = to_logical(true.model.config.model_type, dict(true.grads), spec)
    grads = assemble([training for _, training in parts])
    assert grads.keys() == wanted.keys()
    for key, value in wanted.items():
        bound = 1e-6 + 2e-5 * value.abs().max().item()
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=bound, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["t5-odd", "flan-t5"])
def test_packed_texts_are_computed_like_texts_by_themselves(name: str, tmp_path: Path):
    true = encoder_decoder_truth(name)
    assert true.batch.source_documents is not None
    lengths = [(row == 0).sum().item() for row in true.batch.source_documents.starts_BS], true.is_token.sum(1).tolist()
    rows = []
    for tokens_BS, counts in zip((true.batch["encoder_tokens"], true.batch.tokens), lengths, strict=True):
        texts = [row[:count] for row, count in zip(tokens_BS, counts, strict=True)]
        begins = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        padding = np.full((3,), -1)
        rows.append(
            (torch.cat([*texts, torch.zeros(3, dtype=torch.int64)])[None], np.concatenate((begins, padding))[None])
        )
    (source, source_begins), (tokens, begins) = rows
    (source_documents, source_positions), (documents, positions) = map(packed_documents, (source_begins, begins))
    batch = Batch(
        tokens,
        positions=positions,
        documents=documents,
        arrays={"encoder_tokens": source, "encoder_positions": source_positions},
        source_documents=source_documents,
        key_spans=KeySpans.of_documents(documents, source_documents),
    )
    model = petatron.from_pretrained(saved(name, tmp_path), dtype="float32", gradients=False)
    [outputs] = model.forward([batch], collect=["logits"])
    torch.testing.assert_close(outputs["logits"][0, :-3], true.logits[true.is_token], rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_transformers_reads_what_is_written(name: str, tmp_path: Path):
    true = encoder_decoder_truth(name)
    petatron.from_pretrained(saved(name, tmp_path / "theirs")).save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == "t5"  # which an mT5 is too, with an output that is not scaled
    again, report = T5ForConditionalGeneration.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for key, value in true.model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    with torch.no_grad():
        logits = again.eval()(input_ids=true.batch["encoder_tokens"], decoder_input_ids=true.batch.tokens).logits
        expected = true.model(input_ids=true.batch["encoder_tokens"], decoder_input_ids=true.batch.tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_a_published_config_says_of_itself_whether_the_head_is_tied():
    """transformers 5 rewrites it, and then the tensors say so."""
    flan = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    values = from_hf_config({"model_type": "t5"})[0], from_hf_config(flan)[0]
    assert [value["untie_embeddings_and_output_weights"] for value in values] == [False, True]
    assert [value["logits_scaling"] for value in values] == [512**0.5, 1.0]
    assert [value["num_layers"] for value in values] == [12, 12]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj"),
    "gate": ({"feed_forward_proj": "double-gelu"}, "feed_forward_proj"),
    "decoder alone": ({"is_decoder": True}, "is_decoder"),
    "layers of the encoder": ({"num_layers": 0}, "num_layers"),
    "layers of the decoder": ({"num_decoder_layers": -1}, "num_decoder_layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_encoder_decoder_here_cannot_express_is_refused_by_its_key(case: str):
    config, key = REFUSED[case]
    with pytest.raises(ConfigError, match=key):
        from_hf_config({"model_type": "t5", **config})
