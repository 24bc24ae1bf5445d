"""What is checked of generation with every layer kind: no schedule, recording, precision or layout changes its tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from tests.dist import RankPool
from tests.unit.infer.test_engine import GREEDY, check_by_hand, exact_model
from tests.unit.infer.test_sample import model_in

PROMPTS = [[5, 17, 90, 3, 3], [1], [2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4, 5, 6, 50]]


def check_asked_twice(kind: str, options: EngineOptions) -> tuple[Engine, list[Completion]]:
    """Assert that an engine's tokens are those of whole sequences, and the same when asked again; returns it and the second answers."""
    flags = f"--fp64 {kind}"
    engine = Engine(exact_model(flags), options=options)
    first = [answer for [answer] in engine.complete(PROMPTS, GREEDY)]
    for answer in first:
        check_by_hand(answer, flags)
    again = [answer for [answer] in engine.complete(PROMPTS, SamplingParams(max_new_tokens=6, temperature=0.0))]
    assert [answer.ids for answer in again] == [answer.ids for answer in first]
    assert engine.stats.pages_used == 0
    return engine, again


def check_recorded(kind: str) -> None:
    """Assert that decode steps are recorded; a recording refuses whatever gives a value to Python, as a CUDA graph would."""
    flags = f"--fp64 {kind}"
    engine = Engine(exact_model(flags), options=EngineOptions(page_size=4))
    params = SamplingParams(max_new_tokens=14, temperature=0.0, logprobs=2, prompt_logprobs=1)
    for [answer] in engine.complete(PROMPTS, params):
        check_by_hand(answer, flags)
    recorded = engine._steps._recorded
    assert recorded is not None and recorded._recorded and recorded._recordable


def check_half_precision(kind: str, *, new_tokens: int) -> None:
    """Assert that the probabilities of a prompt's tokens in bf16 are close to those in float32."""
    narrow, wide = (Engine(model_in(f"{precision} {kind} --init-method-std 0.1")) for precision in ("--bf16", ""))
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, prompt_logprobs=0)
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


def check_layout_answers(ranks: RankPool, layout: str, world_size: int, kind: str) -> None:
    """Assert that ranks of a layout have the tokens and probabilities of one process."""
    alone = answers(f"--fp64 {kind}", 1)
    flags = f"--fp64 --micro-batch-size 1 {kind} {layout}"
    for found in ranks.run(answers, world_size, flags, world_size):
        for (ids, logprobs), (wanted_ids, wanted) in zip(found, alone, strict=True):
            assert ids == wanted_ids and logprobs == pytest.approx(wanted, abs=1e-10)
