"""What a request costs beyond its own sequences: the numbers that it has reported, which pass through everybody's steps and streams.

A few thousand bytes may ask for a hundred alternatives of every token of hundreds of prompts: gigabytes to compute, to carry and to write.
"""

from __future__ import annotations

from collections.abc import Sequence

from petatron.serve.generation import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.serve_options import ServeLimits


def reported_logprobs(generations: Sequence[Generation]) -> int:
    """Returns how many log-probabilities the answers have at most."""
    total = 0
    for generation in generations:
        params = generation.params
        if params.logprobs is not None:
            total += params.max_new_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            total += len(generation.prompt_ids) * (1 + params.prompt_logprobs)
    return total


def check_cost(generations: Sequence[Generation], limits: ServeLimits) -> None:
    asked = reported_logprobs(generations)
    if asked > limits.max_logprobs:
        text = (
            f"The request asks for {asked} log-probabilities (tokens x alternatives x sequences), more than the "
            f"{limits.max_logprobs} that this server reports to one. Ask for fewer alternatives or tokens, or in several requests."
        )
        raise ApiError(400, text, param="logprobs", code="too_costly")
