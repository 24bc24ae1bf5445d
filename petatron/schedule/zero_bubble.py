"""Zero-bubble schedules (Qi et al. 2023, 2024): the backward pass in two halves, the second of which can wait.

Only the gradient of a stage's input (I) is awaited by another rank. The gradient of its weights (W) can be computed at any
later time, so it fills the moments in which a rank would be idle.

zb-h1   One stage per rank. Rank r has at most p-r micro-batches between F and I, as in 1F1B, which makes F and I alternate, and
        at most p between F and W, as many as 1F1B's first rank. A later rank may thus put off r of its Ws to the end, where
        it would wait for gradients anyway. Idle (p-1)/(3m+p-1) of the time where 1F1B is idle (p-1)/(m+p-1).
zb-v    Two stages per rank, placed in a V. At most 2p half-size micro-batches between F and W on every rank, the memory of p whole
        ones. Idle (p-1)/(6m+p-1).

These idle times hold on equal costs, F = I = W, for m >= p in zb-h1 and m >= (3p-1)/2 in zb-v. They are the least possible: rank p-1
cannot begin before p-1 forwards are done, and no rank rests after it has begun. With fewer micro-batches the latency of the first
shows too.

zb-h1, and zb-v with fewer than 2p/3 micro-batches, are found by playing the pipeline through on equal costs: at every unit of time
each idle rank takes the first action of a fixed preference that is ready and that its memory allows. From there on zb-v follows
the paper's phases, which keep each micro-batch's F, I and W of a stage together. Between 2p/3 and 3p/2 micro-batches the
preference would be shorter on equal costs, but transfers and unequal costs disturb it more. All orders are valid on all costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from petatron.schedule.actions import Action, ActionKind

ActionOrder = list[Action]


class _StageProgress:
    """How many micro-batches each stage has finished, by kind. Each stage takes them in order, so counts say all."""

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
        """Micro-batches between F and W."""
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
    """Let every rank choose at each unit of time, knowing what had ended when it began, until `total` actions are done."""
    played: list[ActionOrder] = [[] for _ in range(ranks)]
    while total:
        chosen = [(rank, choose(progress, rank)) for rank in range(ranks)]
        moves = [(rank, choice) for rank, choice in chosen if choice is not None]
        assert moves, "the preference leaves every rank waiting"
        for rank, (kind, stage) in moves:
            played[rank].append(progress.finish(kind, stage))
        total -= len(moves)
    return played


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
        # The phases need 2p-1 micro-batches. Micro-batches do not wait for each other, so leaving some out keeps an order valid.
        whole = (_v_phases(ranks, max(micro_batches, 2 * ranks - 1), rank) for rank in range(ranks))
        return [[action for action in order if action.micro_batch < micro_batches] for order in whole]

    def choose(progress: _StageProgress, rank: int) -> KindAndStage | None:
        down, up = rank, 2 * ranks - 1 - rank
        held = progress.num_held(down, up)
        late = next((stage for stage in (up, down) if progress.weight_grad_ready(stage)), None)
        if late is not None and progress.forward[down] < micro_batches:
            return ActionKind.WEIGHT_GRAD, late  # makes room for the forwards that are left
        if progress.forward_ready(up) and held < 2 * ranks:
            return ActionKind.FORWARD, up
        # The last place is kept for the second stage: were it taken by the first, nothing could ever be finished.
        if progress.forward_ready(down) and held < 2 * ranks - 1:
            return ActionKind.FORWARD, down
        for stage in (down, up):
            if progress.input_grad_ready(stage):
                return ActionKind.INPUT_GRAD, stage
        return None if late is None else (ActionKind.WEIGHT_GRAD, late)

    return _simulate(_StageProgress(2 * ranks, micro_batches), choose, ranks=ranks, total=6 * ranks * micro_batches)


def _v_phases(ranks: int, micro_batches: int, rank: int) -> ActionOrder:
    """A rank's order in the regular course of zb-v; `down` is its first stage, `up` its second.

    The first micro-batch comes back up to rank r when 2(p-r)-1 forwards of its first stage are done. Until gradients come back too
    both stages' forwards alternate; then the second stage's micro-batches are finished as they come, then both stages' in turn.
    """
    down, up = rank, 2 * ranks - 1 - rank
    below = ranks - rank
    progress = _StageProgress(2 * ranks, micro_batches)
    order: ActionOrder = []

    def take(stage: int, kinds: str) -> None:
        order.extend(progress.finish(ActionKind(kind), stage) for kind in kinds)

    take(down, "F" * (2 * below - 1))
    for _ in range(rank):
        take(up, "F")
        take(down, "F")
    for _ in range(below):
        take(up, "FIW")
    while progress.forward[up] < micro_batches:
        take(down, "FIW" if progress.forward[down] < micro_batches else "IW")
        take(up, "FIW")
    for _ in range(rank):
        take(down, "I")
        take(up, "I")
    for _ in range(below):
        take(down, "IW")
    take(up, "W" * (micro_batches - progress.weight_grad[up]))
    take(down, "W" * (micro_batches - progress.weight_grad[down]))
    return order


def forward_only_orders(rank_of: Sequence[int], *, micro_batches: int) -> list[ActionOrder]:
    """Forwards only, the latest stage first, so that few micro-batches are on their way at a time."""
    ranks = max(rank_of) + 1
    held = [[stage for stage in reversed(range(len(rank_of))) if rank_of[stage] == rank] for rank in range(ranks)]

    def choose(progress: _StageProgress, rank: int) -> KindAndStage | None:
        ready = (stage for stage in held[rank] if progress.forward_ready(stage))
        stage = next(ready, None)
        return None if stage is None else (ActionKind.FORWARD, stage)

    return _simulate(
        _StageProgress(len(rank_of), micro_batches), choose, ranks=ranks, total=len(rank_of) * micro_batches
    )
