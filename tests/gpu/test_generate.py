"""Generation on a CUDA device: graphs, run-ahead and the Triton kernel change no token."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.step import prompt_cuda_graphs
from petatron.models.decoder import Decoder
from tests.unit.infer.test_recurrent import DELTA, HYBRID, KIMI, LIGHTNING, MAMBA
from tests.unit.infer.test_sample import LATENT, POSITIONS, VOCAB, model_in

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[5, 17, 90, 3, 3], [1], [2, 3, 4, 5, 6, 7, 8, 9], [VOCAB - 1] * 12, [2, 3, 4, 5, 9], [7, 8]]


@cache
def model(flags: str = ""):
    return model_in(f"--device cuda {flags}", device="cuda")


def answers(params: SamplingParams, flags: str = "", **options: int | bool) -> list[Completion]:
    engine = Engine(model(flags), options=EngineOptions(page_size=4, max_step_tokens=16, **options))  # type: ignore[arg-type]
    found = [answer for [answer] in engine.complete(PROMPTS, params)]
    assert engine.stats.pages_used == 0
    return found


KINDS = ["", "--window-size 5", "--num-query-groups 2 --group-query-attention", LATENT, "--fp64"]
RECURRENT = [
    f"--fp64 {MAMBA}",
    f"--fp64 {HYBRID}",
    f"--no-compile {HYBRID}",
    f"--fp64 {DELTA}",
    f"--no-compile {DELTA}",
    f"--fp64 {KIMI}",
    f"--no-compile {KIMI}",
    f"--fp64 {LIGHTNING}",
    f"--no-compile {LIGHTNING}",
]


@pytest.mark.parametrize("flags", [*KINDS, *RECURRENT])
def test_graphs_find_the_tokens_of_the_whole_pass(flags: str):
    for answer in answers(SamplingParams(max_new_tokens=9, temperature=0.0), flags, max_sequences=4):
        ids = [*answer.prompt_ids, *answer.ids]
        decoder = model(flags).module.eval()
        assert isinstance(decoder, Decoder)
        with torch.no_grad():
            rows = decoder.logits(torch.tensor([ids[:-1]], device="cuda"))[0, len(answer.prompt_ids) - 1 :]
        assert rows.argmax(-1).tolist() == answer.ids


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=9, temperature=1.2, seed=4),
        SamplingParams(max_new_tokens=9, temperature=0.9, top_k=7, top_p=0.8, seed=1),
        SamplingParams(max_new_tokens=9, temperature=1.0, repetition_penalty=1.5, min_new_tokens=3, stop_ids=(5, 6, 7)),
        SamplingParams(max_new_tokens=9, temperature=0.0, stop_ids=tuple(range(40))),
        SamplingParams(max_new_tokens=9, temperature=0.0, logprobs=2),
        SamplingParams(max_new_tokens=9, temperature=0.8, seed=2, logprobs=0, policy_logprobs=True),
        SamplingParams(max_new_tokens=9, temperature=0.8, seed=2, logprobs=0, policy_logprobs=True, top_k=9),
        SamplingParams(max_new_tokens=9, temperature=1.2, seed=3, logprobs=0),
    ],
)
@pytest.mark.parametrize("flags", ["", f"--fp64 {HYBRID}"])
def test_graphs_and_run_ahead_change_no_draw(params: SamplingParams, flags: str):
    plain, graphed, alone, few = (
        answers(params, flags, **options)
        for options in (
            {"cuda_graphs": False},
            {},
            {"max_sequences": 1},
            {"max_sequences": 3, "num_pages": -(-(POSITIONS + 1) // 4) + 1},
        )
    )
    for others in (graphed, alone, few):
        assert [(each.ids, each.finish_reason) for each in others] == [(each.ids, each.finish_reason) for each in plain]
        for ours, other in zip(others, plain):
            for logprob, expected in zip(ours.logprobs, other.logprobs, strict=True):
                tolerance = 1e-9 if "--fp64" in flags else 1e-4
                assert logprob.token == expected.token
                assert (logprob.logprob, logprob.kept_mass) == pytest.approx(tuple(expected[1::2]), abs=tolerance)


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 4 --moe-router-topk 2",
        "--num-experts 8 --moe-router-topk 3 --moe-shared-expert-intermediate-size 16 --moe-layer-freq ([0]*1+[1]*1)",
        "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --add-bias-linear",
    ],
)
def test_experts_are_in_the_graphs(flags: str):
    flags = f"--bf16 --no-compile {flags}"
    engine = Engine(model(flags), options=EngineOptions(page_size=4, max_sequences=4))
    counts: list[int] = []
    engine.capture_graphs(lambda done, total: counts.append(done))
    assert counts, "a step of this model is a graph"
    engine.close()
    params = SamplingParams(max_new_tokens=9, temperature=0.0, logprobs=1)
    graphed, eager = (answers(params, flags, max_sequences=4, cuda_graphs=graphs) for graphs in (True, False))
    assert [each.ids for each in graphed] == [each.ids for each in eager]


@pytest.mark.parametrize("flags", ["", "--bf16 --moe-expert-capacity-factor 2", "--bf16 --no-moe-grouped-gemm"])
def test_experts_whose_rows_the_host_must_know_are_not_in_graphs(flags: str):
    flags = f"--no-compile --num-experts 4 --moe-router-topk 2 {flags}"
    engine = Engine(model(flags), options=EngineOptions(page_size=4, max_sequences=4))
    captured: list[int] = []
    engine.capture_graphs(lambda done, total: captured.append(done))
    engine.close()
    assert not captured


@pytest.mark.parametrize("flags", ["", "--window-size 5", LATENT, "--fp64"])
@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=9, temperature=0.0),
        SamplingParams(max_new_tokens=9, temperature=0.9, top_k=2, seed=1),
    ],
    ids=["greedy", "drawn"],
)
def test_drafts_change_no_token(flags: str, drafts: int, params: SamplingParams):
    """Rows of one sequence are in one graph: all are stored before one attends."""
    depths = f"--mtp-num-layers 1 {flags}"
    plain, graphed, eager = (
        [each.ids for each in answers(params, depths, **options)]
        for options in ({}, {"speculative_tokens": drafts}, {"speculative_tokens": drafts, "cuda_graphs": False})
    )
    assert graphed == plain and eager == plain


def test_graphs_may_be_captured_beforehand():
    params = SamplingParams(max_new_tokens=9, temperature=0.0)
    engine = Engine(model(), options=EngineOptions(page_size=4, max_sequences=3))
    counts: list[tuple[int, int]] = []
    engine.capture_graphs(lambda done, total: counts.append((done, total)))
    assert counts[:1] + counts[-1:] == [(1, len(counts)), (len(counts), len(counts))]
    assert len(counts) > 3, "of one, two and three sequences, and of prompts"
    wanted = {tuple(each.prompt_ids): each.ids for each in answers(params)}
    for prompt, ids in wanted.items():
        assert engine.complete([list(prompt)], params)[0][0].ids == ids


@pytest.mark.parametrize("flags", [*KINDS[:3], "--bf16", "--bf16 --no-compile --num-experts 4 --moe-router-topk 2"])
def test_prompts_in_graphs_change_no_token(flags: str, monkeypatch: pytest.MonkeyPatch):
    """Prompts that begin, go on after a shared beginning, and are cut into chunks, beside tokens that decode."""
    monkeypatch.setattr(prompt_cuda_graphs, "_FIRST_STEPS", 0)
    prompts = [[*PROMPTS[2], *prompt] for prompt in PROMPTS] + PROMPTS
    params = [
        SamplingParams(max_new_tokens=4, temperature=0.0),
        SamplingParams(max_new_tokens=4, temperature=0.8, seed=2),
    ]
    found = []
    for graphs in (True, False):
        options = EngineOptions(page_size=4, max_step_tokens=24, max_sequences=5, cuda_graphs=graphs)
        engine = Engine(model(flags), options=options)
        found.append([[each.ids for each in row] for row in engine.complete(prompts, params)])
        captured = engine._steps._prompt_graphs  # pyright: ignore[reportPrivateUsage]
        assert (captured is not None and len(captured._captured) > 1) == graphs  # pyright: ignore[reportPrivateUsage]
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("flags", ["", f"--fp64 {HYBRID}"])
def test_requests_that_come_and_go_while_a_step_is_ahead(flags: str):
    params = SamplingParams(max_new_tokens=9, temperature=0.0)
    wanted = {tuple(each.prompt_ids): each.ids for each in answers(params, flags)}
    engine = Engine(model(flags), options=EngineOptions(page_size=4, max_sequences=3))
    numbers = [engine.submit(PROMPTS[0], params)]
    for step in range(60):
        if step in (2, 3, 5, 8, 9):
            numbers.append(engine.submit(PROMPTS[len(numbers)], params))
        if step == 4:
            engine.cancel(numbers[1])
        engine.step()
    assert not engine.has_work and engine.stats.pages_used == 0
    for number in (0, 2, 3, 4, 5):
        answer = engine.take(numbers[number])
        assert answer.ids == wanted[tuple(answer.prompt_ids)]
    assert engine.take(numbers[1]).finish_reason == "cancelled"


@pytest.mark.parametrize("flags", ["", f"--fp64 {HYBRID}"])
def test_a_cache_that_was_given_back_is_at_its_addresses_again(flags: str):
    """Graphs stay, tokens are those of a cache that stayed, and the memory is free in between."""
    params = SamplingParams(max_new_tokens=9, temperature=0.9, seed=3)
    options = EngineOptions(page_size=4, num_pages=1 << 15, releasable_cache=True)
    engine = Engine(model(flags), options=options)
    before = [answer.ids for [answer] in engine.complete(PROMPTS, params)]
    graphs = dict(engine._steps.graphs._captured)  # type: ignore[union-attr]
    taken = torch.cuda.mem_get_info()[0]
    engine.pause()
    freed = torch.cuda.mem_get_info()[0] - taken
    [pages, *_] = [pages for layer in engine._steps._pages.values() for pages in layer.values()]
    assert freed >= pages.nbytes * sum(len(layer) for layer in engine._steps._pages.values()) > 1 << 22
    filler = torch.full((freed // 8,), 7.0, device="cuda")
    del filler
    torch.cuda.empty_cache()
    engine.resume()
    assert pages.count_nonzero() == 0
    assert [answer.ids for [answer] in engine.complete(PROMPTS, params)] == before
    assert graphs and all(engine._steps.graphs._captured[size] is step for size, step in graphs.items())  # type: ignore[union-attr]
    engine.release()


def test_a_cache_is_not_taken_again_where_memory_is_not_free():
    engine = Engine(model(""), options=EngineOptions(page_size=4, num_pages=1 << 15, releasable_cache=True))
    engine.complete(PROMPTS, SamplingParams(max_new_tokens=2))
    size = sum(pages.nbytes for layer in engine._steps._pages.values() for pages in layer.values())
    engine.pause()
    torch.cuda.empty_cache()
    filler = torch.empty(torch.cuda.mem_get_info()[0] - size // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="bytes are not free"):
        engine.resume()
    del filler
    torch.cuda.empty_cache()
    engine.resume()
    engine.release()
