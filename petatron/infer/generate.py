"""Continues one prompt of token ids: the engine (`engine.py`) for a single request.

Every rank calls `generate` and returns the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.parallel.parallel_model import ParallelModel


def generate(
    model: ParallelModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 40,
    top_p: float | None = None,
    seed: int = 0,
    eod: int | None = None,
) -> list[int]:
    """Returns new ids after the prompt: `max_new_tokens` of them, or fewer when `eod` is sampled, which then is the last.

    Temperature 0 is greedy. `top_k` keeps the k most likely ids, and `top_p` then the smallest set of the most likely ones
    whose probability is at least p; None keeps all.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> len(generate(model, [1, 2, 3], max_new_tokens=5))
    5
    """
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=() if eod is None else (eod,),
    )
    length = len(prompt_ids) + max_new_tokens
    engine = Engine(model, options=EngineOptions(max_sequences=model.mesh.dp.size, max_length=length))
    try:
        return engine.complete_on_all_ranks([prompt_ids], params)[0][0].ids
    finally:
        engine.release()
