"""Generates a continuation of token ids, one sampled token at a time.

Every new token recomputes the whole context; there is no KV cache.

With tensor parallelism every rank calls `generate` and returns the same ids without communication: logits are gathered, and the
same bits, on every rank, and each samples with its own generator of the same seed. Sampling happens on the CPU in float32, so
that it does not depend on the device either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.config.required_settings import known_vocab_size
from petatron.models.stage_module import StageModule
from petatron.parallel.parallel_model import ParallelModel


@torch.no_grad()
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
    _check_layout(model)
    module = model.module
    _check_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    config = model.spec.config
    check_prompt(
        prompt_ids,
        max_new_tokens,
        positions=config.max_position_embeddings,
        vocab_size=known_vocab_size(config),
    )
    module.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        logits = _last_logits(module, ids, tp_size=model.mesh.tp.size, device=model.mesh.device)
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            kept = filter_top_k_top_p(logits / temperature, top_k=top_k, top_p=top_p)
            ids.append(int(torch.multinomial(kept.softmax(-1), 1, generator=generator)))
        if ids[-1] == eod:
            break
    return ids[len(prompt_ids) :]


def filter_top_k_top_p(logits: Tensor, *, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Masks ids that must not be sampled with minus infinity; a tie keeps the smaller id.

    >>> filter_top_k_top_p(torch.tensor([1.0, 3.0, 2.0]), top_k=2).tolist()
    [-inf, 3.0, 2.0]
    """
    values, order = logits.sort(descending=True, stable=True)
    allowed = torch.ones_like(values, dtype=torch.bool)
    if top_k is not None:
        allowed[top_k:] = False
    if top_p is not None:
        shares = values.masked_fill(~allowed, -torch.inf).softmax(-1)
        # An id stays while those before it have not reached p yet, so the most likely one always does.
        allowed &= shares.cumsum(-1) - shares < top_p
    return torch.full_like(logits, -torch.inf).scatter(0, order[allowed], values[allowed])


def _last_logits(module: StageModule, ids: Sequence[int], *, tp_size: int, device: torch.device) -> Tensor:
    # Sequence parallelism needs a length divisible by the ranks. Attention is causal, so any id after the last token will
    # do as padding.
    filled = [*ids, *[0] * (-len(ids) % tp_size)]
    logits = module.logits(torch.tensor([filled], device=device))
    return logits[0, len(ids) - 1].float().cpu()


def _check_layout(model: ParallelModel) -> None:
    problems = [
        Problem(flag, str(axis.size), "splits what generation needs whole", "Load the model with 1; --tp may stay.")
        for flag, axis in (
            ("--pipeline-model-parallel-size", model.mesh.pp),
            ("--context-parallel-size", model.mesh.cp),
        )
        if axis.size > 1
    ]
    if problems:
        raise ConfigError(problems)


def _check_sampling(*, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    problems: list[Problem] = []
    if max_new_tokens < 1:
        problems.append(Problem("max_new_tokens", str(max_new_tokens), "is less than 1", "Ask for one token or more."))
    if not 0 <= temperature < float("inf"):
        problems.append(
            Problem("temperature", str(temperature), "is not 0 or above", "0 is greedy, 1 the model's own.")
        )
    if top_k is not None and top_k < 1:
        problems.append(Problem("top_k", str(top_k), "keeps no id", "Use 1 or more, or None for all."))
    if top_p is not None and not 0 < top_p <= 1:
        problems.append(Problem("top_p", str(top_p), "is not a share", "Use a number above 0 and up to 1, or None."))
    if problems:
        raise ConfigError(problems)


def check_prompt(prompt_ids: Sequence[int], max_new_tokens: int, *, positions: int, vocab_size: int) -> None:
    """Raises `DataError` if a model of so many positions and ids cannot continue a prompt by so many tokens."""
    if not prompt_ids:
        raise DataError("The prompt is empty, and there is nothing to continue. Give at least one token.")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise DataError(
            f"The prompt has ids {min(prompt_ids)}..{max(prompt_ids)}, but the model's vocabulary has {vocab_size} ids. "
            "Encode it with the tokenizer the model was trained with."
        )
    # The last new token is never an input, so it needs no position.
    room = positions + 1 - len(prompt_ids)
    if room < 1:
        raise DataError(
            f"The prompt has {len(prompt_ids)} tokens, but the model has {positions} positions. Shorten the prompt."
        )
    if max_new_tokens > room:
        raise DataError(
            f"A prompt of {len(prompt_ids)} tokens leaves room for {room} new ones in the model's {positions} positions, not "
            f"{max_new_tokens}. Ask for fewer, or shorten the prompt."
        )
