"""Builds the models that generation benches compare, from the same initial weights: our engine, and transformers' model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from petatron.bench.peers import BenchSpec, huggingface
from petatron.bench.peers.petatron_step import load_initial_weights
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.optim.loss_scaler import compute_dtype
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import build_model, launch


def build_weights(spec: BenchSpec) -> ParallelModel:
    """Builds our model with the initial weights of every contender, without gradients."""
    model = build_model(spec.run, launch(spec.run), init_weights=False, gradients=False)
    load_initial_weights(model)
    return model


def build_engine(spec: BenchSpec, options: EngineOptions) -> tuple[ParallelModel, Engine]:
    """Builds our model and its engine."""
    model = build_weights(spec)
    return model, Engine(model, options=options)


def transformers_model(spec: BenchSpec) -> Any:
    """Builds transformers' model in the precision of the run."""
    return huggingface.build_model(spec.run, device=spec.device, dtype=compute_dtype(spec.run.precision)).eval()


def padded_prompts(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns prompts as transformers takes them, padded on the left to the longest, and their mask.

    >>> [x.tolist() for x in padded_prompts([[7, 8], [9]], torch.device("cpu"))]
    [[[7, 8], [0, 9]], [[1, 1], [0, 1]]]
    """
    width = max(map(len, prompts))
    tokens = [[0] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)
