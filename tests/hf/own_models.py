"""Models that no family of transformers has, as `petatron.integrations.transformers` opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import petatron
from petatron.integrations import transformers as petatron_transformers
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.decoder import Decoder
from petatron.pretrained.saveable_model import Model
from petatron.train.build_run import build_model
from tests.unit.infer.test_sample import LATENT, MODEL

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
KINDS = {  # of models that no family has
    "activation": "--activation squared_relu --num-query-groups 2 --group-query-attention",
    "latent": f"--normalization LayerNorm {LATENT} --window-size 5",
    "learned positions": "--position-embedding-type learned_absolute --swiglu --no-untie-embeddings-and-output-weights",
    "recurrent": "--hybrid-layer-pattern M-*GP --num-layers 5 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 6 "
    "--mamba-chunk-size 4 --linear-key-head-dim 6 --linear-value-head-dim 5 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-chunk-size 4 --activation squared_relu",
    "experts": f"{EXPERTS} --mtp-num-layers 1 --mtp-loss-scaling-factor 0 --normalization LayerNorm",
}
IDS = torch.tensor([[5, 17, 90, 3, 3, 7, 80], [1, 2, 3, 4, 5, 6, 99]])
ROWS = [[5, 17, 90, 3], [1, 2, 3, 4, 5, 6, 99], [8]]


def own_model(kind: str) -> Model:
    words = f"{MODEL.replace('--swiglu', '')} --fp64 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2 {KINDS[kind]}"
    run = petatron.load_config(words.split()).config
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), 0))
    for _, buffer in model.module.named_buffers():
        buffer.normal_()
    return model


def opened(folder: Path, **options: Any) -> petatron_transformers.PetatronForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert isinstance(model, petatron_transformers.PetatronForCausalLM) and not model.training
    return model


def own_logits(model: Model, ids: torch.Tensor) -> torch.Tensor:
    decoder = model.module.eval()
    assert isinstance(decoder, Decoder)
    with torch.no_grad():
        return decoder.logits(ids)


def padded(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    blank = [[0] * (longest - len(row)) for row in rows]
    ids = [[*pad, *row] if left else [*row, *pad] for row, pad in zip(rows, blank)]
    ones = [[1] * len(row) for row in rows]
    mask = [[*pad, *one] if left else [*one, *pad] for one, pad in zip(ones, blank)]
    return torch.tensor(ids), torch.tensor(mask)
