"""Quantizes the frozen weights of the large GEMMs of layers, and frees the buffers that they were in.

It happens once the weights are there. Parameters keep their shapes, without values; GEMMs dequantize (`kernels/block_quantization.py`).
Whoever reads the weights of a group, to save them, gets dequantized ones. Blocks are of a rank's shard: equal to those of the
whole weight where its rows, or a rank's columns of them, are multiples of 64 long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petatron.base.log import get_logger
from petatron.kernels.block_quantization import DequantizingGemm, QuantizedFormat, QuantizedWeight, quantize
from petatron.kernels.linear_gemms import Gemm
from petatron.layers.linear import Linear
from petatron.models.stage_interface import StageModule
from petatron.parallel.install_fp8_gemms import fp8_linears
from petatron.parallel.tensor_parallel import gemm_of, set_gemm
from petatron.sharding.flat_buffer import FlatParamGroup
from petatron.sharding.flat_shard import ParameterGroup

_log = get_logger(__name__)


@torch.no_grad()
def quantize_frozen_weights(
    stages: Sequence[StageModule], groups: Sequence[ParameterGroup], form: QuantizedFormat
) -> dict[nn.Parameter, QuantizedWeight]:
    """Quantizes this rank's frozen weights; a second call does nothing."""
    quantized: dict[nn.Parameter, QuantizedWeight] = {}
    before = 0
    for stage in stages:
        for layer in stage.layers.values():
            absorbed = {getattr(o, name) for o in layer.modules() for name in getattr(o, "absorbed_linears", ())}
            for _, module in fp8_linears(layer):
                weight = module.weight
                if weight.requires_grad or module in absorbed or _is_quantized(module):
                    continue
                before += weight.nbytes
                quantized[weight] = quantize(weight, form)
                _install(module, quantized[weight])
                weight.data = weight.new_zeros(()).expand(weight.shape)
    for group in groups:
        if quantized and isinstance(group, FlatParamGroup) and not group.spec.trainable:
            group.free_buffer(lambda parameter: _values(parameter, quantized))
    after = sum(weight.num_bytes for weight in quantized.values())
    if quantized:
        _log.info(
            "%d frozen weights of this rank are in %s: %s bytes of %s",
            len(quantized),
            form,
            f"{after:,}",
            f"{before:,}",
        )
    return quantized


def _values(parameter: nn.Parameter, quantized: dict[nn.Parameter, QuantizedWeight]) -> Tensor:
    weight = quantized.get(parameter)
    return parameter.detach() if weight is None else weight.dequantize()


def _is_quantized(module: Any) -> bool:
    if isinstance(module, Linear):
        return isinstance(gemm_of(module), DequantizingGemm)
    return isinstance(module.grouped_gemm, _QuantizedExperts)


def _install(module: Any, weight: QuantizedWeight) -> None:
    if isinstance(module, Linear):
        set_gemm(module, DequantizingGemm(gemm_of(module), weight))
    else:
        module.grouped_gemm = _QuantizedExperts(module.grouped_gemm, weight)


class _QuantizedExperts:
    """Makes the GEMM of experts with quantized weights for the rows of each."""

    def __init__(self, make_gemm: Callable[..., Gemm], weight: QuantizedWeight) -> None:
        self._make_gemm, self._weight = make_gemm, weight

    def __call__(self, *args: Any) -> Gemm:
        return DequantizingGemm(self._make_gemm(*args), self._weight)
