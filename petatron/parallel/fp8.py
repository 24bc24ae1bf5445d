"""Products in eight bits: give them to the layers that are to have them, and keep count of what they hold from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from petatron.base.log import get_logger
from petatron.config.schema.parallel import PrecisionConfig
from petatron.kernels.fp8.cast_and_gemm import Scaling
from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.layers.attention import Attention
from petatron.layers.linear import Linear
from petatron.layers.mlp import MLP, GatedMLP
from petatron.layers.moe.experts import GroupedLinear, RoutedExperts
from petatron.layers.ops.fp8_gemm import (
    DelayedScaling,
    Fp8ExpertGemms,
    Fp8Gemm,
    Fp8Recipe,
    fp8_gemm_factory,
    is_fp8_layer,
)
from petatron.mesh.rng import stable_seed
from petatron.models.decoder import Decoder
from petatron.parallel.tensor_parallel import ColumnParallelOp, ReplicatedOp, RowParallelOp

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fp8GemmSet:
    """The products of a rank that are done in eight bits, under their weights' names.

    fp8_gather_scalings: how weights are scaled of which both orientations hold the same numbers.
    """

    linears: dict[str, Fp8Gemm] = field(default_factory=dict)
    experts: Sequence[Fp8ExpertGemms] = ()
    fp8_gather_scalings: Mapping[str, Scaling] = field(default_factory=dict)

    def new_step(self) -> None:
        """A step begins, with changed weights."""
        for part in (*self.linears.values(), *self.experts):
            part.new_step()

    def weights_changed(self) -> None:
        """Weights may have changed, but no step has passed; until one begins, histories stay as they are."""
        for part in (*self.linears.values(), *self.experts):
            part.weight_changed()

    def state(self) -> dict[str, Tensor]:
        """The histories of delayed scaling, one per row, under a name that tells whose they are; empty if there are none."""
        found = self._amax_histories()
        return {_histories_key(found): torch.stack([history.state() for history in found.values()])} if found else {}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> bool:
        """Go on with histories of the same products; False where there should be some, and these are others'."""
        found = self._amax_histories()
        if not found:
            return True
        rows = state.get(_histories_key(found))
        if rows is None:
            return False
        for history, row in zip(found.values(), rows, strict=True):
            history.load_state(row, device)
        return True

    def _amax_histories(self) -> dict[str, DelayedScaling]:
        return {
            f"{weight} {part}": history
            for weight, multiplication in self.linears.items()
            for part, history in multiplication.amax_histories().items()
        }


def _histories_key(histories: Mapping[str, DelayedScaling]) -> str:
    return f"{stable_seed(*(f'{name}: {history.kind}' for name, history in histories.items())):016x}"


def apply_fp8(
    stages: Sequence[Decoder], precision: PrecisionConfig, kernel_context: KernelContext, *, cache_weights: bool
) -> Fp8GemmSet:
    """Let the large products of blocks run in FP8. `cache_weights`: a weight is cast once per step, and kept as cast."""
    if precision.fp8_format is None:
        return Fp8GemmSet()
    choice = choose_kernel("fp8", kernel_context)
    _log.info("%s", choice)
    make, recipe = (
        fp8_gemm_factory(precision, kernels=choice.functions, cache_weights=cache_weights),
        Fp8Recipe.from_config(precision),
    )
    linears: dict[str, Fp8Gemm] = {}
    one_cast: dict[str, Scaling] = {}
    experts: list[Fp8ExpertGemms] = []
    for stage in stages:
        for number, block in stage.layers.items():
            if not is_fp8_layer(precision, int(number), num_layers=stage.config.num_layers):
                continue
            for name, module in _linears_of(block):
                if isinstance(module, Linear):
                    weight = f"layers.{number}.{name}.weight"
                    linears[weight] = _use_fp8_gemm(module, make)
                    scaling = recipe.fp8_gather_scaling(module.weight.shape)
                    one_cast |= {} if scaling is None else {weight: scaling}
                else:
                    experts.append(Fp8ExpertGemms(choice.functions, cache_weights=cache_weights))
                    module.grouped_gemm = experts[-1]
    return Fp8GemmSet(linears, experts, one_cast)


def _linears_of(layer: nn.Module) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """The matrix products of attention, MLPs and experts; the router and small projections are left alone."""
    for name, owner in layer.named_modules():
        if isinstance(owner, Attention | MLP | GatedMLP | RoutedExperts):
            for inner, module in owner.named_children():
                if isinstance(module, Linear | GroupedLinear):
                    yield f"{name}.{inner}", module


def _use_fp8_gemm(module: Linear, make_gemm: Callable[[], Fp8Gemm]) -> Fp8Gemm:
    multiplication, product = make_gemm(), module.linear_op
    assert isinstance(product, ColumnParallelOp | RowParallelOp | ReplicatedOp)
    module.linear_op = replace(product, gemm_op=replace(product.gemm_op, gemm=multiplication))
    return multiplication
