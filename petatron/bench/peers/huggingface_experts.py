"""Makes transformers' experts do the work of ours: grouped GEMMs in the compute dtype, and our losses of the router.

Two things would otherwise differ. `grouped_mm` is not among the operations that autocast knows, so stacked weights of experts, which
transformers multiplies with it, would stay float32 where every other linear layer computes in bfloat16; and a training loop that
adds up token losses alone leaves out the load-balancing loss and the z-loss. transformers' own balancing loss is K times ours and
takes all layers for one, so ours is computed from the logits of its routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from petatron.base.errors import Problem
from petatron.config.schema.model import MoEConfig
from petatron.layers.moe.load_balancing import SINGLE_RANK, count_choices_BE, load_balancing_loss, z_loss
from petatron.models.hf.folder_entries import FolderEntry


def unmatched_training(moe: MoEConfig) -> Iterator[Problem]:
    """Yields settings that change the training of experts here and have no counterpart in transformers."""
    if moe.num_experts is None:
        return
    settings = {
        "--moe-router-enable-expert-bias": moe.moe_router_enable_expert_bias,
        "--moe-expert-capacity-factor": moe.moe_expert_capacity_factor is not None,
        "--moe-input-jitter-eps": bool(moe.moe_input_jitter_eps),
        "--moe-router-force-load-balancing": moe.moe_router_force_load_balancing,
        "--moe-router-load-balancing-type sinkhorn": moe.moe_router_load_balancing_type == "sinkhorn",
    }
    rule = "changes the training of experts in a way that transformers does not have"
    for flag, given in settings.items():
        if given:
            yield Problem(flag, "", rule, "Leave it out, or measure ours alone.")
    if has_router_losses(moe) and moe.moe_router_num_groups is not None:
        rule = "balances groups of experts, which --against hf cannot repeat"
        fix = "Use --moe-aux-loss-coeff 0, or measure ours alone."
        yield Problem("--moe-router-num-groups", str(moe.moe_router_num_groups), rule, fix)


def has_router_losses(moe: MoEConfig) -> bool:
    balanced = moe.moe_aux_loss_coeff != 0.0 and moe.moe_router_load_balancing_type not in ("none", "sinkhorn")
    return moe.num_experts is not None and (balanced or bool(moe.moe_z_loss_coeff))


class _ToDtype(nn.Module):
    """Casts a weight when it is read; its gradient is cast back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype)


def cast_expert_weights(model: nn.Module, entries: Sequence[FolderEntry], dtype: torch.dtype) -> None:
    """Has stacked weights of experts read in `dtype`, as autocast does with the weights of linear layers."""
    for entry in entries:
        if len(entry.shape) == 3 and any(".experts." in region.name for region in entry.regions):
            module, _, leaf = entry.name.rpartition(".")
            parametrize.register_parametrization(model.get_submodule(module), leaf, _ToDtype(dtype), unsafe=True)


class RouterLosses:
    """Records the logits of a model's routers in its forward pass, and computes our losses from them."""

    def __init__(self, model: nn.Module, entries: Sequence[FolderEntry], moe: MoEConfig, *, num_sequences: int) -> None:
        self._moe, self._num_sequences = moe, num_sequences
        self._logits: list[Tensor] = []
        for entry in entries:
            if any(region.name.endswith(".router.weight") for region in entry.regions):
                router = model.get_submodule(entry.name.rpartition(".")[0])
                router.register_forward_hook(self._record)

    def _record(self, module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._logits.append(output if isinstance(output, Tensor) else output[0])

    def pop(self) -> Tensor:
        """Returns the sum over layers of the losses of the last forward pass."""
        losses = [self._layer_loss(logits) for logits in self._logits]
        self._logits.clear()
        return torch.stack(losses).sum()

    def _layer_loss(self, logits_TE: Tensor) -> Tensor:
        moe = self._moe
        logits_SBE = logits_TE.float().unflatten(0, (self._num_sequences, -1)).transpose(0, 1)
        scores_SBE = logits_SBE.softmax(-1) if moe.moe_router_score_function == "softmax" else _sigmoid(logits_SBE)
        chosen_SBK = logits_SBE.detach().topk(moe.moe_router_topk, dim=-1).indices
        counts_BE = count_choices_BE(chosen_SBK, num_experts=logits_TE.shape[-1])
        parts = (
            load_balancing_loss(moe, scores_SBE, counts_BE, sequence_group=SINGLE_RANK, stage_group=SINGLE_RANK),
            z_loss(moe, logits_SBE.logsumexp(-1), sequence_group=SINGLE_RANK),
        )
        return torch.stack([part for part in parts if part is not None]).sum()


def _sigmoid(logits: Tensor) -> Tensor:
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)
