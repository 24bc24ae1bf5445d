"""Generation with latent attention: pages hold latents and rotary keys, and every token is that of the whole sequence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.config import load_config
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.step.layer_states import layer_states
from petatron.kernels.attention.paged_latent import LatentUpProjection
from petatron.layers.mla import MlaSpec
from petatron.layers.spec.generation_state import PagedState
from petatron.models.decoder import Decoder
from petatron.models.registry import model_spec
from tests.dist import RankPool
from tests.longform import later, over_nccl
from tests.unit.infer.test_engine import GREEDY, check_by_hand, exact_model
from tests.unit.infer.test_fp8_weights import weights_of
from tests.unit.infer.test_sample import LATENT, LATENT_YARN, model_in

PROMPTS = [[5, 17, 90, 3, 3], [1], [2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4, 5, 6, 50]]
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
    flags = f"--fp64 {kind}"
    engine = Engine(exact_model(flags), options=options)
    first = [answer for [answer] in engine.complete(PROMPTS, GREEDY)]
    for answer in first:
        check_by_hand(answer, flags)
    again = [answer for [answer] in engine.complete(PROMPTS, SamplingParams(max_new_tokens=6, temperature=0.0))]
    assert [answer.ids for answer in again] == [answer.ids for answer in first]
    assert any(answer.cached_tokens for answer in again) == options.prefix_caching
    assert engine.stats.pages_used == 0
    assert (engine.stats.preemptions > 0) == (options.num_pages is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_are_recorded(kind: str):
    """A recording refuses whatever gives a value to Python, as a CUDA graph would."""
    flags = f"--fp64 {kind}"
    engine = Engine(exact_model(flags), options=EngineOptions(page_size=4))
    params = SamplingParams(max_new_tokens=14, temperature=0.0, logprobs=2, prompt_logprobs=1)
    for [answer] in engine.complete(PROMPTS, params):
        check_by_hand(answer, flags)
    recorded = engine._steps._recorded
    assert recorded is not None and recorded._recorded and recorded._recordable


def test_half_precision_follows_float32():
    """In bf16 on a CPU the absorbed GEMMs are widened; the first tokens' probabilities stay close."""
    narrow, wide = (Engine(model_in(f"{precision} {LATENT} --init-method-std 0.1")) for precision in ("--bf16", ""))
    params = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=0)
    for one, other in zip(narrow.complete(PROMPTS, params), wide.complete(PROMPTS, params), strict=True):
        found, wanted = ([each.logprob for each in row[0].prompt_logprobs] for row in (one, other))
        assert found == pytest.approx(wanted, abs=0.05)


def answers(flags: str, world_size: int) -> list[tuple[list[int], list[float]]]:
    """Runs on every rank."""
    torch.set_num_threads(1)
    assert world_size == 1 or dist.get_world_size() >= world_size
    engine = Engine(model_in(flags, world_size=world_size), options=EngineOptions(page_size=4, max_step_tokens=7))
    found = engine.complete_on_all_ranks(PROMPTS, GREEDY)
    engine.release()
    return [(answer.ids, [each.logprob for each in answer.logprobs]) for [answer] in found]


LAYOUTS = [
    over_nccl("--tp 2 --sequence-parallel", 2, LATENT),
    ("--tp 2 --pp 2", 4, LATENT_YARN),
    later("--tp 2", 2, LATENT_YARN),
    later("--pp 2", 2, LATENT),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, LATENT),
    over_nccl("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, f"{LATENT} {EXPERTS}"),
]


@pytest.mark.parametrize(("layout", "world_size", "model"), LAYOUTS)
def test_every_layout_continues_alike(ranks: RankPool, layout: str, world_size: int, model: str):
    alone = answers(f"--fp64 {model}", 1)
    flags = f"--fp64 --micro-batch-size 1 {model} {layout}"
    for found in ranks.run(answers, world_size, flags, world_size):
        for (ids, logprobs), (wanted_ids, wanted) in zip(found, alone, strict=True):
            assert ids == wanted_ids and logprobs == pytest.approx(wanted, abs=1e-10)


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
