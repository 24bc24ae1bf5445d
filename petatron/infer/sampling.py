"""Draws the next token of many sequences at once, each by its own parameters.

A draw is a function of (seed, sample, position): one uniform number, and the first id at which the cumulative probability exceeds it.
So neither the other rows of the batch nor the number of draws before change it.

R rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from petatron.infer.engine_outputs import TokenLogprob
from petatron.infer.sampling_params import SamplingParams
from petatron.kernels.batch_invariant.row_functions import fixed_order_sum
from petatron.kernels.policy_log_probs import row_statistics, row_temperatures, scaled_rows
from petatron.kernels.random_ids import RandomIdKernels
from petatron.kernels.registry import KernelContext, choose_kernel


def uniform_draws(seeds: Rows[int], samples: Rows[int], positions: Rows[int]) -> np.ndarray:
    """Returns numbers in [0, 1), each 53 bits of a hash (SplitMix64's finalizer, modulo 2^64) of its three.

    >>> uniform_draws([1, 1, 1], [0, 0, 1], [5, 5, 5]).tolist()
    [0.8855691219046175, 0.8855691219046175, 0.31048203561231125]
    """
    state = np.zeros(len(seeds), dtype=np.uint64)
    for values in (seeds, samples, positions):
        state += np.array(values, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) / 2**53


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What one row's draw depends on, besides its logits: the prompt and answer so far, and the ids a constraint allows.

    pending: so many tokens of the answer are not known yet; only their number matters then.
    """

    params: SamplingParams
    tokens: Rows[int]
    num_prompt: int
    allowed_V: Tensor | None = None
    pending: int = 0

    @property
    def position(self) -> int:
        """Of the token that is drawn."""
        return len(self.tokens) + self.pending

    @property
    def top_p(self) -> float:
        """Returns top_p with its decay: it starts anew with every sequence."""
        params = self.params
        if params.top_p is None:
            return 1.0
        decayed = params.top_p * params.top_p_decay ** (self.position - self.num_prompt)
        return max(decayed, params.top_p_bound, 1e-12)

    @property
    def filters(self) -> bool:
        """Whether ids are left out by their probability."""
        params = self.params
        return params.top_k is not None or params.top_p is not None or params.min_p is not None

    @property
    def changes_logits(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or bool(params.presence_penalty or params.frequency_penalty or params.logit_bias or params.bad_words_ids)
            or params.allowed_ids is not None
            or self.allowed_V is not None
            or len(self.tokens) - self.num_prompt < params.min_new_tokens
        )


def sample_tokens(logits_RV: Tensor, rows: Rows[SampledRow]) -> Tensor:
    """Returns one id per row."""
    if any(row.changes_logits for row in rows):
        logits_RV = torch.stack([_change_logits(logits, row) for logits, row in zip(logits_RV, rows)])
    greedy = [row.params.greedy for row in rows]
    if all(greedy):
        return logits_RV.max(dim=-1).indices  # on a CPU two to three times as fast as argmax
    device = logits_RV.device
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    temperatures = _to_device([row.params.temperature or 1.0 for row in rows], dtype, device)
    filtered = logits_RV
    if any(row.filters for row in rows):
        filtered = filter_rows(logits_RV / temperatures.unsqueeze(1), rows)
        temperatures = torch.ones_like(temperatures)
    draws = uniform_draws(
        [row.params.seed for row in rows], [row.params.sample for row in rows], [row.position for row in rows]
    )
    kernels = _drawing_kernels(device, logits_RV.dtype)
    drawn = kernels.draw_ids(filtered, temperatures, _to_device(draws.tolist(), torch.float64, device))
    if not any(greedy):
        return drawn
    return torch.where(_to_device(greedy, torch.bool, device), logits_RV.max(dim=-1).indices, drawn)


@cache
def _drawing_kernels(device: torch.device, dtype: torch.dtype) -> RandomIdKernels:
    return choose_kernel("drawn id", KernelContext.of(device, dtype, allow_compile=False)).functions


def _to_device(values: Rows[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies numbers without waiting for what the device has still to do."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def filter_logits(logits_RV: Tensor, *, top_k: Rows[int], top_p: Rows[float], min_p: Rows[float]) -> Tensor:
    """Masks ids that must not be drawn with minus infinity; of equally likely ids the smaller is kept.

    >>> filter_logits(torch.tensor([[1.0, 3.0, 2.0]]), top_k=[2], top_p=[1.0], min_p=[0.0]).tolist()
    [[-inf, 3.0, 2.0]]
    """
    size = logits_RV.shape[1]
    if all(k >= size for k in top_k) and all(p >= 1.0 for p in top_p) and not any(min_p):
        return logits_RV

    def column(values: Rows[float]) -> Tensor:
        return _to_device(values, torch.float64, logits_RV.device).unsqueeze(1)

    values, order = logits_RV.sort(dim=-1, descending=True, stable=True)
    allowed = torch.arange(size, device=logits_RV.device) < column(top_k)
    shares = values.masked_fill(~allowed, -torch.inf).double().softmax(dim=-1)
    # An id stays while those before it have not reached p yet, so the most likely one always does.
    allowed &= shares.cumsum(dim=-1) - shares < column(top_p)
    allowed &= shares >= shares[:, :1] * column(min_p)
    return torch.full_like(logits_RV, -torch.inf).scatter(1, order, values.masked_fill(~allowed, -torch.inf))


def _change_logits(logits_V: Tensor, row: SampledRow) -> Tensor:
    if not row.changes_logits:
        return logits_V
    params, device = row.params, logits_V.device
    logits_V = logits_V.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=device)
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    answer = row.tokens[row.num_prompt :]
    counts = Counter(answer)
    if counts and (params.presence_penalty or params.frequency_penalty):
        penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        logits_V[torch.tensor(list(counts), device=device)] -= torch.tensor(
            penalties, dtype=logits_V.dtype, device=device
        )
    if params.logit_bias:
        biases = torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype, device=device)
        logits_V[torch.tensor(list(params.logit_bias), device=device)] += biases
    bad_words = [(list(word[:-1]), word[-1]) for word in params.bad_words_ids]
    if banned := [last for before, last in bad_words if not before or list(answer[-len(before) :]) == before]:
        logits_V[torch.tensor(banned, device=device)] = -torch.inf
    if params.stop_ids and len(row.tokens) - row.num_prompt < params.min_new_tokens:
        logits_V[torch.tensor(params.stop_ids, device=device)] = -torch.inf
    if params.allowed_ids is not None:
        allowed = torch.tensor(params.allowed_ids, device=device)
        logits_V = torch.full_like(logits_V, -torch.inf).index_copy_(0, allowed, logits_V[allowed])
    if row.allowed_V is not None:
        logits_V.masked_fill_(~row.allowed_V, -torch.inf)
    return logits_V


def token_logprobs(
    logits_RV: Tensor, targets: Rows[int], num_top: Rows[int], drawn_rows: Rows[SampledRow] | None = None
) -> list[TokenLogprob]:
    """Returns the log-probability of each row's target with its most likely ids; a target's is the same number in both.

    drawn_rows: those that the targets were drawn from, some perhaps with `policy_logprobs`; None: they are tokens of prompts.
    """
    if not targets:
        return []
    labels = torch.tensor(targets, device=logits_RV.device)
    scaled, (highest, total, below) = _scaled_rows_and_statistics(logits_RV, labels, drawn_rows or ())
    log = total.log()
    chosen, kept = (below - log).tolist(), [1.0] * len(targets)
    if drawn_rows is not None and any(row.params.policy_logprobs for row in drawn_rows):
        kept = _kept_masses(scaled, highest + log, drawn_rows)
    most = max(num_top)
    if most == 0:
        return [TokenLogprob(token, logprob, (), mass) for token, logprob, mass in zip(targets, chosen, kept)]
    values, ids = scaled.topk(min(most, scaled.shape[1]), dim=-1)
    values = (values - highest.unsqueeze(1)) - log.unsqueeze(1)
    tops = [tuple(zip(row_ids, row)) for row_ids, row in zip(ids.tolist(), values.tolist())]
    rows = zip(targets, chosen, tops, num_top, kept)
    return [TokenLogprob(token, logprob, top[:n], mass) for token, logprob, top, n, mass in rows]


def drawn_logprobs(logits_RV: Tensor, ids_R: Tensor, rows: Rows[SampledRow]) -> Tensor:
    """Returns the log-probability of each row's new id, as `token_logprobs` does, on the device."""
    _, (_, total, below) = _scaled_rows_and_statistics(logits_RV, ids_R.long(), rows)
    return below - total.log()


def _scaled_rows_and_statistics(
    logits_RV: Tensor, labels_R: Tensor, drawn_rows: Rows[SampledRow]
) -> tuple[Tensor, Tensor]:
    """Returns logits over temperature, where that is asked for, and their `row_statistics`; rows of prompts are as they are."""
    values = [row.params.temperature if row.params.policy_logprobs else 1.0 for row in drawn_rows]
    divisor_R = None
    if any(value not in (0.0, 1.0) for value in values):
        temperatures = _to_device(values, torch.float64, logits_RV.device)
        divisor_R = row_temperatures(temperatures, labels_R, logits_RV)
    scaled = scaled_rows(logits_RV, divisor_R)
    return scaled, row_statistics(scaled, labels_R)


def _kept_masses(scaled_RV: Tensor, log_total_R: Tensor, rows: Rows[SampledRow]) -> list[float]:
    """Returns the probability of the ids that each row's filters keep."""
    kept = filter_rows(scaled_RV, rows)
    if kept is scaled_RV:
        return [1.0] * len(rows)
    masses = fixed_order_sum((kept.double() - log_total_R.double().unsqueeze(1)).exp())
    is_whole = (kept == scaled_RV).all(dim=1)
    return torch.where(is_whole, 1.0, masses.clamp_(max=1.0)).tolist()


def filter_rows(scaled_RV: Tensor, rows: Rows[SampledRow]) -> Tensor:
    """Masks the ids that the filters of each row leave out."""
    return filter_logits(
        scaled_RV,
        top_k=[row.params.top_k or scaled_RV.shape[1] for row in rows],
        top_p=[row.top_p for row in rows],
        min_p=[row.params.min_p or 0.0 for row in rows],
    )
