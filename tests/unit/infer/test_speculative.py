"""Speculative decoding: drafts of multi-token prediction change how many tokens a step has, and none of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import Constraint, SamplingParams
from petatron.infer.step.kv_cache_and_states import layer_states
from petatron.layers.attention import AttentionSpec
from petatron.layers.spec.generation_state import PagedState
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.models.mtp_and_longrope_arrays import add_shifted_arrays
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import build_model, build_optimizer
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal, every_second, later, over_nccl
from tests.unit.infer.test_sample import LATENT, MODEL, POSITIONS, VOCAB, model_in

PROMPTS = [[5, 17, 90, 3, 3], [1], [2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4, 5, 6, 50]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.95, top_p_decay=0.98, seed=5, logprobs=1)
PENALISED = SamplingParams(
    max_new_tokens=12, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, stop_ids=(3,), min_new_tokens=4
)
PARAMS = [GREEDY, DRAWN, PENALISED]
EXPERTS = "--num-experts 4 --moe-router-topk 2"
KINDS = {"attention": "", "latent": LATENT, "window": "--window-size 5", "two depths": "--mtp-num-layers 2"}
KINDS |= {
    "hybrid": "--hybrid-layer-pattern *-*-/*-/*- --num-layers 4",
    "repeated": "--mtp-num-layers 2 --mtp-use-repeated-layer",
    "repeated hybrid": "--hybrid-layer-pattern *-*-/-*/-* --num-layers 4 --mtp-use-repeated-layer",
}


def follower(token: int) -> int:
    """What mostly comes after a token of the toy corpus."""
    return (3 * token + 7) % VOCAB


def toy_batch(seed: int) -> Batch:
    """Sequences in which nine of ten tokens follow from the one before."""
    draw = torch.Generator().manual_seed(seed)
    random = torch.randint(VOCAB, (16, POSITIONS + 1), generator=draw)
    surprises = torch.rand(random.shape, generator=draw) < 0.1
    tokens = random.clone()
    for at in range(1, POSITIONS + 1):
        tokens[:, at] = torch.where(surprises[:, at], random[:, at], follower(tokens[:, at - 1]))
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(16, POSITIONS))


@cache
def trained_model(flags: str) -> ParallelModel:
    """A model that knows the toy corpus well, and its depths nearly as well."""
    depth = "" if "/" in flags else "--mtp-num-layers 1"
    words = f"{MODEL} --fp64 {depth} --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.05 {flags}"
    run = load_config(words.split()).config
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), 0))
    optimizer = build_optimizer(run, model)
    for step in range(25):
        batch = add_shifted_arrays(toy_batch(step), depths=run.model.mtp_num_layers or 0)
        model.train_step([batch])
        optimizer.step(lr=1e-2 * min(1, (25 - step) / 12))
    return model


def complete(model: ParallelModel, params: list[SamplingParams], **options: object) -> tuple[list[Completion], Engine]:
    engine = Engine(model, options=EngineOptions(**options))  # type: ignore[arg-type]
    answers = [answer for row in engine.complete(PROMPTS, params) for answer in row]
    assert engine.stats.pages_used == 0 and not engine.has_work
    return answers, engine


def check_equal(found: list[Completion], wanted: list[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.ids, one.text, one.finish_reason, one.stop) == (
            other.ids,
            other.text,
            other.finish_reason,
            other.stop,
        )
        for name in ("logprobs", "prompt_logprobs"):
            pairs = list(zip(getattr(one, name), getattr(other, name), strict=True))
            assert [a.token for a, _ in pairs] == [b.token for _, b in pairs]
            assert [a.logprob for a, _ in pairs] == pytest.approx([b.logprob for _, b in pairs], abs=1e-9)
            assert [[token for token, _ in a.top] for a, _ in pairs] == [
                [token for token, _ in b.top] for _, b in pairs
            ]


@cache
def without_drafts(kind: str) -> list[Completion]:
    return complete(trained_model(KINDS[kind]), PARAMS, page_size=4)[0]


@diagonal(3)
@pytest.mark.parametrize(
    "kind",
    ["attention", "latent", later("window"), "two depths", *map(later, ("hybrid", "repeated")), "repeated hybrid"],
)
@pytest.mark.parametrize("drafts", [later(1), 3])
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 3, "max_step_tokens": 7},
        {"page_size": 1, "max_sequences": 2, "prefix_caching": False},
        {"page_size": 2, "num_pages": 13},
    ],
    ids=["small steps", "tokens as pages", "preemption"],
)
def test_drafts_change_no_token(kind: str, drafts: int, options: dict[str, int]):
    found, engine = complete(trained_model(KINDS[kind]), PARAMS, speculative_tokens=drafts, **options)
    check_equal(found, without_drafts(kind))
    assert (engine.stats.preemptions > 0) == ("num_pages" in options)
    assert engine.stats.accepted_tokens > 0


@diagonal(2)
@pytest.mark.parametrize(("drafts", "least"), [(1, 1.4), (3, 1.8)])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_trained_head_gives_several_tokens_per_step(drafts: int, least: float, params: SamplingParams):
    wanted, _ = complete(trained_model(""), [params], page_size=4)
    found, engine = complete(trained_model(""), [params], page_size=4, speculative_tokens=drafts)
    check_equal(found, wanted)
    stats = engine.stats
    decoded = sum(len(answer.ids) - 1 for answer in found)  # the first token of each is its prefill's
    assert decoded == stats.speculative_decodes + stats.accepted_tokens
    assert stats.tokens_per_decode == pytest.approx(decoded / stats.speculative_decodes)
    assert stats.tokens_per_decode >= least
    assert stats.accepted_tokens <= stats.drafted_tokens


prompts = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=4, deadline=None)
@given(
    prompts=prompts,
    drafts=st.integers(1, 5),
    page_size=st.sampled_from([1, 3, 4, 16]),
    max_step_tokens=st.integers(1, 20),
    max_sequences=st.integers(1, 6),
    spare_pages=st.integers(0, 6),
    kind=st.sampled_from(["attention", "latent", "two depths"]),
    params=st.sampled_from([GREEDY, DRAWN, PENALISED]),
)
def test_nothing_decides_tokens_but_the_request(
    prompts: list[list[int]],
    drafts: int,
    page_size: int,
    max_step_tokens: int,
    max_sequences: int,
    spare_pages: int,
    kind: str,
    params: SamplingParams,
):
    model, num_pages = trained_model(KINDS[kind]), -(-(POSITIONS + 1) // page_size) + spare_pages
    sizes = EngineOptions(page_size=page_size, num_pages=num_pages, max_step_tokens=max_step_tokens)
    sizes = replace(sizes, max_sequences=max_sequences, speculative_tokens=drafts)
    plain, drafting = Engine(model, options=EngineOptions()), Engine(model, options=sizes)
    wanted, found = ([answer for [answer] in engine.complete(prompts, params)] for engine in (plain, drafting))
    check_equal(found, wanted)
    assert drafting.stats.pages_used == 0


def drafts_by_hand(model: ParallelModel, ids: list[int], count: int) -> list[int]:
    """What the depths predict after some ids, of whole sequences and without pages; every draft by a depth of its own."""
    decoder = model.module.eval()
    assert isinstance(decoder, Decoder) and decoder.head is not None
    found: list[int] = []
    with torch.no_grad():
        known = torch.tensor([ids[:-1]])
        x_SBD = model.forward([Batch(known)], collect=["hidden_states"])[0]["hidden_states"].transpose(0, 1)
        for depth in range(1, count + 1):
            ahead = torch.tensor([[*ids, *found][depth : depth + known.shape[1]]])
            embedding = decoder._embed(ahead, decoder._positions(Batch(ahead)))
            context = decoder._context(Batch(known), x_SBD)
            x_SBD = decoder._run_depth(depth, x_SBD, embedding, context)
            found.append(int(decoder._logits(x_SBD)[0, -1].argmax()))
    return found


@diagonal(2)
@pytest.mark.parametrize("kind", ["attention", "latent", "two depths", "hybrid", "repeated", "repeated hybrid"])
@pytest.mark.parametrize("trained", [True, False], ids=["accepted", "rejected"])
def test_drafts_are_those_of_the_whole_sequence(kind: str, trained: bool):
    """Pages of the depths hold what training computes: of prompts in chunks, after accepted drafts and after rejected ones."""
    model = (
        trained_model(KINDS[kind])
        if trained
        else model_in(f"--fp64 {KINDS[kind]}" if "/" in KINDS[kind] else f"--fp64 --mtp-num-layers 1 {KINDS[kind]}")
    )
    depths = model.spec.config.mtp_num_layers or 0
    engine = Engine(model, options=EngineOptions(speculative_tokens=depths, page_size=3, max_step_tokens=5))
    request = engine.submit([2, 9, 77, 5, 6, 7, 8, 30], replace(GREEDY, max_new_tokens=14, prompt_logprobs=None))
    compared = 0
    while engine.has_work:
        engine.step()
        sequence = engine._requests.sequences[request]
        if len(sequence.drafts) == depths:
            assert sequence.drafts == drafts_by_hand(model, sequence.tokens, depths)
            compared += 1
    stats = engine.stats
    assert compared >= 2 and (stats.accepted_tokens > stats.drafted_tokens / 2) == trained


def test_steps_with_drafts_are_recorded():
    engine = complete(trained_model(""), [GREEDY], speculative_tokens=1, page_size=4)[1]
    for _ in range(3):
        engine.complete([[5, 17, 90]], replace(GREEDY, prompt_logprobs=None))
    depths = engine._steps._recorded_depths
    assert engine._steps._recorded is not None and depths is not None
    for recorded in (engine._steps._recorded, depths._recorded[1]):
        assert recorded._recorded and recorded._recordable
    before = engine.complete([[5, 17, 90]], GREEDY)
    engine.forget_prefixes()
    assert not depths._recorded and engine.complete([[5, 17, 90]], GREEDY)[0][0].ids == before[0][0].ids


def test_ends_within_accepted_drafts():
    """A stop text, a stop id, and the last token that was asked for may come before an accepted draft."""
    model = trained_model("--vocab-size 257")
    ids = [60]
    for _ in range(14):
        ids.append(follower(ids[-1]))
    for params in (
        SamplingParams(max_new_tokens=16, temperature=0.0, stop_ids=(ids[6],)),
        SamplingParams(max_new_tokens=16, temperature=0.0, stop_strings=(ByteTokenizer().decode([ids[5], ids[6]]),)),
        *(SamplingParams(max_new_tokens=count, temperature=0.0) for count in range(4)),
    ):
        plain, drafting = (
            Engine(model, ByteTokenizer(), EngineOptions(page_size=4, speculative_tokens=count)) for count in (0, 3)
        )
        [[wanted]], events = plain.complete([ids[:3]], params), []
        [[found]] = drafting.complete([ids[:3]], params, on_event=events.append)
        check_equal([found], [wanted])
        assert "".join(event.text for event in events) == wanted.text
        assert [event.token for event in events if event.token is not None] == wanted.ids
        assert drafting.stats.pages_used == 0 and drafting.stats.generated_tokens == len(wanted.ids)


@diagonal(2)
@pytest.mark.parametrize("regex", every_second(["(ab|c)*d", "a{9}", "aaé", "a{3}", "[a-m]*", "[^q]{4,20}"]))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_is_kept(regex: str, temperature: float):
    """It may leave one token at a time, end within the drafts, leave the model free, or ask for what has no token."""
    pytest.importorskip("llguidance")
    model = trained_model("--vocab-size 257")
    params = SamplingParams(
        max_new_tokens=12, temperature=temperature, logprobs=1, constraint=Constraint(kind="regex", grammar=regex)
    )
    engines = [Engine(model, ByteTokenizer(), EngineOptions(speculative_tokens=count, page_size=4)) for count in (0, 3)]
    wanted, found = ([answer for [answer] in engine.complete([[97, 98], [5]], params)] for engine in engines)
    check_equal(found, wanted)
    assert engines[1].stats.pages_used == 0
    if regex == "a{9}":
        assert engines[1].stats.tokens_per_decode > 2, "all that may follow is drafted"


def test_depths_take_pages_only_if_they_draft():
    model = trained_model("--mtp-num-layers 2")
    assert [set(layer_states(model, PagedState, depths=count)) for count in (0, 1, 5)] == [
        {0, 1},
        {0, 1, 2},
        {0, 1, 2, 3},
    ]


def answers(flags: str, world_size: int) -> tuple[list[tuple[list[int], list[float]]], int]:
    """Runs on every rank; most drafts of these random weights are wrong, and some of a few hundred are right."""
    torch.set_num_threads(1)
    assert world_size == 1 or dist.get_world_size() >= world_size
    model = model_in(flags, world_size=world_size)
    engine = Engine(model, options=EngineOptions(page_size=4, max_step_tokens=9, speculative_tokens=3))
    several = [[number, 3, number + 1] for number in range(0, 20, 5)]
    found = engine.complete_on_all_ranks(several, [GREEDY, replace(DRAWN, top_k=2)])
    accepted = engine.stats.accepted_tokens
    engine.release()
    rows = [(answer.ids, [each.logprob for each in answer.logprobs]) for row in found for answer in row]
    return rows, accepted


LAYOUTS = [
    later("--tp 2", 2, "", nccl=True),
    over_nccl("--tp 2 --sequence-parallel", 2, f"{LATENT} --mtp-num-layers 2"),
    later("--dp 2", 2, ""),
    over_nccl("--ep 2 --dp 2", 2, EXPERTS),
    later("--tp 2 --sequence-parallel", 2, ""),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, ""),
    later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, f"{LATENT} {EXPERTS}"),
]


@diagonal(2)
@pytest.mark.parametrize(("layout", "world_size", "model"), LAYOUTS)
def test_every_layout_drafts_alike(ranks: RankPool, layout: str, world_size: int, model: str):
    flags = f"--fp64 --mtp-num-layers 1 {model} --vocab-size 24"
    alone, _ = answers(flags, 1)
    everywhere = ranks.run(answers, world_size, f"{flags} --micro-batch-size 1 {layout}", world_size)
    assert len({accepted for _, accepted in everywhere}) == 1
    for found, accepted in everywhere:
        assert accepted > 0
        for (ids, logprobs), (wanted_ids, wanted) in zip(found, alone, strict=True):
            assert ids == wanted_ids and logprobs == pytest.approx(wanted, abs=1e-10)


def refusal(model: ParallelModel, drafts: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        Engine(model, options=EngineOptions(speculative_tokens=drafts))
    return str(caught.value)


def test_a_model_without_depths_is_refused():
    assert "--speculative-tokens 2 drafts with multi-token prediction" in refusal(model_in())
    assert "--speculative-tokens -1 is below 0" in refusal(model_in("--mtp-num-layers 1"), -1)


def test_recurrent_layers_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = model_in("--mtp-num-layers 1")
    monkeypatch.setattr(AttentionSpec, "generation_state", lambda self, tp: object())
    assert "recurrent layers cannot" in refusal(model)


def refusal_of_pipeline(flags: str) -> str:
    return refusal(model_in(flags, world_size=2))


def test_pipeline_stages_are_refused(ranks: RankPool):
    for text in ranks.run(refusal_of_pipeline, 2, "--mtp-num-layers 1 --pp 2"):
        assert "--speculative-tokens 2 needs embedding and output head on one stage" in text
