"""Products whose operand is gathered: gradients, what is kept for them, and what runs beside what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.layers.norm import RMSNorm
from petatron.layers.ops.linear_op import GemmOp, PendingTensor
from petatron.layers.ops.recompute_output import RecomputableOutput, as_recomputable
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from tests.unit.layers.logged import Logged
from tests.unit.models.kept import alive_bytes, kept_bytes

S, B, D, OUT = 6, 3, 8, 5
PART = S * B * D * 8  # bytes of a rank's own part in float64


@dataclass
class Twins:
    """The entrance of one of two ranks that have the same part; tells a log what begins and what is waited for."""

    log: list[str] = field(default_factory=list)

    def gather_input(self, x: Tensor) -> Tensor:
        self.log.append("enter")
        return torch.cat([x, x])

    def start_gather_input(self, x: Tensor) -> PendingTensor:
        self.log.append("gather begins")
        return self._arrival("gathered", lambda: torch.cat([x, x]))

    def start_reduce_input_grad(self, grad: Tensor) -> PendingTensor:
        self.log.append("scatter begins")
        return self._arrival("scattered", lambda: grad.unflatten(0, (2, -1)).sum(0))

    def _arrival(self, word: str, make: Callable[[], Tensor]) -> PendingTensor:
        def arrive() -> Tensor:
            self.log.append(word)
            return make()

        return arrive


class Case:
    """norm, gather, product; `takes` says whether somebody takes the weight's gradient."""

    def __init__(self, *, takes: bool, keeps: bool = False) -> None:
        self.entrance = Twins()
        self.log = self.entrance.log
        self.norm = RMSNorm(D, eps=1e-5).double()
        torch.nn.init.normal_(self.norm.weight)
        self.weight = torch.randn(OUT, D, dtype=torch.float64, requires_grad=True)
        self.x = torch.randn(S, B, D, dtype=torch.float64, requires_grad=True)
        self.taken = torch.zeros_like(self.weight)
        self.queue = WeightGradQueue()
        self.queue.accumulate = lambda weight, write: write(self.taken, True)
        self.multiply = GemmOp(Logged(self.log, keeps), self.queue if takes else None)
        self.gradient = torch.randn(2 * S, B, OUT, dtype=torch.float64)

    def forward(self, *, source: bool = True) -> Tensor:
        _, normal = self.norm.add_and_norm(self.x)
        normal = normal if source else RecomputableOutput(normal.value, None)
        return self.multiply(normal, self.weight, input_comm=self.entrance)

    def check(self, y: Tensor) -> None:
        """Gradients are those of autograd; call it once the weight's has been given away."""
        _, normal = self.norm.add_and_norm(self.x)
        wanted = F.linear(torch.cat([normal.value, normal.value]), self.weight)
        torch.testing.assert_close(y, wanted)
        leaves = (self.x, self.norm.weight, self.weight)
        true = torch.autograd.grad((wanted * self.gradient).sum(), leaves)
        found = (self.x.grad, self.norm.weight.grad, self.taken if self.weight.grad is None else self.weight.grad)
        for ours, theirs in zip(found, true, strict=True):
            torch.testing.assert_close(ours, theirs)


BESIDE = ["enter", "gather begins", "g W", "scatter begins", "gathered", "g^T x", "scattered"]


@pytest.mark.parametrize("takes", [False, True])
def test_both_products_of_the_backward_pass_have_communication_beside_them(takes: bool):
    case = Case(takes=takes)
    y = case.forward()
    y.backward(case.gradient)
    assert case.log == BESIDE
    case.check(y)


@pytest.mark.parametrize(("source", "keeps"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("takes", [False, True])
def test_what_is_kept_is_not_gathered_again(takes: bool, source: bool, keeps: bool):
    """By the product itself, or by a multiplication in low precision."""
    case = Case(takes=takes, keeps=keeps)
    y = case.forward(source=source)
    y.backward(case.gradient)
    assert case.log == ["enter", "g W", "scatter begins", "g^T x", "scattered"]
    case.check(y)


def test_a_gradient_that_is_postponed_waits_with_a_rank_s_own_part():
    """And is gathered while the one before it is computed."""
    case = Case(takes=True)
    outputs = [case.forward(), case.forward()]
    case.log.clear()

    def backward() -> None:
        for y in outputs:
            y.backward(case.gradient)

    with case.queue.deferring("both"):
        held = alive_bytes(backward, without=[case.x, case.norm.weight, case.weight, case.gradient])
    assert case.log == ["g W", "scatter begins", "scattered"] * 2
    grads = [case.x.grad, case.norm.weight.grad]
    assert held - sum(grad.nbytes for grad in grads if grad is not None) == 2 * PART
    case.log.clear()
    case.queue.compute_deferred("both")
    assert case.log == ["gather begins", "gather begins", "gathered", "g^T x", "gathered", "g^T x"]
    for found in (case.x.grad, case.norm.weight.grad, case.taken):
        assert found is not None
        found /= 2
    case.check(outputs[0])


@pytest.mark.parametrize("takes", [False, True])
def test_neither_the_value_nor_what_is_gathered_of_it_is_kept(takes: bool):
    case = Case(takes=takes)
    known = [case.weight, case.norm.weight, case.x]
    least, _ = kept_bytes(case.forward, without=known)
    most, _ = kept_bytes(lambda: case.forward(source=False), without=known)
    assert most - least == 2 * PART
    assert least < PART, "statistics alone"
    left = alive_bytes(lambda: case.forward().backward(case.gradient), without=[*known, case.taken, case.gradient])
    assert left == sum(x.grad.nbytes for x in known if x.grad is not None)


@pytest.mark.parametrize("takes", [False, True])
def test_a_weight_that_is_frozen_needs_no_gather(takes: bool):
    case = Case(takes=takes)
    case.weight.requires_grad_(False)
    case.forward().backward(case.gradient)
    assert case.log == ["enter", "g W", "scatter begins", "scattered"] and not case.taken.any()


def test_an_input_that_needs_no_gradient_is_not_scattered():
    case = Case(takes=True)
    x = case.x.detach()
    case.multiply(as_recomputable(x), case.weight, input_comm=case.entrance).backward(case.gradient)
    assert case.log == ["enter", "g W", "g^T x"]
    torch.testing.assert_close(case.taken, torch.einsum("sbo,sbd->od", case.gradient, torch.cat([x, x])))


def test_a_graph_may_be_used_twice():
    case = Case(takes=True)
    y = case.forward()
    for _ in range(2):
        y.backward(case.gradient, retain_graph=True)
    assert case.log == [*BESIDE, *BESIDE[1:]]
    for found in (case.x.grad, case.norm.weight.grad, case.taken):
        assert found is not None
        found /= 2
    case.check(y)


def test_sequences_one_after_the_other_in_memory():
    """A part that lies batch first is gathered sequence first; gradients find their way back."""
    case = Case(takes=True)
    rows = torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)
    y = case.multiply(as_recomputable(rows.transpose(0, 1)), case.weight, input_comm=case.entrance)
    y.backward(case.gradient)
    twice = torch.cat([rows.transpose(0, 1)] * 2)
    true: Any = torch.autograd.grad((F.linear(twice, case.weight) * case.gradient).sum(), (rows, case.weight))
    torch.testing.assert_close((rows.grad, case.taken), true)
