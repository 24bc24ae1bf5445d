"""The settings of SOAP (`--soap-*`), and its `UpdateRuleSpec`: state tensors, cost, learning rate under muP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from petatron.config.schema.numeric_bounds import DecayRate, PositiveCount, PositiveFactor
from petatron.config.schema.optimizers.update_rule_spec import (
    RuleStateTensor,
    SectionRuleSpec,
    StateShape,
    UpdateRuleSpec,
    WidthScaling,
)


class SoapSpec(SectionRuleSpec["SoapSettings"]):
    name: ClassVar[str] = "soap"
    title: ClassVar[str] = "SOAP"
    unit = "matrix"
    hidden_matrices_only = True
    width_scaling = WidthScaling(lr_fan_in=-1)

    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        """A side that is too long has no covariance and no basis."""
        limit = self.settings.soap_max_precondition_dim
        pairs: dict[str, StateShape] = {"left": "row_pair"} if shape[-2] <= limit else {}
        pairs |= {"right": "column_pair"} if shape[-1] <= limit else {}
        sides = [
            RuleStateTensor(f"soap_{side}{part}", pair, initial="identity" if part else "zeros")
            for side, pair in pairs.items()
            for part in ("", "_basis")
        ]
        return (RuleStateTensor("soap_exp_avg"), RuleStateTensor("soap_exp_avg_sq", "matrix"), *sides)

    def matrix_flops(self, rows: int, columns: int) -> int:
        """On each side: a covariance, two projections and one back, and, every `soap_precondition_frequency` updates, a GEMM and a QR."""
        total = 0
        for side, other in ((rows, columns), (columns, rows)):
            if side <= self.settings.soap_max_precondition_dim:
                total += 8 * side * side * other + 6 * side**3 // self.settings.soap_precondition_frequency
        return max(total, rows * columns)

    @property
    def scalar_optimizer(self) -> str:
        return "adam"


@dataclass(frozen=True, kw_only=True)
class SoapSettings:
    """The settings of SOAP."""

    used_by: ClassVar[type[UpdateRuleSpec]] = SoapSpec
    soap_beta1: DecayRate = 0.95
    """Decay of the first moment of soap."""
    soap_beta2: DecayRate = 0.95
    """Decay of the second moment of soap, in the basis of eigenvectors."""
    soap_shampoo_beta: DecayRate = 0.95
    """Decay of the covariances of rows and columns whose eigenvectors are soap's basis."""
    soap_eps: PositiveFactor = 1e-8
    """Added to the square root of the second moment of soap."""
    soap_precondition_frequency: PositiveCount = 10
    """Steps between updates of soap's basis."""
    soap_max_precondition_dim: PositiveCount = 10_000
    """Longest side of a matrix, in rows or columns, that soap computes a basis for."""
