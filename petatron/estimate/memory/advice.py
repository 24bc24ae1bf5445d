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
from petatron.config.checks.check_all import check
from petatron.estimate.memory.forecast import Device, heaviest, memory_plans, peaks, states
from petatron.estimate.memory.options import Kind, Variant, kinds_of, narrower
from petatron.estimate.memory.time_cost import passes_time, predicted_time, visits_time

_ASKED_FOR = 3
_FEW = 3  # kinds in a set
_WORTH_A_KIND = 0.01  # of a step's time

Variants = tuple[Variant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Flags that make a run fit, the bytes they free, the run's total then, and the share of time they cost."""

    flags: str
    total_bytes: int
    saved_bytes: int
    cost: float
    remark: str = ""


def candidates(run: RunConfig, capacity_bytes: int, *, device: Device = "cuda") -> list[Change]:
    """The three cheapest changes under which the heaviest rank needs at most `capacity_bytes`, or as many as there are.

    They are sets of at most three kinds of change, and of more only while fewer than three of those do. A kind is added to
    others that do already only if that is worth a per cent. A run in fp32 is looked at in bf16, and as it is only while that
    leaves fewer than three: any other set costs far more.
    """
    before = _Before(heaviest(run, device=device).total, predicted_time(run, device=device))
    found: list[Change] = []
    for given in [*([narrow] for narrow in narrower(run)), []]:
        if len(found) < _ASKED_FOR:
            found += _Search(run, given, capacity_bytes, device, before).changes()
    return sorted(found, key=lambda change: (round(change.cost, 4), change.total_bytes))[:_ASKED_FOR]


@dataclass(frozen=True, slots=True)
class _Before:
    """The run as it is."""

    total_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Half:
    """What one half of a candidate takes: bytes of every pipeline rank, and seconds."""

    sizes: Sequence[int]
    seconds: float


_IMPOSSIBLE = _Half((), math.inf)
"""For a memory budget that cannot be kept any more."""


class _Search:
    """Everything that is known of the candidates that have the `given` variants in common."""

    def __init__(
        self, run: RunConfig, given: Sequence[Variant], capacity_bytes: int, device: Device, before: _Before
    ) -> None:
        self._given, self._capacity, self._before = given, capacity_bytes, before
        self._device: Device = device
        self._known = {str(problem) for problem in check(run, require_training=False)}
        self._run = _edited(run, given)
        self._passes: dict[Variants, _Half] = {}
        self._states: dict[Variants, _Half] = {}
        self._floors: dict[Variants, float] = {}
        self._verdicts: dict[Variants, bool] = {}

    def changes(self) -> list[Change]:
        """The cheapest of every set of kinds, as far as it may be among the first three."""
        kinds = list(kinds_of(self._run))
        found: dict[frozenset[int], Change] = {}
        if not self._may_fit(kinds):
            return []
        for together in range(0 if self._given else 1, len(kinds) + 1):
            if together > _FEW and len(found) >= _ASKED_FOR:
                break
            for chosen in combinations(range(len(kinds)), together):
                limits = [change.cost - _WORTH_A_KIND for fewer, change in found.items() if fewer < set(chosen)]
                limits += sorted(change.cost for change in found.values())[_ASKED_FOR - 1 : _ASKED_FOR]
                best = self._cheapest([kinds[at] for at in chosen], below=min(limits, default=math.inf))
                if best is not None:
                    found[frozenset(chosen)] = best
        return list(found.values())

    def _cheapest(self, kinds: Sequence[Kind], *, below: float) -> Change | None:
        """The cheapest way to change these kinds of settings that is allowed and fits, if it costs less than `below`."""
        every = product(
            *(self._viable(kinds, at) if len(kinds) > _FEW else kinds[at].variants for at in range(len(kinds)))
        )
        cheap = [variants for variants in every if self._least_cost(variants) < below]
        if not cheap or not self._may_fit(kinds):
            return None
        best: tuple[float, float, Variants] | None = None
        for variants in cheap:
            if best is not None and round(self._least_cost(variants), 4) > best[0]:
                continue
            size, cost = self._size(variants), self._cost(variants)
            price = (round(cost, 4), size)
            better = size <= self._capacity and cost < below and (best is None or price < best[:2])
            if better and self._allowed(variants):
                best = (*price, variants)
        return None if best is None else self._change(best[2])

    def _may_fit(self, kinds: Sequence[Kind]) -> bool:
        """Whether the variants that free most would fit together, allowed or not."""
        return any(self._size(variants) <= self._capacity for variants in product(*(kind.strongest for kind in kinds)))

    def _viable(self, kinds: Sequence[Kind], at: int) -> list[Variant]:
        """Variants of one kind with which the others' may be enough."""
        before, behind = kinds[:at], kinds[at + 1 :]
        return [one for one in kinds[at].variants if self._may_fit([*before, Kind([one], [one]), *behind])]

    def _size(self, variants: Variants) -> float:
        """Bytes of the heaviest rank; infinite if what it holds from step to step is too much already."""
        state = self._state_of(variants)
        passes = self._passes_of(variants) if max(state.sizes) <= self._capacity else _IMPOSSIBLE
        return max((a + b for a, b in zip(passes.sizes, state.sizes)), default=math.inf)

    def _cost(self, variants: Variants) -> float:
        return (self._passes_of(variants).seconds + self._state_of(variants).seconds) / self._before.seconds - 1.0

    def _least_cost(self, variants: Variants) -> float:
        """What a candidate costs at least, as far as is known without working out its passes."""
        floor = self._floor(_touching(variants, "passes"))
        return (floor + self._state_of(variants).seconds) / self._before.seconds - 1.0

    def _floor(self, variants: Variants) -> float:
        known = self._passes.get(variants)
        if known is not None:
            return known.seconds
        if variants not in self._floors:
            fewer = (variants[:at] + variants[at + 1 :] for at, one in enumerate(variants) if one.only_slows)
            self._floors[variants] = max((self._floor(rest) for rest in fewer), default=0.0)
        return self._floors[variants]

    def _passes_of(self, variants: Variants) -> _Half:
        key = _touching(variants, "passes")
        if key not in self._passes:
            run = _edited(self._run, key)
            try:
                plans = memory_plans(run, device=self._device)
            except ConfigError:
                self._passes[key] = _IMPOSSIBLE
            else:
                sizes = [peak for peak, _ in peaks(run, plans, device=self._device)]
                self._passes[key] = _Half(sizes, passes_time(run, plans, device=self._device))
        return self._passes[key]

    def _state_of(self, variants: Variants) -> _Half:
        key = _touching(variants, "state")
        if key not in self._states:
            run = _edited(self._run, key)
            self._states[key] = _Half([state.total for state in states(run)], visits_time(run))
        return self._states[key]

    def _allowed(self, variants: Variants) -> bool:
        """Whether the validator has nothing against these variants that it has not against the run as it is.

        Two that do not go together are in many sets, and are refused by name.
        """
        if len(variants) > 2 and not all(self._allowed(pair) for pair in combinations(variants, 2)):
            return False
        if variants not in self._verdicts:
            found = check(_edited(self._run, variants), require_training=False)
            self._verdicts[variants] = all(str(problem) in self._known for problem in found)
        return self._verdicts[variants]

    def _change(self, variants: Variants) -> Change:
        every, total = [*self._given, *variants], int(self._size(variants))
        return Change(
            flags=" ".join(variant.flags for variant in every),
            total_bytes=total,
            saved_bytes=self._before.total_bytes - total,
            cost=self._cost(variants),
            remark="; ".join(variant.remark for variant in every if variant.remark),
        )


def _touching(variants: Variants, side: str) -> Variants:
    return tuple([variant for variant in variants if variant.side in (side, "both")])


def _edited(run: RunConfig, variants: Sequence[Variant]) -> RunConfig:
    for variant in variants:
        run = variant.edit(run)
    return run
