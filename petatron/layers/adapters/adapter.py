"""`Adapter`, what fills the slot of a linear: it puts its own parameters of that module, and their mathematics, into the module's GEMM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from petatron.kernels.batch_invariant.gemm import GroupedRowGemm, RowGemm
from petatron.kernels.linear_gemms import PLAIN_GEMM, Gemm
from petatron.layers.adapters.adapter_gemms import AdapterPart, DoraGemm, LoraGemm, ScaledInputGemm, ScaledOutputGemm
from petatron.layers.ops.linear_op import DEFAULT_GEMM_OP, GemmOp, local_linear
from petatron.layers.ops.recompute_output import RecomputableOutput, as_recomputable

LORA_A, LORA_B, MAGNITUDE, SCALE = "lora_a", "lora_b", "lora_magnitude", "ia3_scale"
"""The names of an adapter's parameters in the module of the weight."""
ADAPTER_PARAMS = (LORA_A, LORA_B, MAGNITUDE, SCALE)

_LinearOp = Callable[[Tensor | RecomputableOutput, Tensor, Tensor | None], Tensor]


@dataclass(slots=True, eq=False)
class Adapter:
    """The adapter of one linear.

    names: its parameters in the module. sections: the indices of the module's sections that it adapts; None: it adapts all, as one.
    scale: s of low-rank adapters. dropout: of their input. scales_input: IA3, of a linear that is sharded along its input.
    generator: a slot, the RNG stream of ranks with the same input. sum_over_ranks: a slot, of ranks that share the weight's inputs.
    """

    names: tuple[str, ...]
    sections: tuple[int, ...] | None
    rank: int = 0
    scale: float = 1.0
    dropout: float = 0.0
    scales_input: bool = False
    generator: torch.Generator | None = None
    sum_over_ranks: Callable[[Tensor], object] | None = None

    def params(self, module: nn.Module) -> tuple[nn.Parameter, ...]:
        """Returns the adapter's parameters of a module."""
        params = module._parameters  # nn.Module would look for each of them in Python
        return tuple(params[name] for name in self.names)  # pyright: ignore[reportReturnType]

    def adapt_op(self, module: Any, linear_op: _LinearOp) -> _LinearOp:
        """Returns the op of a linear with the adapter in its GEMM; its communication stays."""
        if linear_op is local_linear:
            return partial(_run_gemm_op, self.adapt_gemm_op(module, DEFAULT_GEMM_OP))
        op: Any = linear_op
        op = replace(op, gemm_op=self.adapt_gemm_op(module, op.gemm_op))
        if getattr(op, "overlap", None) is not None and self._saves_rows(module):
            op = replace(op, overlap=None)  # chunks of rows save nothing of their own
        return op

    def adapt_gemm_op(self, module: Any, gemm_op: GemmOp, *, low_rank_gemm: Gemm = PLAIN_GEMM) -> GemmOp:
        """Returns the GEMM of a module with the adapter in it; `low_rank_gemm` multiplies by A and B."""
        params, adapt = self.params(module), partial(self._gemm, module, low_rank_gemm)
        requantizing = None if gemm_op.requantizing_gemm is None else adapt(gemm_op.requantizing_gemm)
        return replace(gemm_op, gemm=adapt(gemm_op.gemm), requantizing_gemm=requantizing, adapter_params=params)

    @torch.no_grad()
    def merged_weight(self, module: Any) -> Tensor:
        """Returns the weight of a linear with the adapter merged into it, for whoever multiplies by it without gradients."""
        params: Any = module._parameters
        weight, parts = params["weight"], self.parts(getattr(module, "sections", ()))
        if self.scales_input:
            return weight * params[SCALE]
        merged = weight.detach().clone()
        for part in parts:
            if SCALE in self.names:
                merged[part.outputs] *= params[SCALE][part.b_rows].unsqueeze(1)
            else:
                merged[part.outputs] += self.scale * (params[LORA_B][part.b_rows] @ params[LORA_A][part.a_rows])
        if MAGNITUDE not in self.names:
            return merged
        gemm = self._gemm(module, PLAIN_GEMM, PLAIN_GEMM)
        assert isinstance(gemm, DoraGemm)
        return merged.mul_(gemm.factors(weight)[0].unsqueeze(1))

    def _saves_rows(self, module: nn.Module) -> bool:
        return MAGNITUDE in self.names or (SCALE in self.names and not self.scales_input) or self._drops(module)

    def _drops(self, module: nn.Module) -> bool:
        return self.dropout > 0.0 and module.training

    def _gemm(self, module: Any, low_rank_gemm: Gemm, base: Gemm) -> Gemm:
        params: Any = module._parameters
        if self.scales_input:
            return ScaledInputGemm(base, params[SCALE])
        parts = self.parts(getattr(module, "sections", ()))
        if SCALE in self.names:
            return ScaledOutputGemm(base, params[SCALE], parts)
        mask = self._dropout_mask if self._drops(module) else None
        low_rank_gemm = (
            base if isinstance(base, RowGemm | GroupedRowGemm) else low_rank_gemm
        )  # batch-invariant as it is
        lora = LoraGemm(base, low_rank_gemm, params[LORA_A], params[LORA_B], parts, self.scale, mask)
        return lora if MAGNITUDE not in self.names else DoraGemm(lora, params[MAGNITUDE], self.sum_over_ranks)

    def parts(self, widths: Sequence[int]) -> tuple[AdapterPart, ...]:
        """Returns the adapter's parts, given the widths of the module's sections on this rank."""
        if self.sections is None:
            return (AdapterPart(slice(None), slice(None), slice(None)),)
        starts, parts, b_at = [0, *accumulate(widths)], [], 0
        for number, index in enumerate(self.sections):
            a_rows = slice(number * self.rank, (number + 1) * self.rank)
            b_rows = slice(b_at, b_at + widths[index])
            parts.append(AdapterPart(a_rows, b_rows, slice(starts[index], starts[index + 1])))
            b_at += widths[index]
        return tuple(parts)

    def _dropout_mask(self, x: Tensor) -> Tensor:
        keep = 1.0 - self.dropout
        return torch.empty_like(x).bernoulli_(keep, generator=self.generator).div_(keep)


def _run_gemm_op(gemm_op: GemmOp, x: Tensor | RecomputableOutput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return gemm_op(as_recomputable(x), weight, bias)
