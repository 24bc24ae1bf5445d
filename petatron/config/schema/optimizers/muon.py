"""The settings of Muon (`--muon-*`), and its `UpdateRuleSpec`: state tensors, cost, learning rate under muP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from petatron.config.schema.numeric_bounds import DecayRate, PositiveCount, PositiveFactor
from petatron.config.schema.optimizers.update_rule_spec import (
    OptimizerName,
    RuleStateTensor,
    SectionRuleSpec,
    UpdateRuleSpec,
    WidthScaling,
)


class MuonSpec(SectionRuleSpec["MuonSettings"]):
    name: ClassVar[str] = "muon"
    title: ClassVar[str] = "Muon"
    unit = "matrix"
    hidden_matrices_only = True
    width_scaling = WidthScaling()

    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        return (RuleStateTensor("momentum_buffer"),)

    def matrix_flops(self, rows: int, columns: int) -> int:
        """A step has three GEMMs: the symmetric one of a matrix with itself, its square, and that times the matrix."""
        short, long = min(rows, columns), max(rows, columns)
        return self.settings.muon_num_ns_steps * (4 * short * short * long + 2 * short**3)

    @property
    def scalar_optimizer(self) -> str:
        return self.settings.muon_scalar_optimizer

    @property
    def fuses_qkv(self) -> bool:
        return not self.settings.muon_split_qkv

    def mup_notices(self) -> Iterator[str]:
        if self.settings.muon_scale_mode == "spectral":
            yield (
                "--use-mup leaves the learning rate of muon's matrices as it is, and their updates grow with the width by "
                "--muon-scale-mode spectral. --muon-scale-mode unit_rms_norm is muP's scale"
            )


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """The settings of Muon."""

    used_by: ClassVar[type[UpdateRuleSpec]] = MuonSpec
    muon_momentum: DecayRate = 0.95
    """Momentum of muon."""
    muon_nesterov: bool = False
    """Nesterov's momentum in muon."""
    muon_num_ns_steps: PositiveCount = 5
    """Newton-Schulz steps of muon."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = "quintic"
    """Coefficients of the Newton-Schulz steps: the same in each, five sets in turn, or eight that get finer."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of an orthogonal update of n rows and m columns: sqrt(max(n, m)), sqrt(n / m) or sqrt(max(1, n / m))."""
    muon_extra_scale_factor: PositiveFactor = 1.0
    """A further factor of muon's updates; 0.2 with spectral makes them as large as adam's."""
    muon_fp32_matmul_prec: Literal["medium", "high"] = "medium"
    """Precision of muon's Newton-Schulz steps: medium is bf16, high is fp32; a run in fp64 takes them in fp64."""
    muon_split_qkv: bool = True
    """Orthogonalize the matrices of queries, keys and values each by itself; else stacked, as one."""
    muon_tp_mode: Literal["duplicated"] = "duplicated"
    """Newton-Schulz steps of a matrix that tensor-parallel ranks shard: each of them all-gathers it and takes all steps."""
    muon_scalar_optimizer: OptimizerName = "adam"
    """The optimizer of the parameters that muon does not update: any that updates each element by itself."""
