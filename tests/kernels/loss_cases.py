"""What tests of the product with cross-entropy share: cases, who takes a weight's gradient, ranks of a vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.fused_linear_cross_entropy import AllReduce, VocabColumns, WriteWeightGrad
from tests.load_deadline import scaled

Result = TypeVar("Result")


@dataclass
class MainGrad:
    """What takes deliveries: the first of a step overwrites, whatever was there, and the others add."""

    out: Tensor
    written: bool = False
    deliveries: int = 0

    def deliver(self, write: WriteWeightGrad) -> None:
        write(self.out, self.written)
        self.written = True
        self.deliveries += 1

    @staticmethod
    def poisoned(weight: Tensor) -> MainGrad:
        return MainGrad(torch.full_like(weight, float("nan"), dtype=torch.promote_types(weight.dtype, torch.float32)))


class Ranks:
    """Ranks that share a vocabulary, as threads of this process; exchanges happen in place, like collectives.

    Between exchanges one rank runs at a time: Triton's interpreter has one state for all threads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=scaled(20))
        self._slots: list[Tensor] = [torch.empty(0)] * count
        self._turn = threading.Lock()

    def all_of(self, rank: int, x: Tensor) -> Tensor:
        """What every rank gave, one after the other along a new first dimension."""
        self._turn.release()
        self._slots[rank] = x.clone()
        self._barrier.wait()
        stacked = torch.stack(self._slots)
        self._barrier.wait()
        self._turn.acquire()
        return stacked

    def columns(self, rank: int, size: int, local: int) -> VocabColumns:
        """Of `size` ids, `local` rows on every rank, the last of them padding."""
        rows = min(max(size - rank * local, 0), local)
        return VocabColumns(rows, rank * local, *self.exchanges(rank))

    def exchanges(self, rank: int) -> tuple[AllReduce, AllReduce]:
        """The maximum and the sum over the ranks."""
        max_over: AllReduce = lambda x: x.copy_(self.all_of(rank, x).amax(0))  # noqa: E731
        sum_over: AllReduce = lambda x: x.copy_(self.all_of(rank, x).sum(0))  # noqa: E731
        return max_over, sum_over

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        def in_turn(rank: int) -> Result:
            with self._turn:
                return work(rank)

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(in_turn, range(self.count)))


@dataclass
class Case:
    x: Tensor
    weight: Tensor
    targets: Tensor
    token_weights: Tensor

    @staticmethod
    def random(tokens: int, size: int, *, dtype: torch.dtype = torch.float64, hidden: int = 16) -> Case:
        x, weight = torch.randn(tokens, hidden), torch.randn(size, hidden)
        targets, token_weights = torch.randint(size, (tokens,)), torch.rand(tokens) / tokens
        token_weights[torch.rand(tokens) < 0.2] = 0
        return Case(x.to(dtype), weight.to(dtype), targets, token_weights.to(torch.promote_types(dtype, torch.float32)))

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = self.x.double().requires_grad_(), self.weight.double().requires_grad_()
        losses = F.cross_entropy(x @ weight.t(), self.targets, reduction="none")
        return losses.detach(), *torch.autograd.grad((losses * self.token_weights.double()).sum(), (x, weight))


def distance(ours: Tensor | None, true: Tensor) -> float:
    assert ours is not None
    return float((ours.double() - true).norm() / true.norm())
