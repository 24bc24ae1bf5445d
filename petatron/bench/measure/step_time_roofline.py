"""The shortest time that a training step can take on a device: its arithmetic at the peak, and the bytes that must move.

    floor = max(FLOPs / peak, (2 weights + gradients) micro-batches / bandwidth) + optimizer bytes / bandwidth

GEMMs read every weight once in the forward and once in the backward pass and write every gradient, while they compute. The
optimizer comes after all of them: clipping reads the gradients once more, the update reads gradients, master weights and moments,
and writes master weights, moments and weights. In a mixture of experts a token uses few of the weights, and the optimizer updates all:
with few tokens per step its bytes bound the MFU, whatever the kernels do. Activations are left out, so the floor is not reachable.
FLOPs are those of a causal model. The peak is published, the bandwidth that of a copy on the same device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from petatron.base.device import DeviceInfo
from petatron.bench.measure.format_si_units import format_si
from petatron.bench.peers import BenchSpec
from petatron.estimate.flops import model_flops_per_token
from petatron.estimate.state_bytes import state_bytes
from petatron.models.frozen_params import frozen_params
from petatron.models.registry import model_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """What bounds a step from below; `bandwidth` in bytes per second."""

    arithmetic_ms: float
    weight_bytes: int
    """Weights that GEMMs read and gradients that they write."""
    optimizer_bytes: int
    bandwidth: float

    def _ms(self, num_bytes: int) -> float:
        return num_bytes / self.bandwidth * 1e3

    @property
    def total_ms(self) -> float:
        return max(self.arithmetic_ms, self._ms(self.weight_bytes)) + self._ms(self.optimizer_bytes)

    def as_json(self) -> dict[str, float]:
        return {**asdict(self), "total_ms": self.total_ms}

    def rows(self, *, step_ms: float | None, full_flops_ms: float) -> list[tuple[str, str]]:
        """Describes the floor for a table; `full_flops_ms` is the arithmetic at the peak with attention counted in full."""
        ours = "" if step_ms is None else f"; our step takes {step_ms / self.total_ms:.2f}x as long"
        return [
            ("floor of a step", f"{self.total_ms:.1f} ms, so MFU {full_flops_ms / self.total_ms:.1%} at most{ours}"),
            ("  arithmetic", f"{self.arithmetic_ms:.1f} ms at the peak (causal)"),
            ("  weights", self._traffic_text(self.weight_bytes, "read twice, gradients written, while GEMMs compute")),
            ("  optimizer", self._traffic_text(self.optimizer_bytes, "after them")),
        ]

    def _traffic_text(self, num_bytes: int, what: str) -> str:
        speed = format_si(self.bandwidth, "B/s")
        return f"{self._ms(num_bytes):.1f} ms: {num_bytes / 1e9:.1f} GB {what}, at {speed} of a copy"


def step_floor(spec: BenchSpec, device: DeviceInfo, *, bandwidth: float | None) -> StepFloor | None:
    """Returns the floor of our own step; None where the device's peak or bandwidth is not known."""
    peak = device.peak("bfloat16" if spec.fp8_recipe is None else "float8")
    if peak is None or bandwidth is None:
        return None
    state, optim = state_bytes(spec.run), spec.run.optim
    clipping = state.gradients if optim.clip_grad > 0 else 0
    masters = 2 * state.master_weights + state.weights if state.master_weights else 2 * state.weights
    flops = model_flops_per_token(model_spec(spec.run), frozen=frozen_params(spec.run))
    return StepFloor(
        arithmetic_ms=spec.tokens * flops / peak * 1e3,
        weight_bytes=spec.micro_batches * (2 * state.weights + state.gradients),
        optimizer_bytes=clipping + state.gradients + masters + 2 * state.moments,
        bandwidth=bandwidth,
    )
