"""LongRoPE: which factors a run uses, how far it generates with them, and what of its settings is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.infer.engine import Engine
from petatron.infer.sampling_params import SamplingParams
from petatron.models.hf import from_hf_config, to_logical
from petatron.models.registry import model_spec
from tests.dist import RankPool
from tests.hf.ours import compute, run_config
from tests.hf.zoo import build, truth

NAME = "phi3-longrope"


@pytest.mark.parametrize(("name", "tp"), [(NAME, 1), ("phi3-longrope-factor", 2)])
def test_a_run_with_longer_sequences_uses_the_long_factors(ranks: RankPool, name: str, tp: int, tmp_path: Path):
    """The model of short contexts, computed as one of long ones, is what transformers computes for a longer input."""
    true = truth(name)
    run = run_config(true.config, tmp_path, layout=f"--tp {tp}", world_size=tp, length=true.tokens.shape[1])
    longer = replace(run, model=replace(run.model, seq_length=48))
    logical = to_logical("phi3", true.weights, model_spec(run))
    tokens = torch.randint(61, (1, 48), generator=torch.Generator().manual_seed(3))
    args = (longer, logical, tokens, torch.ones_like(tokens).bool(), 0)
    with torch.no_grad():
        wanted = build(name)(tokens).logits
    for part in ranks.run(compute, tp, *args) if tp > 1 else [compute(*args)]:
        torch.testing.assert_close(part.logits, wanted, rtol=0, atol=5e-5)
    assert (model_spec(run).max_positions, model_spec(longer).max_positions) == (32, 64)


def test_generation_ends_with_the_original_context_unless_the_run_is_for_longer_ones(tmp_path: Path):
    build(NAME).save_pretrained(tmp_path)
    engine = Engine(petatron.from_pretrained(tmp_path))
    assert engine.max_length == 33
    with pytest.raises(DataError, match="The prompt has 40 tokens, but the model has 32 positions"):
        engine.complete_on_all_ranks([[1] * 40], SamplingParams(max_new_tokens=2))
    long = petatron.from_pretrained(tmp_path, flags=["--seq-length", "64"])
    [[answer]] = Engine(long).complete_on_all_ranks([[1] * 40], SamplingParams(max_new_tokens=2, temperature=0.0))
    with torch.no_grad():
        grown = torch.tensor([[1] * 40])
        for _ in range(2):
            grown = torch.cat((grown, build(NAME)(grown).logits[:, -1:].argmax(-1)), dim=1)
    assert answer.ids == grown[0, 40:].tolist()


PUBLISHED = {
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24,
    "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
}  # fmt: skip


def test_phi4_mini():
    model, _ = from_hf_config(PUBLISHED)
    assert json.loads(model["longrope_long_factor"]) == [1.5] * 48
    assert (model["rope_scaling_factor"], model["original_max_position_embeddings"]) == (32.0, 4096)
    older = {**PUBLISHED, "rope_scaling": {**PUBLISHED["rope_scaling"], "type": "su"}}
    assert from_hf_config(older) == from_hf_config(PUBLISHED)


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "one list": ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.long_factor None is not a list of positive"),
    "text": ({"rope_scaling": {"type": "su", "short_factor": ["1"]}}, "rope_scaling.short_factor ['1'] is not a list of positive"),
    "negative": ({"rope_scaling": {"type": "su", "short_factor": [-1]}}, "rope_scaling.short_factor [-1] is not a list of positive"),
    "context": ({"original_max_position_embeddings": 1}, "original_max_position_embeddings 1 is not a length of a context"),
    "other": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "It has default, longrope."),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_refused(case: str):
    change, message = UNREADABLE[case]
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**PUBLISHED, **change})
    assert message in str(caught.value)
