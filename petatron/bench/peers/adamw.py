"""The optimizer of every peer: torch's fused AdamW on fp32 weights, after clipping all gradients together.

Vectors (norms and biases) are not decayed, as in our own optimizer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from petatron.config.required_settings import required
from petatron.config.schema.optimizer import OptimizerConfig


class ClippedAdamW:
    """Clips, updates and clears the gradients without waiting for the device."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, keep_grads: bool = False) -> None:
        """keep_grads: gradients are zeroed and keep their memory, as a CUDA graph that adds to them needs."""
        self._keep_grads = keep_grads
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._clip = config.clip_grad
        decayed = [parameter for parameter in self._parameters if parameter.dim() > 1]
        others = [parameter for parameter in self._parameters if parameter.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=required("lr", config.lr),
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self) -> None:
        if self._clip > 0:
            grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads, foreach=True)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip, norm, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not self._keep_grads)
