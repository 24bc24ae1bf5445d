"""Counts of tokens in answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petatron.infer.completion import Completion


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, Any]:
    new = sum(len(one.ids) for one in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in completions)},
    }
