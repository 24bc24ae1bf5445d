"""Suggests settings that would make a run fit, with their cost: predicted, not measured.

A candidate has one option of each of some groups. It counts if the validator accepts it and the forecast says that it fits; among
candidates of the same groups the cheapest is used. `relative_step_time.py` has the costs.

There are thousands, and an answer should take no longer than a second:

- Activations and the time of forward and backward do not depend on the optimizer's settings; state and its transfer time depend on
  those and on the sharding alone. Both halves are computed once for each choice that affects them, and a candidate is the sum of
  two. The half of activations lists every moment that may be the peak, with the fraction of the gradients that is allocated then.
- Groups whose most saving options do not fit together are skipped.
- So is a candidate that is too expensive already without one of its options, if that option can only slow it down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.estimate.memory.forecast import (
    DeviceKind,
    largest_forecast,
    moments_per_rank,
    pinned_activation_bytes,
    pinned_optimizer_bytes,
    recompute_plans,
    state_bytes_per_rank,
)
from petatron.estimate.memory.memory_saving_options import (
    MemoryOption,
    OptionGroup,
    apply_options,
    bf16_options,
    is_allowed,
    option_groups,
    problems_of,
)
from petatron.estimate.memory.peak_moments import PeakMoment
from petatron.estimate.memory.relative_step_time import (
    forward_backward_time,
    optimizer_offload_time,
    predicted_step_time,
)
from petatron.estimate.state_bytes import StateBytes

_NUM_SUGGESTIONS = 3
_MAX_COMBINED_GROUPS = 3  # groups in a set
_MIN_GAIN = 0.01  # of a step's time

OptionSet = tuple[MemoryOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedChange:
    """Flags that make a run fit, the bytes they free, the run's total then, and the share of time they cost.

    pinned_bytes: page-locked host memory of a rank then.
    """

    flags: str
    total_bytes: int
    saved_bytes: int
    time_cost: float
    remark: str = ""
    pinned_bytes: int = 0

    def price(self) -> tuple[float, int]:
        """Returns what suggestions are ranked by: time, and memory where times are equal."""
        return round(self.time_cost, 4), self.total_bytes


def suggest_changes(
    run: RunConfig, capacity_bytes: int, *, device: DeviceKind = "cuda", pinned_capacity_bytes: float = math.inf
) -> list[SuggestedChange]:
    """Returns the three cheapest changes under which the largest rank needs at most `capacity_bytes`, or as many as there are.

    `pinned_capacity_bytes`: what a rank may pin of host memory.

    They are sets of at most three groups' options, and of more only if fewer than three such sets fit. A group is added to a set
    that fits already only if that gains a per cent. A run in fp32 is searched in bf16, and as it is only if that leaves fewer than
    three: any other set costs far more.
    """
    baseline = largest_forecast(run, device=device).total, predicted_step_time(run, device=device)
    limits, changes = (capacity_bytes, pinned_capacity_bytes), list[SuggestedChange]()
    for common_options in [*([option] for option in bf16_options(run)), []]:
        if len(changes) < _NUM_SUGGESTIONS:
            changes += _Search(run, common_options, limits, device, baseline).cheapest_changes()
    return sorted(changes, key=SuggestedChange.price)[:_NUM_SUGGESTIONS]


@dataclass(frozen=True, slots=True)
class _PassCost:
    """What forward and backward need: the moments of every pipeline rank that may be its peak, seconds, and pinned host memory."""

    rank_moments: Sequence[Sequence[PeakMoment]]
    seconds: float
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _StateCost:
    """What state needs: the bytes of every pipeline rank with all its gradients, seconds, and pinned host memory."""

    ranks: Sequence[StateBytes]
    seconds: float
    pinned_bytes: int


_IMPOSSIBLE = _PassCost((), math.inf)
"""For a memory budget that cannot be met."""


class _Search:
    """The state of a search among candidates that share `common_options`.

    limits: the bytes that a rank may take of its device, and pin of the host. baseline: bytes and seconds of the run as it is.
    """

    def __init__(
        self,
        run: RunConfig,
        common_options: Sequence[MemoryOption],
        limits: tuple[int, float],
        device: DeviceKind,
        baseline: tuple[int, float],
    ) -> None:
        self._common_options, (self._baseline_bytes, self._baseline_s) = common_options, baseline
        self._capacity, self._pinned_capacity = limits
        self._device: DeviceKind = device
        self._existing_problems = problems_of(run)
        self._run = apply_options(run, common_options)
        self._pass_costs: dict[OptionSet, _PassCost] = {}
        self._state_costs: dict[OptionSet, _StateCost] = {}
        self._pass_time_floors: dict[OptionSet, float] = {}
        self._allowed_cache: dict[OptionSet, bool] = {}

    def cheapest_changes(self) -> list[SuggestedChange]:
        """Returns the cheapest candidate of every set of groups, as far as it may be among the first three."""
        groups = list(option_groups(self._run))
        cheapest: dict[frozenset[int], SuggestedChange] = {}
        if not self._may_fit(groups):
            return []
        for count in range(0 if self._common_options else 1, len(groups) + 1):
            if count > _MAX_COMBINED_GROUPS and len(cheapest) >= _NUM_SUGGESTIONS:
                break
            for chosen in combinations(range(len(groups)), count):
                limits = [change.time_cost - _MIN_GAIN for fewer, change in cheapest.items() if fewer < set(chosen)]
                limits += sorted(change.time_cost for change in cheapest.values())[_NUM_SUGGESTIONS - 1 :][:1]
                best = self._cheapest([groups[index] for index in chosen], cost_limit=min(limits, default=math.inf))
                if best is not None:
                    cheapest[frozenset(chosen)] = best
        return list(cheapest.values())

    def _cheapest(self, groups: Sequence[OptionGroup], *, cost_limit: float) -> SuggestedChange | None:
        """Returns the cheapest options of these groups that are allowed and fit, if they cost less than `cost_limit`."""
        every = product(
            *(
                self._viable_options(groups, index) if len(groups) > _MAX_COMBINED_GROUPS else groups[index].options
                for index in range(len(groups))
            )
        )
        cheap = [options for options in every if self._time_cost_floor(options) < cost_limit]
        if not cheap or not self._may_fit(groups):
            return None
        best: tuple[float, float, OptionSet] | None = None
        for options in cheap:
            if best is not None and round(self._time_cost_floor(options), 4) > best[0]:
                continue
            size, cost = self._total_bytes(options), self._time_cost(options)
            price = (round(cost, 4), size)
            better = size <= self._capacity and cost < cost_limit and (best is None or price < best[:2])
            if better and self._pinned_bytes(options) <= self._pinned_capacity and self._allowed(options):
                best = (*price, options)
        return None if best is None else self._suggested_change(best[2])

    def _may_fit(self, groups: Sequence[OptionGroup]) -> bool:
        """Whether the most saving options would fit together, allowed or not."""
        return any(
            self._total_bytes(options) <= self._capacity
            for options in product(*(group.most_saving for group in groups))
        )

    def _viable_options(self, groups: Sequence[OptionGroup], at: int) -> list[MemoryOption]:
        """Returns the options of one group with which those of the others may fit."""
        before, after = groups[:at], groups[at + 1 :]
        return [option for option in groups[at].options if self._may_fit([*before, OptionGroup([option]), *after])]

    def _total_bytes(self, options: OptionSet) -> float:
        """Returns the bytes of the largest rank; infinite if its weights and optimizer state are too much already."""
        state = self._state_cost(options)
        is_too_much = any(rank.total - rank.gradients > self._capacity for rank in state.ranks)
        passes = _IMPOSSIBLE if is_too_much else self._pass_cost(options)
        return max(
            (
                rank.total - rank.gradients + max(moment.bytes_with(rank.gradients) for moment in moments)
                for moments, rank in zip(passes.rank_moments, state.ranks)
            ),
            default=math.inf,
        )

    def _pinned_bytes(self, options: OptionSet) -> int:
        return self._pass_cost(options).pinned_bytes + self._state_cost(options).pinned_bytes

    def _time_cost(self, options: OptionSet) -> float:
        return (self._pass_cost(options).seconds + self._state_cost(options).seconds) / self._baseline_s - 1.0

    def _time_cost_floor(self, options: OptionSet) -> float:
        """Returns the least cost of a candidate, as far as it is known without computing its forward and backward time."""
        floor = self._pass_time_floor(_affecting(options, "passes"))
        return (floor + self._state_cost(options).seconds) / self._baseline_s - 1.0

    def _pass_time_floor(self, options: OptionSet) -> float:
        cost = self._pass_costs.get(options)
        if cost is not None:
            return cost.seconds
        if options not in self._pass_time_floors:
            subsets = (options[:at] + options[at + 1 :] for at, option in enumerate(options) if option.only_slows)
            self._pass_time_floors[options] = max((self._pass_time_floor(subset) for subset in subsets), default=0.0)
        return self._pass_time_floors[options]

    def _pass_cost(self, options: OptionSet) -> _PassCost:
        key = _affecting(options, "passes")
        if key not in self._pass_costs:
            run = apply_options(self._run, key)
            try:
                plans = recompute_plans(run, device=self._device)
            except ConfigError:
                self._pass_costs[key] = _IMPOSSIBLE
            else:
                moments = moments_per_rank(run, plans, device=self._device)
                seconds = forward_backward_time(run, plans, device=self._device)
                pinned = pinned_activation_bytes(run, plans, device=self._device)
                self._pass_costs[key] = _PassCost(moments, seconds, pinned)
        return self._pass_costs[key]

    def _state_cost(self, options: OptionSet) -> _StateCost:
        key = _affecting(options, "state")
        if key not in self._state_costs:
            run = apply_options(self._run, key)
            pinned = pinned_optimizer_bytes(run)
            self._state_costs[key] = _StateCost(state_bytes_per_rank(run), optimizer_offload_time(run), pinned)
        return self._state_costs[key]

    def _allowed(self, options: OptionSet) -> bool:
        """Whether the validator reports no problem with these options that the run does not have already.

        Two that conflict are in many sets, so pairs are checked first.
        """
        if len(options) > 2 and not all(self._allowed(pair) for pair in combinations(options, 2)):
            return False
        if options not in self._allowed_cache:
            self._allowed_cache[options] = is_allowed(apply_options(self._run, options), self._existing_problems)
        return self._allowed_cache[options]

    def _suggested_change(self, options: OptionSet) -> SuggestedChange:
        every, total = [*self._common_options, *options], int(self._total_bytes(options))
        return SuggestedChange(
            flags=" ".join(option.flags for option in every),
            total_bytes=total,
            saved_bytes=self._baseline_bytes - total,
            time_cost=self._time_cost(options),
            remark="; ".join(option.remark for option in every if option.remark),
            pinned_bytes=self._pinned_bytes(options),
        )


def _affecting(options: OptionSet, side: str) -> OptionSet:
    return tuple([option for option in options if option.affects in (side, "both")])
