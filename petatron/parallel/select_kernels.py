"""Fill the slots of layers with the kernels of this device."""

from __future__ import annotations

from torch import nn

from petatron.config.schema.model import GATED_ACTIVATIONS
from petatron.kernels.registry import Choice, Situation, choose
from petatron.layers.attention import Attention, CoreAttention
from petatron.layers.embedding import TokenEmbedding
from petatron.layers.mlp import Activation
from petatron.layers.moe.experts import RoutedExperts
from petatron.layers.norm import LayerNorm, RMSNorm
from petatron.layers.output_head import OutputHead


def fill_kernels(model: nn.Module, situation: Situation) -> list[Choice]:
    """Give every layer the fastest kernels there are for it; says which."""
    chosen: dict[str, Choice] = {}

    def best(operation: str) -> Choice:
        if operation not in chosen:
            chosen[operation] = choose(operation, situation)
        return chosen[operation]

    for module in model.modules():
        operation = _operation(module)
        if operation is not None:
            module.kernels = best(operation).functions
        if isinstance(module, CoreAttention):
            module.moves = best("packed rows").functions
        if isinstance(module, Attention) and module.rms_norms is not None:
            module.norm_kernels = best("normed rotary embedding").functions
    return list(chosen.values())


def _operation(module: nn.Module) -> str | None:
    match module:
        case RMSNorm():
            return "rms_norm"
        case LayerNorm():
            return "layer_norm"
        case Activation():
            return "gated activation" if module.name in GATED_ACTIVATIONS else "plain activation"
        case Attention(rms_norms=None):
            return "rotary embedding"
        case RoutedExperts():
            return "expert rows"
        case OutputHead():
            return "softmax and loss"
        case TokenEmbedding():
            return "embedding gradient"
    return None
