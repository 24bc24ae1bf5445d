"""Logits, greedy tokens, loss and every gradient equal those of transformers, at tp 1, 2 and 4, whole and split sequence,
and with the experts on two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from petatron.models.hf import family_name_of_config, to_logical
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from tests.dist import RankPool
from tests.hf.ours import assemble, compute, run_config, train_stages
from tests.hf.zoo import DENSE, MIXED, NEW_TOKENS, PLAIN, Truth, truth
from tests.longform import diagonal, every_second, later

LAYOUTS = {"tp1": ("", 1), "tp2": ("--tp 2", 2), "tp2-sp": ("--tp 2 --sequence-parallel", 2)}
FOUR = {"tp4": ("--tp 4", 4), "tp4-sp": ("--tp 4 --sequence-parallel", 4)}


def check(ranks: RankPool, name: str, layout: str, world_size: int, folder: Path) -> None:
    true = truth(name)
    run = run_config(true.config, folder, layout=layout, world_size=world_size, length=true.tokens.shape[1])
    family = family_name_of_config(true.config)
    args = (run, to_logical(family, true.weights, model_spec(run)), true.tokens, true.counted, NEW_TOKENS)
    parts = ranks.run(compute, world_size, *args) if world_size > 1 else [compute(*args)]
    assert true.logits.std() > 1, "logits this small would hide a difference"
    for part in parts:
        assert part.logits.shape == true.logits.shape
        torch.testing.assert_close(part.logits, true.logits, rtol=0, atol=5e-5)
        assert torch.equal(part.logits.argmax(-1), true.logits.argmax(-1))
        assert torch.equal(part.greedy, true.greedy)
        assert part.loss == pytest.approx(true.loss, rel=1e-6)
    check_gradients(true, assemble(parts), model_spec(run))


def check_gradients(true: Truth, grads: Mapping[str, Tensor], spec: ModelSpec) -> None:
    family = family_name_of_config(true.config)
    wanted = to_logical(family, true.grads, spec)
    wanted = {key: value for key, value in wanted.items() if not key.endswith(".expert_bias")}  # no parameter
    assert grads.keys() == wanted.keys()
    for key, value in wanted.items():
        # Without rotation a key's bias shifts all scores alike, and its gradient is zero but for rounding.
        bound = 1e-6 + 2e-5 * value.abs().max().item()
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=bound, msg=lambda text, key=key: f"{key}: {text}")


STAGES = ["kimi-linear-moe", "minimax-moe", "falcon-h1", later("falcon-h1-norm-then-gate"), "bloom", "mpt-clipped"]


@diagonal(2)
@pytest.mark.parametrize("name", STAGES)
def test_stages_have_the_loss_and_gradients_of_transformers(ranks: RankPool, name: str, tmp_path: Path):
    true = truth(name)
    run = run_config(true.config, tmp_path, layout="--pp 2", world_size=2, length=true.tokens.shape[1])
    spec = model_spec(run)
    logical = to_logical(family_name_of_config(true.config), true.weights, spec)
    parts = ranks.run(train_stages, 2, run, logical, true.tokens, true.counted)
    assert [part.loss for part in parts] == pytest.approx([true.loss] * 2, rel=1e-6)
    check_gradients(true, assemble(parts), spec)


AT_ONCE_DENSE = {("gemma2", "tp2"), ("olmo2", "tp2-sp"), ("falcon-h1", "tp2-sp")}
MODELS = [
    (name, layout)
    if layout == "tp1" or (name in PLAIN and layout == ("tp2", "tp2-sp")[at % 2]) or (name, layout) in AT_ONCE_DENSE
    else later(name, layout)
    for at, name in enumerate(DENSE)
    for layout in LAYOUTS
]


@diagonal(4)
@pytest.mark.parametrize(("name", "layout"), MODELS)
def test_equals_transformers(ranks: RankPool, name: str, layout: str, tmp_path: Path):
    check(ranks, name, *LAYOUTS[layout], tmp_path)


EXPERTS = {
    "tp1": ("", 1),
    "ep2": ("--ep 2", 2),
    "tp2": ("--tp 2", 2),
    "tp2-etp1-ep2": ("--tp 2 --ep 2 --etp 1", 2),
}


AT_ONCE = {
    ("mixtral", "ep2"),
    ("qwen2-moe", "tp2"),
    ("qwen2-moe-dense-layer", "ep2"),
    ("qwen3-moe-every-second", "tp2-etp1-ep2"),
    ("deepseek-v3", "tp2"),
    ("qwen3-next-moe", "tp2"),
    ("kimi-linear-moe", "tp2"),
    ("minimax-moe", "tp2"),
    ("deepseek-v2-groups", "tp2-etp1-ep2"),
}
MIXTURES = [
    (name, layout) if layout == "tp1" or (name, layout) in AT_ONCE else later(name, layout)
    for name in MIXED
    for layout in EXPERTS
]


@diagonal(3)
@pytest.mark.parametrize(("name", "layout"), MIXTURES)
def test_mixtures_equal_transformers(ranks: RankPool, name: str, layout: str, tmp_path: Path):
    check(ranks, name, *EXPERTS[layout], tmp_path)


@diagonal(3)
@pytest.mark.parametrize(
    ("name", "layout"), every_second((n, layout) for n in ("llama-gqa", "qwen3-head-norm", "gpt2") for layout in FOUR)
)
def test_more_ranks_than_key_value_heads(ranks: RankPool, name: str, layout: str, tmp_path: Path):
    check(ranks, name, *FOUR[layout], tmp_path)


WRONG = [
    ("gpt2", {"activation": "gelu"}, 1e-3),  # exact and tanh GELU are close
    ("llama-gqa", {"rotary_base": 5000.0}, 1e-2),
    ("llama3-scaling", {"use_rope_scaling": False}, 1e-2),
    ("llama-yarn", {"position_embedding_type": "rope"}, 1e-2),
    ("llama-yarn-mscale", {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0}, 1e-2),
    ("mistral-window", {"window_size": 6}, 1e-2),
    ("qwen3-window", {"window_size": None}, 1e-2),
    ("qwen3-head-norm", {"norm_epsilon": 1e-3}, 1e-3),
    ("mixtral", {"moe_router_pre_softmax": True}, 1e-2),
    ("qwen3-moe", {"moe_router_pre_softmax": False}, 1e-2),
    ("qwen3-moe-every-second", {"moe_router_topk": 1}, 1e-2),
    ("deepseek-v2-groups", {"moe_router_group_score_topk": 2}, 1e-2),
    ("deepseek-v2-groups", {"yarn_mscale_all_dim": 0.5}, 1e-3),
    ("deepseek-v3", {"moe_router_group_score_topk": 1}, 1e-2),
    ("deepseek-v3", {"moe_router_topk_scaling_factor": 2.0}, 1e-2),
    ("kimi-linear-moe", {"latent_norm_epsilon": 1e-1}, 1e-3),
    ("minimax-moe", {"norm_placement": "pre"}, 1e-2),
    ("minimax-moe", {"lightning_stream_multiplier": 1.3}, 1e-3),
]


@diagonal(2)
@pytest.mark.parametrize(("name", "change", "least"), WRONG, ids=[case[0] for case in WRONG])
def test_a_wrong_setting_shows(name: str, change: dict, least: float, tmp_path: Path):
    """The equality above would notice: one setting read wrongly moves logits far beyond its bound."""
    true = truth(name)
    run = run_config(true.config, tmp_path)
    part = "moe" if all(key.startswith("moe_") for key in change) else "model"
    run = replace(run, **{part: replace(getattr(run, part), **change)})
    logical = to_logical(family_name_of_config(true.config), true.weights, model_spec(run))
    logits = compute(run, logical, true.tokens, true.counted, 0).logits
    assert (logits - true.logits).abs().max() > least
