"""Fills the kernel slots of layers for this device."""

from __future__ import annotations

from torch import nn

from petatron.config.schema.model import GATED_ACTIVATIONS
from petatron.kernels.registry import KernelChoice, KernelContext, choose_kernel
from petatron.layers.attention import Attention, CoreAttention
from petatron.layers.embedding import TokenEmbedding
from petatron.layers.mlp import Activation
from petatron.layers.moe.experts import RoutedExperts
from petatron.layers.norm import LayerNorm, RMSNorm
from petatron.layers.output_head import OutputHead


def select_kernels(model: nn.Module, kernel_context: KernelContext) -> list[KernelChoice]:
    """Gives every layer the fastest kernels available; returns the choices."""
    chosen: dict[str, KernelChoice] = {}

    def best(operation: str) -> KernelChoice:
        if operation not in chosen:
            chosen[operation] = choose_kernel(operation, kernel_context)
        return chosen[operation]

    for module in model.modules():
        operation = _registry_operation(module)
        if operation is not None:
            module.kernels = best(operation).functions
        if isinstance(module, CoreAttention):
            module.packing_kernels = best("packed rows").functions
        if isinstance(module, Attention) and module.qk_rms_norms is not None:
            module.qk_norm_rope_kernels = best("normed rotary embedding").functions
    return list(chosen.values())


def _registry_operation(module: nn.Module) -> str | None:
    match module:
        case RMSNorm():
            return "rms_norm"
        case LayerNorm():
            return "layer_norm"
        case Activation():
            return "gated activation" if module.name in GATED_ACTIVATIONS else "plain activation"
        case Attention(qk_rms_norms=None):
            return "rotary embedding"
        case RoutedExperts():
            return "expert rows"
        case OutputHead():
            return "softmax and loss"
        case TokenEmbedding():
            return "embedding gradient"
    return None
