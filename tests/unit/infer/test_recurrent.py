"""Generation with recurrent layers: a sequence has a slot for its states, and every token is that of the whole sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.kv_cache_pages import SCRATCH_SLOT, SlotPool
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.step.kv_cache_and_states import layer_states, page_bytes, slot_bytes
from petatron.layers.spec.generation_state import PagedState, RecurrentState, StateTensor
from tests.dist import RankPool
from tests.longform import diagonal, later, over_nccl
from tests.unit.infer.layer_kind_checks import (
    PROMPTS,
    check_asked_twice,
    check_half_precision,
    check_layout_answers,
    check_recorded,
)
from tests.unit.infer.test_engine import GREEDY, check_by_hand, exact_model
from tests.unit.infer.test_sample import LATENT, POSITIONS, VOCAB, model_in

MAMBA = (
    "--hybrid-layer-pattern MM --num-layers 2 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 6 "
    "--mamba-chunk-size 4"
)
HYBRID = MAMBA.replace("MM --num-layers 2", "M-*M --num-layers 4")
LATENT_HYBRID = f"{HYBRID} {LATENT}"
EXPERTS = HYBRID.replace("M-*M", "ME*M") + " --num-experts 4 --moe-router-topk 2"
DELTA = (
    "--hybrid-layer-pattern GG --num-layers 2 --linear-key-head-dim 6 --linear-value-head-dim 5 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-chunk-size 4"
)
SIZES = DELTA.partition("--num-layers 2")[2]
GATED = (
    "--num-layers 4 --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --attention-output-gate "
    f"--qk-layernorm {SIZES}"
)
NEXT = f"{GATED} --num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
KIMI = (
    "--num-layers 4 --experimental-attention-variant kimi_delta_attention --linear-attention-freq 2 "
    f"{LATENT} --position-embedding-type none {SIZES}"
)
LIGHTNING = (
    "--num-layers 4 --experimental-attention-variant lightning_attention --linear-attention-freq 2 --linear-chunk-size 4 "
    "--norm-placement stream --lightning-stream-multiplier 1.4 --lightning-out-multiplier 0.8 --mlp-stream-multiplier 1.2"
)
MINIMAX = f"{LIGHTNING} --num-experts 4 --moe-router-topk 2"
PARALLEL = HYBRID.replace("M-*M", "P-P-") + (
    " --mamba-gated-norm none --key-multiplier 0.7 --attention-out-multiplier 0.9 --ssm-multipliers 0.7 0.8 1.3 0.6 1.1 "
    "--ssm-out-multiplier 0.5"
)
ONE_NORM = f"{HYBRID} --mamba-norm-groups 1"


@diagonal(3)
@pytest.mark.parametrize("kind", [MAMBA, HYBRID, DELTA, NEXT, KIMI, PARALLEL, MINIMAX])
@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(page_size=3, max_step_tokens=4),
        EngineOptions(page_size=1, max_step_tokens=64, max_sequences=2),
        EngineOptions(page_size=2, num_pages=13),
    ],
)
def test_chunks_slots_and_preemption_change_no_token(kind: str, options: EngineOptions):
    engine, again = check_asked_twice(kind, options)
    assert not any(answer.cached_tokens for answer in again), "a page says nothing of a state"
    assert free_slots(engine) == options.max_sequences
    assert (engine.stats.preemptions > 0) == (
        options.num_pages is not None and kind in (HYBRID, NEXT, KIMI, PARALLEL, MINIMAX)
    )


def free_slots(engine: Engine) -> int:
    [scheduler] = engine._schedulers
    return scheduler.slots.num_free


prompts = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=15), min_size=1, max_size=6)


@settings(max_examples=5, deadline=None)
@given(
    prompts=prompts,
    page_size=st.sampled_from([1, 3, 16]),
    max_step_tokens=st.integers(1, 20),
    max_sequences=st.integers(1, 6),
    spare_pages=st.integers(0, 6),
    kind=st.sampled_from([MAMBA, HYBRID, LATENT_HYBRID, DELTA, NEXT, KIMI, PARALLEL, MINIMAX]),
)
def test_nothing_but_the_request_decides_its_tokens(
    prompts: list[list[int]], page_size: int, max_step_tokens: int, max_sequences: int, spare_pages: int, kind: str
):
    options = EngineOptions(
        page_size=page_size,
        num_pages=-(-(POSITIONS + 1) // page_size) + spare_pages,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
    )
    engine = Engine(exact_model(f"--fp64 {kind}"), options=options)
    for [answer] in engine.complete(prompts, GREEDY):
        check_by_hand(answer, f"--fp64 {kind}")
    assert engine.stats.pages_used == 0 and free_slots(engine) == max_sequences


@diagonal(2)
@pytest.mark.parametrize("kind", [MAMBA, HYBRID, DELTA, GATED, KIMI, PARALLEL, LIGHTNING])
def test_decode_steps_are_recorded(kind: str):
    check_recorded(kind)


def test_a_cancelled_sequence_gives_its_slot_back():
    engine = Engine(exact_model(f"--fp64 {HYBRID}"), options=EngineOptions(page_size=2, max_sequences=2))
    requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    engine.step()
    engine.step()
    assert free_slots(engine) == 0
    for request in requests[:2]:
        engine.cancel(request)
    while engine.has_work:
        engine.step()
    assert free_slots(engine) == 2
    for request in requests[2:]:
        check_by_hand(engine.take(request), f"--fp64 {HYBRID}")


def test_half_precision_follows_float32():
    check_half_precision(HYBRID, new_tokens=3)


LAYOUTS = [
    over_nccl("--tp 2 --sequence-parallel", 2, HYBRID),
    over_nccl("--tp 2 --pp 2", 4, ONE_NORM),
    later("--tp 2", 2, MAMBA),
    later("--pp 2", 2, MAMBA),
    later("--tp 4", 4, MAMBA),
    later("--dp 2", 2, HYBRID),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, HYBRID),
    ("--dp 2 --ep 2", 2, EXPERTS),
    ("--tp 2 --sequence-parallel", 2, NEXT),
    later("--tp 2 --pp 2", 4, NEXT),
    over_nccl("--tp 2 --sequence-parallel", 2, KIMI),
    later("--tp 2 --pp 2", 4, KIMI),
    over_nccl("--tp 2 --sequence-parallel", 2, MINIMAX),
    later("--tp 2 --pp 2", 4, MINIMAX, nccl=True),
    later("--dp 2 --ep 2", 2, MINIMAX),
    later("--tp 4", 4, DELTA, nccl=True),
    later("--dp 2 --ep 2", 2, NEXT, nccl=True),
]


@diagonal(3)
@pytest.mark.parametrize(("layout", "world_size", "model"), LAYOUTS)
def test_every_layout_continues_alike(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout_answers(ranks, layout, world_size, model)


def test_slots_hold_the_window_and_the_state():
    model = exact_model(f"--fp64 {HYBRID}")
    states = layer_states(model, RecurrentState)
    window, state = StateTensor("conv", (3, 64 + 2 * 2 * 6)), StateTensor("ssm", (8, 8, 6), wide=True)
    assert states == {0: RecurrentState((window, state)), 3: RecurrentState((window, state))}
    assert set(layer_states(model, PagedState)) == {2}
    assert slot_bytes(model) == 2 * 8 * (3 * 88 + 8 * 8 * 6)


def test_slots_of_a_delta_net_hold_the_window_and_the_state():
    window, state = StateTensor("conv", (3, 2 * 2 * 6 + 4 * 5)), StateTensor("delta", (4, 6, 5), wide=True)
    states = layer_states(exact_model(f"--fp64 {NEXT}"), RecurrentState)
    assert states == {0: RecurrentState((window, state)), 2: RecurrentState((window, state))}


def test_slots_of_lightning_attention_hold_the_state_alone():
    model = exact_model(f"--fp64 {MINIMAX}")
    heads, width = model.spec.config.num_attention_heads, model.spec.config.kv_channels
    state = RecurrentState((StateTensor("kv", (heads, width, width), wide=True),))
    assert layer_states(model, RecurrentState) == {0: state, 2: state}


def test_memory_decides_how_many_run_at_once(monkeypatch: pytest.MonkeyPatch):
    model = exact_model(f"--fp64 {HYBRID}")
    room = 8 * slot_bytes(model)
    monkeypatch.setattr("petatron.infer.step.kv_cache_and_states._free_bytes", lambda model: float(room))
    engine = Engine(model, options=EngineOptions(page_size=1))
    assert free_slots(engine) == 3, "half of the memory, and one slot is for padding"
    assert engine.stats.pages_total == room // 2 // page_bytes(model, 1)
    for [answer] in engine.complete(PROMPTS, GREEDY):
        check_by_hand(answer, f"--fp64 {HYBRID}")
    room = slot_bytes(model)
    with pytest.raises(ConfigError, match="--max-batch-size 64 sequences have recurrent states of"):
        Engine(model)


def test_a_model_without_attention_has_one_empty_page_a_sequence():
    engine = Engine(model_in(f"--fp64 {MAMBA} --max-position-embeddings 1000000"), options=EngineOptions(page_size=2))
    assert engine.stats.pages_total == engine.options.max_sequences == 64
    params = SamplingParams(max_new_tokens=40, temperature=0.0)
    [[answer]] = engine.complete([[3]], params)
    assert len(answer.ids) == 40 and engine.stats.preemptions == 0
    recorded = engine._steps._recorded
    assert recorded is not None and recorded._recorded


def test_slots_are_handed_out_once():
    pool = SlotPool(3)
    slots = [pool.allocate(), pool.allocate()]
    assert sorted(slots) == [1, 2] and SCRATCH_SLOT not in slots and pool.num_free == 0
    pool.release(slots[0])
    with pytest.raises(AssertionError, match="given back twice"):
        pool.release(slots[0])
    assert pool.allocate() == slots[0]
