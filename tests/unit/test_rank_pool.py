"""The pool itself: results come back in order, a failure shows the failing rank's traceback, a hang shows stacks."""

import multiprocessing
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.dist import PRELOADED, RankFailure, RankPool
from tests.forked_python import run_forked


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


def test_commands_fork_with_their_imports_whoever_started_the_server(tmp_path: Path):
    """`bench checkpoint` asks for processes with modules of its own, and where it came first every command imported the rest again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["json"])
    first = context.Process(target=time.sleep, args=(0,))
    first.start()
    first.join()
    program = f"import sys; print(sorted(set({PRELOADED!r}) - set(sys.modules)))"
    assert run_forked([sys.executable, "-c", program], cwd=tmp_path).stdout == "[]\n"
