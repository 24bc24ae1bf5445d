"""Zero-bubble schedules (Qi et al. 2023, 2024): the backward is split in two, and the second half can be deferred.

Only the input gradient of a stage (I) is needed by another rank. Its weight gradient (W) can be computed at any later time, so it
fills the bubble.

zb-h1   One stage per rank. Rank r has at most p-r micro-batches between F and I, as in 1F1B, which makes F and I alternate, and
        at most p between F and W, as many as 1F1B's first rank. A later rank may thus defer r of its Ws to the end, where it
        would wait for gradients anyway. The bubble is (p-1)/(3m+p-1) of the time, that of 1F1B (p-1)/(m+p-1).
zb-v    Two stages per rank, placed in a V. At most 2p half-size micro-batches between F and W on every rank, the memory of p whole
        ones. The bubble is (p-1)/(6m+p-1).

These bubbles hold for equal costs, F = I = W, for m >= p in zb-h1 and m >= (3p-1)/2 in zb-v. They are the least possible: rank p-1
cannot start before p-1 forwards are done, and no rank is idle after it has started. With fewer micro-batches the latency of the
first shows too.

zb-h1, and zb-v with fewer than 2p/3 micro-batches, come from a simulation with equal costs: at every unit of time each idle rank
runs the first action of a fixed preference that is ready and within its memory. From there on zb-v follows the paper's phases,
which run each micro-batch's F, I and W of a stage in sequence. Between 2p/3 and 3p/2 micro-batches the preference would be shorter
for equal costs, but is more sensitive to transfers and unequal costs. All orders are valid for all costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from petatron.schedule.actions import Action, ActionKind

ActionOrder = list[Action]


class _StageProgress:
    """Counts the micro-batches each stage has finished, by kind. Each stage runs them in order, so counts suffice."""

    def __init__(self, stages: int, micro_batches: int) -> None:
        self.forward = [0] * stages
        self.input_grad = [0] * stages
        self.weight_grad = [0] * stages
        self._last = stages - 1
        self._micro_batches = micro_batches

    def forward_ready(self, stage: int) -> bool:
        available = self._micro_batches if stage == 0 else self.forward[stage - 1]
        return self.forward[stage] < available

    def input_grad_ready(self, stage: int) -> bool:
        available = self.forward[stage]
        if stage != self._last:
            available = min(available, self.input_grad[stage + 1])
        return self.input_grad[stage] < available

    def weight_grad_ready(self, stage: int) -> bool:
        return self.weight_grad[stage] < self.input_grad[stage]

    def num_held(self, *stages: int) -> int:
        """Counts the micro-batches between F and W."""
        return sum(self.forward[stage] - self.weight_grad[stage] for stage in stages)

    def finish(self, kind: ActionKind, stage: int) -> Action:
        counts = {
            ActionKind.FORWARD: self.forward,
            ActionKind.INPUT_GRAD: self.input_grad,
            ActionKind.WEIGHT_GRAD: self.weight_grad,
        }
        counts[kind][stage] += 1
        return Action(kind, stage, counts[kind][stage] - 1)


KindAndStage = tuple[ActionKind, int]


def _simulate(
    progress: _StageProgress, choose: Callable[[_StageProgress, int], KindAndStage | None], *, ranks: int, total: int
) -> list[ActionOrder]:
    """Lets every rank choose at each unit of time, knowing what had ended when it began, until `total` actions are done."""
    orders: list[ActionOrder] = [[] for _ in range(ranks)]
    while total:
        chosen = [(rank, choose(progress, rank)) for rank in range(ranks)]
        moves = [(rank, choice) for rank, choice in chosen if choice is not None]
        assert moves, "the preference leaves every rank waiting"
        for rank, (kind, stage) in moves:
            orders[rank].append(progress.finish(kind, stage))
        total -= len(moves)
    return orders


def zb_h1(*, ranks: int, micro_batches: int) -> list[ActionOrder]:
    def choose(progress: _StageProgress, rank: int) -> KindAndStage | None:
        ahead = progress.forward[rank] - progress.input_grad[rank]
        if progress.forward_ready(rank) and ahead < ranks - rank and progress.num_held(rank) < ranks:
            return ActionKind.FORWARD, rank
        if progress.input_grad_ready(rank):
            return ActionKind.INPUT_GRAD, rank
        return (ActionKind.WEIGHT_GRAD, rank) if progress.weight_grad_ready(rank) else None

    return _simulate(_StageProgress(ranks, micro_batches), choose, ranks=ranks, total=3 * ranks * micro_batches)


def zb_v(*, ranks: int, micro_batches: int) -> list[ActionOrder]:
    if 3 * micro_batches > 2 * ranks:
        # The phases need 2p-1 micro-batches. Micro-batches are independent, so leaving some out keeps an order valid.
        orders = (_v_phases(ranks, max(micro_batches, 2 * ranks - 1), rank) for rank in range(ranks))
        return [[action for action in order if action.micro_batch < micro_batches] for order in orders]

    def choose(progress: _StageProgress, rank: int) -> KindAndStage | None:
        down, up = rank, 2 * ranks - 1 - rank
        held = progress.num_held(down, up)
        weight_grad_stage = next((stage for stage in (up, down) if progress.weight_grad_ready(stage)), None)
        if weight_grad_stage is not None and progress.forward[down] < micro_batches:
            return ActionKind.WEIGHT_GRAD, weight_grad_stage  # frees memory for the remaining forwards
        if progress.forward_ready(up) and held < 2 * ranks:
            return ActionKind.FORWARD, up
        # The last slot is reserved for the second stage: used by the first, it would deadlock.
        if progress.forward_ready(down) and held < 2 * ranks - 1:
            return ActionKind.FORWARD, down
        for stage in (down, up):
            if progress.input_grad_ready(stage):
                return ActionKind.INPUT_GRAD, stage
        return None if weight_grad_stage is None else (ActionKind.WEIGHT_GRAD, weight_grad_stage)

    return _simulate(_StageProgress(2 * ranks, micro_batches), choose, ranks=ranks, total=6 * ranks * micro_batches)


def _v_phases(ranks: int, micro_batches: int, rank: int) -> ActionOrder:
    """Orders a rank's actions in the phases of zb-v; `down` is its first stage, `up` its second.

    The first micro-batch returns to rank r when 2(p-r)-1 forwards of its first stage are done. Until gradients return too, both
    stages' forwards alternate; then the second stage's micro-batches are finished as they come, then both stages' in turn.
    """
    down, up = rank, 2 * ranks - 1 - rank
    below = ranks - rank
    progress = _StageProgress(2 * ranks, micro_batches)
    order: ActionOrder = []

    def run(stage: int, kinds: str) -> None:
        order.extend(progress.finish(ActionKind(kind), stage) for kind in kinds)

    run(down, "F" * (2 * below - 1))
    for _ in range(rank):
        run(up, "F")
        run(down, "F")
    for _ in range(below):
        run(up, "FIW")
    while progress.forward[up] < micro_batches:
        run(down, "FIW" if progress.forward[down] < micro_batches else "IW")
        run(up, "FIW")
    for _ in range(rank):
        run(down, "I")
        run(up, "I")
    for _ in range(below):
        run(down, "IW")
    run(up, "W" * (micro_batches - progress.weight_grad[up]))
    run(down, "W" * (micro_batches - progress.weight_grad[down]))
    return order


def forward_only_orders(rank_of: Sequence[int], *, micro_batches: int) -> list[ActionOrder]:
    """Orders forwards only, the latest stage first, so that few micro-batches are in flight."""
    ranks = max(rank_of) + 1
    stages = [[stage for stage in reversed(range(len(rank_of))) if rank_of[stage] == rank] for rank in range(ranks)]

    def choose(progress: _StageProgress, rank: int) -> KindAndStage | None:
        stage = next((stage for stage in stages[rank] if progress.forward_ready(stage)), None)
        return None if stage is None else (ActionKind.FORWARD, stage)

    return _simulate(
        _StageProgress(len(rank_of), micro_batches), choose, ranks=ranks, total=len(rank_of) * micro_batches
    )
