"""Settings that would make a run fit, and what each would cost: predicted, not tried.

A candidate takes one variant of each of some kinds of change. It counts if the validator accepts it and the forecast says that
it fits; among the variants of the same kinds the cheapest is taken. `time_cost.py` has the prices.

There are thousands, and an answer should take no longer than a second:

- What a step keeps and how long its passes take does not depend on the optimizer's settings, and what is held from step to
  step, and how long it travels, on those alone and on who shares it. Both halves are worked out once for each choice that
  touches them, and a candidate is the sum of two.
- Kinds of which the variants that free most do not fit together need no further look.
- Nor does a candidate that is too dear already without one of its changes, if that change can only slow it down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.config.checks.check_all import check_config
from petatron.estimate.memory.forecast import (
    DeviceKind,
    activation_peaks,
    largest_forecast,
    recompute_plans,
    state_bytes_per_rank,
)
from petatron.estimate.memory.options import MemoryOption, OptionGroup, bf16_options, option_groups
from petatron.estimate.memory.time_cost import forward_backward_time, optimizer_offload_time, predicted_step_time

_NUM_SUGGESTIONS = 3
_MAX_COMBINED_GROUPS = 3  # kinds in a set
_MIN_GAIN = 0.01  # of a step's time

OptionSet = tuple[MemoryOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedChange:
    """Flags that make a run fit, the bytes they free, the run's total then, and the share of time they cost."""

    flags: str
    total_bytes: int
    saved_bytes: int
    time_cost: float
    remark: str = ""


def suggest_changes(run: RunConfig, capacity_bytes: int, *, device: DeviceKind = "cuda") -> list[SuggestedChange]:
    """The three cheapest changes under which the heaviest rank needs at most `capacity_bytes`, or as many as there are.

    They are sets of at most three kinds of change, and of more only while fewer than three of those do. A kind is added to
    others that do already only if that is worth a per cent. A run in fp32 is looked at in bf16, and as it is only while that
    leaves fewer than three: any other set costs far more.
    """
    before = _Baseline(largest_forecast(run, device=device).total, predicted_step_time(run, device=device))
    found: list[SuggestedChange] = []
    for given in [*([narrow] for narrow in bf16_options(run)), []]:
        if len(found) < _NUM_SUGGESTIONS:
            found += _Search(run, given, capacity_bytes, device, before).cheapest_changes()
    return sorted(found, key=lambda change: (round(change.time_cost, 4), change.total_bytes))[:_NUM_SUGGESTIONS]


@dataclass(frozen=True, slots=True)
class _Baseline:
    """The run as it is."""

    total_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _PartialCost:
    """What one half of a candidate takes: bytes of every pipeline rank, and seconds."""

    rank_bytes: Sequence[int]
    seconds: float


_IMPOSSIBLE = _PartialCost((), math.inf)
"""For a memory budget that cannot be kept any more."""


