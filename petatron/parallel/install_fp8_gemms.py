"""Installs FP8 GEMMs into the layers that use FP8, and holds their state from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from petatron.base.log import get_logger
from petatron.config.schema.precision import PrecisionConfig
from petatron.kernels.fp8.cast_and_gemm import Scaling
from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.layers.linear import Linear
from petatron.layers.mlp import MLP
from petatron.layers.moe.experts import GroupedLinear
from petatron.layers.norm import RMSNorm
from petatron.layers.ops.fp8_gemm import Fp8ExpertGemms, Fp8Gemm, Fp8Recipe, fp8_gemm_factory, is_fp8_layer
from petatron.layers.ops.fp8_output_head import fp8_output_head_factory
from petatron.layers.ops.fp8_scaling import DelayedScaling
from petatron.layers.vocabulary.output_head import OutputHead
from petatron.mesh.rng import stable_seed
from petatron.models.stage_interface import StageModule
from petatron.parallel.tensor_parallel import set_gemm

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fp8GemmSet:
    """The FP8 GEMMs of a rank, by weight name.

    fp8_gather_scalings: the scaling of weights of which both orientations hold the same values.
    """

    linears: dict[str, Fp8Gemm] = field(default_factory=dict)
    experts: Sequence[Fp8ExpertGemms] = ()
    fp8_gather_scalings: Mapping[str, Scaling] = field(default_factory=dict)

    def new_step(self, micro_batches: int) -> None:
        """Starts a step with this number of micro-batches: weights have changed."""
        for gemm in (*self.linears.values(), *self.experts):
            gemm.new_step(micro_batches)

    def undo_point(self) -> Callable[[], None]:
        """Returns a function that undoes what the host notes from now on, of a step that the device does not run."""
        undo_histories = [history.undo_point() for history in self._amax_histories().values()]

        def undo() -> None:
            for gemm in (*self.linears.values(), *self.experts):
                gemm.drop_cached_weight()
            for undo_history in undo_histories:
                undo_history()

        return undo

    def end_step(self) -> None:
        """Drops cached weights; until the next step starts, amax is not recorded."""
        for gemm in (*self.linears.values(), *self.experts):
            gemm.end_step()

    def weight_memory(self) -> list[object]:
        """Returns the memory of weights and scales that are cached in FP8 now, which a CUDA graph may read."""
        return [gemm.weight_memory for gemm in (*self.linears.values(), *self.experts)]

    def state(self) -> dict[str, Tensor]:
        """Returns the amax histories of delayed scaling, one per row, under a key of the GEMMs' names; empty if there are none."""
        rows = self._amax_histories()
        return {_histories_key(rows): torch.stack([history.state() for history in rows.values()])} if rows else {}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> bool:
        """Loads histories of the same GEMMs; returns False where some are needed and these are of others."""
        histories = self._amax_histories()
        if not histories:
            return True
        rows = state.get(_histories_key(histories))
        if rows is None:
            return False
        for history, row in zip(histories.values(), rows, strict=True):
            history.load_state(row, device)
        return True

    def _amax_histories(self) -> dict[str, DelayedScaling]:
        return {
            f"{weight} {part}": history
            for weight, gemm in self.linears.items()
            for part, history in gemm.amax_histories().items()
        }


def _histories_key(histories: Mapping[str, DelayedScaling]) -> str:
    return f"{stable_seed(*(f'{name}: {history.kind}' for name, history in histories.items())):016x}"


def apply_fp8(
    stages: Sequence[StageModule],
    precision: PrecisionConfig,
    kernel_context: KernelContext,
    *,
    num_layers: int,
    cache_weights: bool,
) -> Fp8GemmSet:
    """Runs the large GEMMs of layers in FP8. `cache_weights`: a weight is quantized once per step and cached."""
    if precision.fp8_format is None:
        return Fp8GemmSet()
    recipe = Fp8Recipe.from_config(precision)
    choice = choose_kernel(recipe.operation, kernel_context)
    _log.info("%s", choice)
    make_gemm = fp8_gemm_factory(precision, kernels=choice.functions, cache_weights=cache_weights)
    linears: dict[str, Fp8Gemm] = {}
    gather_scalings: dict[str, Scaling] = {}
    experts: list[Fp8ExpertGemms] = []
    for stage in stages:
        for layer_index, layer in stage.layers.items():
            if not is_fp8_layer(precision, int(layer_index), num_layers=num_layers):
                continue
            for name, module in fp8_linears(layer):
                if isinstance(module, Linear):
                    weight = f"layers.{layer_index}.{name}.weight"
                    linears[weight] = make_gemm()
                    set_gemm(module, linears[weight], requantizing_gemm=linears[weight].requantizing())
                    scaling = recipe.param_gather_scaling(module.weight.shape)
                    gather_scalings |= {} if scaling is None else {weight: scaling}
                else:
                    experts.append(Fp8ExpertGemms(choice.functions, cache_weights=cache_weights))
                    module.grouped_gemm = experts[-1]
            for module in layer.modules() if recipe.uses_attached_amax else ():
                if isinstance(module, RMSNorm):
                    module.attaches_amax = True
                elif isinstance(module, MLP):
                    # Variants are compiled, and the compiler would take the amax of elements that it has not rounded yet.
                    module.act.attaches_amax = module.act.variant is None
        if precision.fp8_output_head_backward:
            head_kernels = choose_kernel("FP8 casts and GEMMs", kernel_context).functions
            for head in (module for module in stage.modules() if isinstance(module, OutputHead)):
                head.make_loss_gemm = fp8_output_head_factory(head_kernels)
    return Fp8GemmSet(linears, experts, gather_scalings)


def fp8_linears(layer: nn.Module) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """Yields the GEMMs that modules name in `fp8_linears`: not the router and small projections."""
    for name, owner in layer.named_modules():
        for inner in getattr(owner, "fp8_linears", ()):
            module = owner.get_submodule(inner)
            assert isinstance(module, Linear | GroupedLinear), f"{name}.{inner} cannot run in FP8"
            yield f"{name}.{inner}", module
