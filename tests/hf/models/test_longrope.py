"""LongRoPE: the length of a sequence chooses its factors, in one forward and while text is generated; what of its settings is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import petatron
from petatron.base.errors import ConfigError
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.integrations import transformers as petatron_transformers
from petatron.models.hf import from_hf_config, to_logical
from petatron.models.registry import model_spec
from tests.dist import RankPool
from tests.hf.ours import compute, run_config, scores_of
from tests.hf.zoo import build, truth
from tests.longform import later

NAME = "phi3-longrope"


ORIGINAL = 32
"""The original context of the models."""


def _ids(count: int, *, seed: int = 3) -> list[int]:
    return torch.randint(61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longrope")
    build(NAME).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "tp"), [(NAME, 1), ("phi3-longrope-factor", 2)])
@pytest.mark.parametrize("seq_length", [24, later(48)])
def test_the_length_of_a_sequence_chooses_the_factors(
    ranks: RankPool, name: str, tp: int, seq_length: int, tmp_path: Path
):
    """Whatever `--seq-length` is: logits within the original context and beyond it are those of transformers."""
    true = truth(name)
    run = run_config(true.config, tmp_path, layout=f"--tp {tp}", world_size=tp, length=seq_length)
    logical = to_logical("phi3", true.weights, model_spec(run))
    for count in (ORIGINAL, ORIGINAL + 1, 48):
        tokens = torch.tensor([_ids(count)])
        args = (run, logical, tokens, torch.ones_like(tokens).bool(), 0)
        with torch.no_grad():
            wanted = build(name)(tokens).logits
        for part in ranks.run(compute, tp, *args) if tp > 1 else [compute(*args)]:
            torch.testing.assert_close(part.logits, wanted, rtol=0, atol=5e-5)


def _greedy(prompt: list[int], new_tokens: int) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": new_tokens}
    ids = torch.tensor([prompt])
    return build(NAME).generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


PROMPTS = {"below": (8, 12), "at the end": (31, 2), "crossing": (20, 24), "at": (32, 8), "above": (40, 8)}
"""Tokens of the prompt, and new ones."""


@pytest.mark.parametrize("flags", [(), ("--seq-length", "64")], ids=["default", "longer"])
def test_greedy_tokens_are_those_of_transformers_within_beyond_and_across(folder: Path, flags: tuple[str, ...]):
    """All together in one engine, with pages and chunks smaller than prompts, and each once more from pages of its prefix."""
    model = petatron.from_pretrained(folder, flags=list(flags))
    engine = Engine(model, options=EngineOptions(page_size=4, max_step_tokens=7))
    assert engine.max_length == 65
    wanted = {case: _greedy(_ids(*sizes[:1], seed=sizes[0]), sizes[1]) for case, sizes in PROMPTS.items()}
    for _ in range(2):
        requests = {
            case: engine.submit(_ids(count, seed=count), SamplingParams(max_new_tokens=new, temperature=0.0))
            for case, (count, new) in PROMPTS.items()
        }
        while engine.has_work:
            engine.step()
        assert {case: engine.take(request).ids for case, request in requests.items()} == wanted


def test_a_prefix_of_the_other_factors_is_not_reused(folder: Path):
    """A short sequence after a long one with the same beginning, and the other way round."""
    engine = Engine(petatron.from_pretrained(folder), options=EngineOptions(page_size=4))
    long = _ids(44)
    for count in (44, 24, 44, 30):
        [[answer]] = engine.complete([long[:count]], SamplingParams(max_new_tokens=6, temperature=0.0))
        assert answer.ids == _greedy(long[:count], 6)


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, later({"pp": 2})], ids=str)
def test_scores_go_by_the_length_of_each_sequence(ranks: RankPool, folder: Path, layout: dict[str, int]):
    """Padded to one length in one micro-batch, whatever part of it a rank has."""
    sequences = [_ids(count, seed=count) for count in (30, 33, 34, 45)]
    args = (str(folder), sequences, layout)
    scores = ranks.run(scores_of, 2, *args)[0] if layout else scores_of(*args)
    for ids, score in zip(sequences, scores):
        with torch.no_grad():
            logits = build(NAME)(torch.tensor([ids[:-1]])).logits[0].double()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(score), wanted, rtol=0, atol=5e-5)


def test_as_a_model_of_transformers_it_switches_too(folder: Path):
    ours = petatron_transformers.from_checkpoint(folder)
    for count, new in PROMPTS.values():
        ids = torch.tensor([_ids(count, seed=count)])
        options = {"do_sample": False, "max_new_tokens": new, "attention_mask": torch.ones_like(ids)}
        assert ours.generate(ids, **options)[0, count:].tolist() == _greedy(ids[0].tolist(), new)
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, build(NAME)(ids).logits, rtol=0, atol=5e-5)


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