class _Search:
    """Everything that is known of the candidates that have the `common_options` variants in common."""

    def __init__(
        self,
        run: RunConfig,
        common_options: Sequence[MemoryOption],
        capacity_bytes: int,
        device: DeviceKind,
        baseline: _Baseline,
    ) -> None:
        self._common_options, self._capacity, self._baseline = common_options, capacity_bytes, baseline
        self._device: DeviceKind = device
        self._existing_problems = {str(problem) for problem in check_config(run, require_training=False)}
        self._run = _apply_options(run, common_options)
        self._pass_costs: dict[OptionSet, _PartialCost] = {}
        self._state_costs: dict[OptionSet, _PartialCost] = {}
        self._pass_time_floors: dict[OptionSet, float] = {}
        self._allowed_cache: dict[OptionSet, bool] = {}

    def cheapest_changes(self) -> list[SuggestedChange]:
        """The cheapest of every set of kinds, as far as it may be among the first three."""
        kinds = list(option_groups(self._run))
        found: dict[frozenset[int], SuggestedChange] = {}
        if not self._may_fit(kinds):
            return []
        for together in range(0 if self._common_options else 1, len(kinds) + 1):
            if together > _MAX_COMBINED_GROUPS and len(found) >= _NUM_SUGGESTIONS:
                break
            for chosen in combinations(range(len(kinds)), together):
                limits = [change.time_cost - _MIN_GAIN for fewer, change in found.items() if fewer < set(chosen)]
                limits += sorted(change.time_cost for change in found.values())[_NUM_SUGGESTIONS - 1 : _NUM_SUGGESTIONS]
                best = self._cheapest([kinds[at] for at in chosen], cost_limit=min(limits, default=math.inf))
                if best is not None:
                    found[frozenset(chosen)] = best
        return list(found.values())

    def _cheapest(self, groups: Sequence[OptionGroup], *, cost_limit: float) -> SuggestedChange | None:
        """The cheapest way to change these kinds of settings that is allowed and fits, if it costs less than `cost_limit`."""
        every = product(
            *(
                self._viable_options(groups, at) if len(groups) > _MAX_COMBINED_GROUPS else groups[at].options
                for at in range(len(groups))
            )
        )
        cheap = [variants for variants in every if self._time_cost_floor(variants) < cost_limit]
        if not cheap or not self._may_fit(groups):
            return None
        best: tuple[float, float, OptionSet] | None = None
        for variants in cheap:
            if best is not None and round(self._time_cost_floor(variants), 4) > best[0]:
                continue
            size, cost = self._total_bytes(variants), self._time_cost(variants)
            price = (round(cost, 4), size)
            better = size <= self._capacity and cost < cost_limit and (best is None or price < best[:2])
            if better and self._allowed(variants):
                best = (*price, variants)
        return None if best is None else self._suggested_change(best[2])

    def _may_fit(self, groups: Sequence[OptionGroup]) -> bool:
        """Whether the variants that free most would fit together, allowed or not."""
        return any(
            self._total_bytes(variants) <= self._capacity
            for variants in product(*(kind.most_saving for kind in groups))
        )

    def _viable_options(self, groups: Sequence[OptionGroup], at: int) -> list[MemoryOption]:
        """Variants of one kind with which the others' may be enough."""
        before, behind = groups[:at], groups[at + 1 :]
        return [one for one in groups[at].options if self._may_fit([*before, OptionGroup([one], [one]), *behind])]

    def _total_bytes(self, options: OptionSet) -> float:
        """Bytes of the heaviest rank; infinite if what it holds from step to step is too much already."""
        state = self._state_cost(options)
        passes = self._pass_cost(options) if max(state.rank_bytes) <= self._capacity else _IMPOSSIBLE
        return max((a + b for a, b in zip(passes.rank_bytes, state.rank_bytes)), default=math.inf)

    def _time_cost(self, options: OptionSet) -> float:
        return (self._pass_cost(options).seconds + self._state_cost(options).seconds) / self._baseline.seconds - 1.0

    def _time_cost_floor(self, options: OptionSet) -> float:
        """What a candidate costs at least, as far as is known without working out its passes."""
        floor = self._pass_time_floor(_affecting(options, "passes"))
        return (floor + self._state_cost(options).seconds) / self._baseline.seconds - 1.0

    def _pass_time_floor(self, options: OptionSet) -> float:
        known = self._pass_costs.get(options)
        if known is not None:
            return known.seconds
        if options not in self._pass_time_floors:
            fewer = (options[:at] + options[at + 1 :] for at, one in enumerate(options) if one.only_slows)
            self._pass_time_floors[options] = max((self._pass_time_floor(rest) for rest in fewer), default=0.0)
        return self._pass_time_floors[options]

    def _pass_cost(self, options: OptionSet) -> _PartialCost:
        key = _affecting(options, "passes")
        if key not in self._pass_costs:
            run = _apply_options(self._run, key)
            try:
                plans = recompute_plans(run, device=self._device)
            except ConfigError:
                self._pass_costs[key] = _IMPOSSIBLE
            else:
                sizes = [peak for peak, _ in activation_peaks(run, plans, device=self._device)]
                self._pass_costs[key] = _PartialCost(sizes, forward_backward_time(run, plans, device=self._device))
        return self._pass_costs[key]

    def _state_cost(self, options: OptionSet) -> _PartialCost:
        key = _affecting(options, "state")
        if key not in self._state_costs:
            run = _apply_options(self._run, key)
            self._state_costs[key] = _PartialCost(
                [state.total for state in state_bytes_per_rank(run)], optimizer_offload_time(run)
            )
        return self._state_costs[key]

    def _allowed(self, options: OptionSet) -> bool:
        """Whether the validator has nothing against these variants that it has not against the run as it is.

        Two that do not go together are in many sets, and are refused by name.
        """
        if len(options) > 2 and not all(self._allowed(pair) for pair in combinations(options, 2)):
            return False
        if options not in self._allowed_cache:
            found = check_config(_apply_options(self._run, options), require_training=False)
            self._allowed_cache[options] = all(str(problem) in self._existing_problems for problem in found)
        return self._allowed_cache[options]

    def _suggested_change(self, options: OptionSet) -> SuggestedChange:
        every, total = [*self._common_options, *options], int(self._total_bytes(options))
        return SuggestedChange(
            flags=" ".join(variant.flags for variant in every),
            total_bytes=total,
            saved_bytes=self._baseline.total_bytes - total,
            time_cost=self._time_cost(options),
            remark="; ".join(variant.remark for variant in every if variant.remark),
        )


def _affecting(options: OptionSet, side: str) -> OptionSet:
    return tuple([variant for variant in options if variant.affects in (side, "both")])


def _apply_options(run: RunConfig, options: Sequence[MemoryOption]) -> RunConfig:
    for variant in options:
        run = variant.edit(run)
    return run
