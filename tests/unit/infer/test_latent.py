"""Generation with latent attention: pages hold latents and rotary keys, and every token is that of the whole sequence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.step.kv_cache_and_states import layer_states
from petatron.kernels.attention.paged_latent_attention import LatentUpProjection
from petatron.layers.mla import MlaSpec
from petatron.layers.spec.generation_state import PagedState
from petatron.models.decoder import Decoder
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal, later, over_nccl
from tests.unit.infer.layer_kind_checks import (
    PROMPTS,
    check_asked_twice,
    check_half_precision,
    check_layout_answers,
    check_recorded,
)
from tests.unit.infer.test_engine import GREEDY, exact_model
from tests.unit.infer.test_fp8_weights import weights_of
from tests.unit.infer.test_sample import LATENT, LATENT_YARN, model_in

EXPERTS = "--num-experts 4 --moe-router-topk 2"
KINDS = [LATENT, LATENT_YARN, f"--window-size 5 {LATENT}"]


def test_the_up_projections_are_absorbed_exactly():
    """Scores and outputs through latents are those of keys and values that heads have themselves."""
    draw = torch.Generator().manual_seed(1)
    heads, nope, rotary, latent, value, tokens = 3, 6, 4, 5, 7, 11
    weight, c, r, q = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in (
            (heads * (nope + value), latent),
            (tokens, latent),
            (tokens, rotary),
            (tokens, heads, nope + rotary),
        )
    )
    up = LatentUpProjection.of(weight, nope_dim=nope, v_dim=value)
    k, v = up.keys_and_values(c, r)
    absorbed = torch.einsum("thk,sk->hts", torch.cat(up.absorb(q), dim=-1), torch.cat((c, r), dim=-1))
    torch.testing.assert_close(absorbed, torch.einsum("the,she->hts", q, k), rtol=0, atol=1e-12)
    weights = absorbed.softmax(-1)
    mixed = torch.einsum("hts,sc->thc", weights, c)
    torch.testing.assert_close(up.values(mixed), torch.einsum("hts,shv->thv", weights, v), rtol=0, atol=1e-12)


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
    """In bf16 on a CPU the absorbed GEMMs are widened."""
    check_half_precision(LATENT, new_tokens=1)


LAYOUTS = [
    over_nccl("--tp 2 --sequence-parallel", 2, LATENT),
    ("--tp 2 --pp 2", 4, LATENT_YARN),
    later("--tp 2", 2, LATENT_YARN),
    later("--pp 2", 2, LATENT),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, LATENT),
    over_nccl("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, f"{LATENT} {EXPERTS}"),
]


@diagonal(3)
@pytest.mark.parametrize(("layout", "world_size", "model"), LAYOUTS)
def test_every_layout_continues_alike(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout_answers(ranks, layout, world_size, model)


def test_fp8_weights_leave_the_absorbed_ones_as_they_are():
    model = model_in(f"--fp64 {LATENT}")
    before, options = weights_of(model), EngineOptions(fp8_weights=True, page_size=4, max_step_tokens=7)
    engine = Engine(model, options=options)
    found = engine.complete(PROMPTS, GREEDY)
    engine.release()
    after = weights_of(model)
    changed = {name.split(".", 2)[-1] for name in before if not torch.equal(before[name], after[name])}
    of_layers = {f"{name}.weight" for name in ("attention.q_up", "attention.out", "mlp.gate_up", "mlp.down")}
    assert changed == of_layers | {"weight"}, "and the output head's"
    for row, true in zip(found, Engine(model).complete(PROMPTS, GREEDY), strict=True):
        logprobs = [[each.logprob for each in answer.logprobs] for [answer] in (row, true)]
        assert row[0].ids == true[0].ids and logprobs[0] == pytest.approx(logprobs[1], abs=1e-10)


def test_pages_hold_the_latent_and_the_rotary_key():
    states = layer_states(exact_model(f"--fp64 {LATENT}"), PagedState)
    assert {state.rows for state in states.values()} == {(("latent", (12,)), ("rope_key", (4,)))}
    decoder = exact_model(f"--fp64 {LATENT}").module
    assert isinstance(decoder, Decoder) and set(states) == {0, 1}


def test_the_page_shows_the_saving():
    """The figures of docs/mla.md are those of the spec of DeepSeek-V3."""
    flags = (
        "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --seq-length 4096 --vocab-size 129280 --mock-data "
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --position-embedding-type rope --lr 1 --train-iters 1"
    )
    layers = model_spec(load_config(flags.split()).config).layers
    latent = heads = 0
    for layer in layers:
        attention = layer.branches[0]
        assert isinstance(attention, MlaSpec)
        state = attention.generation_state(tp=1)
        assert state is not None
        latent += state.elements_per_token * torch.bfloat16.itemsize
        heads += attention.num_heads * (attention.qk_dim + attention.v_dim) * torch.bfloat16.itemsize
    text = (Path(__file__).parents[3] / "docs" / "mla.md").read_text()
    [row] = re.findall(r"\| all 61 layers \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|", text)
    assert row == (f"{heads:,}", f"{latent:,}", f"{heads / latent:.1f}")
