"""Products in eight bits: give them to the layers that are to have them, and keep count of what they hold from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from petatron.base.log import get_logger
from petatron.config.schema.parallel import PrecisionConfig
from petatron.kernels.fp8.cast_and_gemm import Scaling
from petatron.kernels.registry import Situation, choose
from petatron.layers.attention import Attention
from petatron.layers.linear import Linear
from petatron.layers.mlp import MLP, GatedMLP
from petatron.layers.moe.experts import GroupedLinear, RoutedExperts
from petatron.layers.ops.fp8_gemm import (
    DelayedScaling,
    Fp8Experts,
    Fp8Multiplication,
    Recipe,
    fp8_multiplication,
    layer_in_eight_bits,
)
from petatron.mesh.rng import stable_seed
from petatron.models.decoder import Decoder
from petatron.parallel.tensor_parallel import ColumnProduct, RowProduct, WholeProduct

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EightBits:
    """The products of a rank that are done in eight bits, under their weights' names.

    one_cast: how weights are scaled of which both orientations hold the same numbers.
    """

    linears: dict[str, Fp8Multiplication] = field(default_factory=dict)
    experts: Sequence[Fp8Experts] = ()
    one_cast: Mapping[str, Scaling] = field(default_factory=dict)

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
        found = self._histories()
        return {_name(found): torch.stack([history.state() for history in found.values()])} if found else {}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> bool:
        """Go on with histories of the same products; False where there should be some, and these are others'."""
        found = self._histories()
        if not found:
            return True
        rows = state.get(_name(found))
        if rows is None:
            return False
        for history, row in zip(found.values(), rows, strict=True):
            history.load_state(row, device)
        return True

    def _histories(self) -> dict[str, DelayedScaling]:
        return {
            f"{weight} {part}": history
            for weight, multiplication in self.linears.items()
            for part, history in multiplication.histories().items()
        }


def _name(histories: Mapping[str, DelayedScaling]) -> str:
    return f"{stable_seed(*(f'{name}: {history.kind}' for name, history in histories.items())):016x}"


def multiply_in_eight_bits(
    stages: Sequence[Decoder], precision: PrecisionConfig, situation: Situation, *, keep_weights: bool
) -> EightBits:
    """Let the large products of blocks run in FP8. `keep_weights`: a weight is cast once per step, and kept as cast."""
    if precision.fp8_format is None:
        return EightBits()
    choice = choose("fp8", situation)
    _log.info("%s", choice)
    make, recipe = (
        fp8_multiplication(precision, kernels=choice.functions, keep_weights=keep_weights),
        Recipe.of(precision),
    )
    linears: dict[str, Fp8Multiplication] = {}
    one_cast: dict[str, Scaling] = {}
    experts: list[Fp8Experts] = []
    for stage in stages:
        for number, block in stage.layers.items():
            if not layer_in_eight_bits(precision, int(number), num_layers=stage.config.num_layers):
                continue
            for name, module in _products(block):
                if isinstance(module, Linear):
                    weight = f"layers.{number}.{name}.weight"
                    linears[weight] = _replaced(module, make)
                    scaling = recipe.one_cast(module.weight.shape)
                    one_cast |= {} if scaling is None else {weight: scaling}
                else:
                    experts.append(Fp8Experts(choice.functions, keep_weights=keep_weights))
                    module.multiplication = experts[-1]
    return EightBits(linears, experts, one_cast)


def _products(block: nn.Module) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """The matrix products of attention, MLPs and experts; the router and small projections are left alone."""
    for name, owner in block.named_modules():
        if isinstance(owner, Attention | MLP | GatedMLP | RoutedExperts):
            for inner, module in owner.named_children():
                if isinstance(module, Linear | GroupedLinear):
                    yield f"{name}.{inner}", module


def _replaced(module: Linear, make: Callable[[], Fp8Multiplication]) -> Fp8Multiplication:
    multiplication, product = make(), module.product
    assert isinstance(product, ColumnProduct | RowProduct | WholeProduct)
    module.product = replace(product, multiply=replace(product.multiply, multiplication=multiplication))
    return multiplication
