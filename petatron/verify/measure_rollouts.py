"""Compares the log-probabilities that an engine records of the tokens it draws with those that training computes for the same tokens.

Every case draws the same prompts, in batches of another size, whole or in chunks, and gives prompts and answers to the trainer's forward
pass packed into rows, in another order each time. Draws are a function of (seed, sample, position), so cases differ in nothing else.

The estimate of the divergence is k3 (Schulman): with d = trained - recorded, the mean of exp(d) - 1 - d, which is never negative.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.batch_invariant.attention import KEY_TILE
from petatron.kernels.policy_log_probs import policy_log_probs
from petatron.layers.attention import Attention
from petatron.layers.mla import MultiLatentAttention
from petatron.mesh import collectives
from petatron.models.batch import Batch
from petatron.parallel.parallel_model import ParallelModel

_WITH_PAGES = (Attention, MultiLatentAttention)
DRAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
)
"""How every prompt is continued: greedy, from the model's distribution, and from a part of a sharper one."""


@dataclass(frozen=True, slots=True)
class RolloutCase:
    """So many sequences at once, with prompts in chunks of at most so many tokens; None: whole."""

    batch: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What a case found: how many log-probabilities differ, by how much, and the seconds of drawing and of the forward passes."""

    case: RolloutCase
    tokens: int
    differing: int
    largest: float
    mean: float
    k3: float
    draw_s: float
    forward_s: float


def random_prompts(count: int, *, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Returns prompts of random ids, of 1 to `longest` tokens; a fifth begin as the one before does, so that pages are found again."""
    chosen = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        prompt = [chosen.randrange(vocab_size) for _ in range(chosen.randint(1, longest))]
        if number % 5 == 4:
            prompt = [*prompts[-1], *prompt][:longest]
        prompts.append(prompt)
    return prompts


def measure_rollouts(
    model: ParallelModel,
    prompts: Sequence[Sequence[int]],
    cases: Sequence[RolloutCase],
    *,
    new_tokens: int,
    row_tokens: int,
    key_tile: int = KEY_TILE,
) -> Iterator[RolloutResult]:
    """Yields the result of each case, the same on every rank.

    `row_tokens`: of the rows that training packs answers into. `key_tile`: of attention in the engine, to plant a difference.
    """
    params = [replace(draw, max_new_tokens=new_tokens, logprobs=0, policy_logprobs=True) for draw in DRAWS]
    for number, case in enumerate(cases):
        begin = time.perf_counter()
        answers = _draw(model, prompts, params, case, key_tile=key_tile)
        drawn = time.perf_counter()
        order = random.Random(number).sample(answers, len(answers))
        pairs = list(_trained(model, order, row_tokens=row_tokens))
        forward = time.perf_counter() - drawn
        yield _summarize(model, case, pairs, draw_s=drawn - begin, forward_s=forward)


def _draw(
    model: ParallelModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    case: RolloutCase,
    *,
    key_tile: int,
) -> list[tuple[Completion, float]]:
    """Returns the answers with their temperatures."""
    options = EngineOptions(max_sequences=case.batch, exact=model.batch_invariant)
    if case.chunk is not None:
        options = replace(options, max_step_tokens=case.batch + case.chunk)
    with _attention_with_tile(model, key_tile):
        engine = Engine(model, options=options)
        try:
            answers = engine.complete_on_all_ranks(prompts, params)
        finally:
            engine.release()
    return [(answer, draw.temperature) for row in answers for answer, draw in zip(row, params, strict=True)]


@contextmanager
def _attention_with_tile(model: ParallelModel, key_tile: int) -> Iterator[None]:
    """Makes attention over pages of a batch-invariant model merge tiles of another size, which gives other bits."""
    modules = [module for stage in model.stages.values() for module in stage.modules()]
    changed: list[tuple[Any, Any]] = [
        (module, module.attend_to_pages) for module in modules if isinstance(module, _WITH_PAGES)
    ]
    for module, attend in changed if key_tile != KEY_TILE else ():
        module.attend_to_pages = replace(attend.__self__, key_tile=key_tile).over_pages
    try:
        yield
    finally:
        for module, attend in changed:
            module.attend_to_pages = attend


def _trained(
    model: ParallelModel, answers: Sequence[tuple[Completion, float]], *, row_tokens: int
) -> Iterator[tuple[float, float]]:
    """Yields the recorded and the trained log-probability of every new token, on ranks with the last stage."""
    multiple = model.mesh.tp.size if model.sequence_parallel else 1
    for row in _pack(answers, row_tokens):
        sequences = [[*answer.prompt_ids, *answer.ids] for answer, _ in row]
        ends = list(accumulate(map(len, sequences)))
        padding = -ends[-1] % multiple
        sequences += [[0] * padding] if padding else []
        starts = np.repeat([0, *ends][: len(sequences)], list(map(len, sequences)))
        tokens = torch.tensor([list(chain(*sequences))], device=model.mesh.device)
        positions = torch.tensor([list(chain(*(range(len(x)) for x in sequences)))], device=model.mesh.device)
        documents = Documents.build(starts[None].astype(np.int64)).to(model.mesh.device)
        batch = Batch(tokens, positions=positions, documents=documents)
        [outputs] = model.forward([batch], collect=["logits"])
        if "logits" not in outputs:
            continue
        temperatures = torch.ones(tokens.shape, dtype=torch.float64)
        for (answer, temperature), end in zip(row, ends):
            temperatures[0, end - len(answer.ids) - 1 : end] = temperature
        trained = policy_log_probs(outputs["logits"], tokens.roll(-1, dims=1), temperatures)[0].tolist()
        for (answer, _), end in zip(row, ends):
            first = end - len(answer.ids) - 1
            yield from ((x.logprob, y) for x, y in zip(answer.logprobs, trained[first:], strict=False))


def _pack(answers: Sequence[tuple[Completion, float]], row_tokens: int) -> Iterator[list[tuple[Completion, float]]]:
    row, length = [], 0
    for answer in answers:
        size = len(answer[0].prompt_ids) + len(answer[0].ids)
        if row and length + size > row_tokens:
            yield row
            row, length = [], 0
        row.append(answer)
        length += size
    if row:
        yield row


def _summarize(
    model: ParallelModel, case: RolloutCase, pairs: Sequence[tuple[float, float]], *, draw_s: float, forward_s: float
) -> RolloutResult:
    """Shares what ranks with the last stage found, which all of them found alike, with the others."""
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    apart = values[:, 1] - values[:, 0]
    statistics = [0.0] * 5
    if len(apart):
        k3 = float(np.mean(np.expm1(apart) - apart))
        sizes = np.abs(apart)
        statistics = [float(len(apart)), float((apart != 0.0).sum()), float(sizes.max()), float(sizes.mean()), k3]
    numbers = torch.tensor([*statistics, draw_s, forward_s], dtype=torch.float64)
    tokens, differing, *others = collectives.all_reduce(numbers, model.mesh.control, op="max").tolist()
    return RolloutResult(case, int(tokens), int(differing), *others)
