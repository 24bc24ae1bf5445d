"""The pool itself: results come back in order, a failure shows the failing rank's traceback, a hang shows stacks."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.dist import RankFailure, RankPool


def _sum_of_ranks() -> int:
    x = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(x)
    return int(x) * 10 + dist.get_rank()


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def _hang_on_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_results_in_rank_order(ranks: RankPool):
    assert ranks.run(_sum_of_ranks, 3) == [60, 61, 62]
    assert ranks.run(_sum_of_ranks, 2) == [30, 31]


def test_failure_shows_the_failing_rank(ranks: RankPool):
    with pytest.raises(RankFailure, match="rank one is unhappy"):
        ranks.run(_fail_on_one, 2)
    assert ranks.run(_sum_of_ranks, 2) == [30, 31]


def test_hang_shows_stacks():
    pool = RankPool()
    pool.run(_sum_of_ranks, 2)  # so that ranks are up, and the limit is the function's own
    with pytest.raises(RankFailure, match="_hang_on_zero"):
        pool.run(_hang_on_zero, 2, timeout_s=1)
    pool.close()
