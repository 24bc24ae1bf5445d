"""Which torch optimizer updates the flat master weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from petatron.config.schema import OptimizerConfig


def build_rule(
    config: OptimizerConfig, masters: Sequence[nn.Parameter], decays: Sequence[bool]
) -> torch.optim.Optimizer:
    """AdamW or SGD over whole buffers, one parameter group per buffer; `decays` says which of them weight decay touches.

    The fused kernels skip the update on the device when `found_inf` is set, so no step needs the host to decide.
    """
    groups = [
        {"params": [master], "decay": decay, "weight_decay": config.weight_decay if decay else 0.0}
        for master, decay in zip(masters, decays)
    ]
    if config.optimizer == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
    return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
