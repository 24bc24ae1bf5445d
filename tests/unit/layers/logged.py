"""A multiplication that tells when its products are computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petatron.kernels.linear_gemms import PLAIN_GEMM, WeightGrad


@dataclass
class Logged:
    """Plain multiplication that logs; with `keeps` it keeps the rows itself, as low precision does with its casts."""

    log: list[str]
    keeps: bool = False

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x_RD @ weight.t(), (x_RD.clone(),) if self.keeps else ()

    def backward(self, grad_RO: Tensor, weight: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, WeightGrad]:
        self.log.append("g W")
        x_grad, job = PLAIN_GEMM.backward(grad_RO, weight, ())
        return x_grad, LoggedGrad(self.log, job, *kept)


@dataclass
class LoggedGrad:
    log: list[str]
    job: WeightGrad
    kept: Tensor | None = None

    @property
    def needs_input(self) -> bool:
        return self.kept is None

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        self.log.append("g^T x")
        self.job.write(x_RD if self.kept is None else self.kept, out, accumulate=accumulate)
