"""Generation with sparse latent attention: pages hold index keys too, and every token is that of the whole sequence."""

from __future__ import annotations

import pytest

from petatron.infer.engine_options import EngineOptions
from petatron.infer.step.kv_cache_and_states import layer_states
from petatron.layers.spec.generation_state import PagedState
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.unit.infer.layer_kind_checks import (
    check_asked_twice,
    check_half_precision,
    check_layout_answers,
    check_recorded,
)
from tests.unit.infer.test_engine import exact_model
from tests.unit.infer.test_sample import LATENT, LATENT_YARN

INDEXER = "--attention-dropout 0 --experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 --dsa-indexer-topk"
SPARSE = f"{LATENT} {INDEXER} 4"
KINDS = [SPARSE, f"{LATENT_YARN} {INDEXER} 9 --dsa-indexer-rope-interleaved", f"--window-size 5 {LATENT} {INDEXER} 3"]


@diagonal(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(page_size=3, max_step_tokens=4),
        EngineOptions(page_size=1, max_step_tokens=64, max_sequences=2),
        EngineOptions(page_size=2, num_pages=13, prefix_caching=False),
    ],
)
def test_chunks_pages_and_preemption_change_no_token(kind: str, options: EngineOptions):
    engine, again = check_asked_twice(kind, options)
    assert any(answer.cached_tokens for answer in again) == options.prefix_caching
    assert (engine.stats.preemptions > 0) == (options.num_pages is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_are_recorded(kind: str):
    check_recorded(kind)


def test_half_precision_follows_float32():
    """As long as the same tokens are chosen."""
    check_half_precision(f"{LATENT} {INDEXER} 64", new_tokens=1)


@diagonal(2)
@pytest.mark.parametrize(
    ("layout", "world_size", "model"),
    [
        ("--tp 2 --sequence-parallel", 2, SPARSE),
        later("--tp 2 --pp 2", 4, KINDS[1]),
        later("--pp 2", 2, SPARSE),
        later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, SPARSE),
        later("--tp 2 --ep 2 --etp 1", 2, f"{SPARSE} --num-experts 4 --moe-router-topk 2"),
    ],
)
def test_every_layout_continues_alike(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout_answers(ranks, layout, world_size, model)


def test_pages_hold_an_index_key_beside_the_latent():
    states = layer_states(exact_model(f"--fp64 {SPARSE}"), PagedState)
    assert {state.rows for state in states.values()} == {(("latent", (12,)), ("rope_key", (4,)), ("index_key", (8,)))}
