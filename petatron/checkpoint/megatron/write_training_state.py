"""The state of a run besides its weights, as Megatron's distributed format has it: what its optimizers load by weight, its schedule.

The step is in every group, where Transformer Engine's kernels look for it; for the local implementation, whose optimizer is torch's, it is
the common step of all weights too. The state is that of the distributed optimizer in its fully reshardable form, or that of a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from petatron.checkpoint.megatron.lazy_weight import StateKind
from petatron.checkpoint.megatron.optimizer_state import RESHARDABLE
from petatron.checkpoint.megatron.training_arguments import megatron_arguments, megatron_scheduler
from petatron.checkpoint.megatron.weight_names import LayerSpec, MegatronWeight

OptimizerForm = Literal["distributed", "plain"]
"""Which of Megatron's optimizers is to load the state: that of --use-distributed-optimizer, or the other."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_TABLES = (*_VOCABULARY, "embedding.position_embeddings.weight")


@dataclass(frozen=True, slots=True)
class TrainingExport:
    """What a Megatron run is to continue with.

    fetch: returns a whole logical tensor of a kind, in float32; its master weights are there whatever the model's precision. sections,
    progress, loss_scale: of the run, as checkpoints of ours record them. width: relative to muP's base model; 1 without muP.
    """

    fetch: Callable[[StateKind, str], Tensor]
    updates: int
    sections: Mapping[str, Mapping[str, Any]]
    progress: Mapping[str, int]
    loss_scale: Mapping[str, Any]
    form: OptimizerForm = "distributed"
    width: float = 1.0

    @property
    def tensor_names(self) -> dict[StateKind, str]:
        """What the format calls each kind of tensor that this optimizer has."""
        names: dict[StateKind, str] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        if self.form == "distributed":
            return {"master": "param", **names}
        return {"master": "fp32_param", **names} if self.has_narrow_weights else names

    @property
    def has_narrow_weights(self) -> bool:
        precision = self.sections.get("precision", {})
        return bool(precision.get("bf16") or precision.get("fp16"))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the run besides those of its model."""
        dtype = torch.float32
        if self.has_narrow_weights:
            dtype = torch.bfloat16 if self.sections["precision"].get("bf16") else torch.float16
        return {
            **megatron_arguments(self.sections),
            "consumed_train_samples": self.progress["consumed_samples"],
            "use_distributed_optimizer": self.form == "distributed",
            "dist_ckpt_optim_fully_reshardable": True,
            "ckpt_format": "torch_dist",
            "params_dtype": dtype,
            "no_save_optim": False,
        }

    def common_state(self, weights: Sequence[MegatronWeight], layer_spec: LayerSpec, *, ep: int) -> dict[str, Any]:
        """Returns the state that is no tensor of a weight; ep: over several ranks experts have an optimizer of their own."""
        metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True}
        if self.form == "distributed":
            metadata["distrib_optim_sharding_type"] = RESHARDABLE
        dense = [weight for weight in weights if ep == 1 or weight.expert is None]
        experts = [weight for weight in weights if ep > 1 and weight.expert is not None]
        parts = [
            self._optimizer(members, layer_spec, experts=members is experts) for members in (dense, experts) if members
        ]
        return {
            "optimizer": parts[0] if len(parts) == 1 else dict(enumerate(parts)),
            "opt_param_scheduler": megatron_scheduler(
                megatron_arguments(self.sections), update_samples=self.progress["update_samples"]
            ),
            "num_floating_point_operations_so_far": 0,
            "content_metadata": metadata,
        }

    def _optimizer(self, weights: Sequence[MegatronWeight], layer_spec: LayerSpec, *, experts: bool) -> dict[str, Any]:
        inner: dict[str, Any] = {"param_groups": self._groups(weights, experts)}
        if self.form == "plain":
            inner["state"] = {"common_step": torch.tensor(float(self.updates))} if layer_spec == "local" else {}
            if not self.has_narrow_weights:
                return inner
        optimizer: dict[str, Any] = {"optimizer": inner}
        if self.loss_scale:
            optimizer["grad_scaler"] = {
                "scale": torch.tensor([float(self.loss_scale["value"])]),
                "growth_tracker": self.loss_scale["clean_steps"],
                "hysteresis_tracker": self.loss_scale["patience"],
            }
        return optimizer | ({"param_state_sharding_type": RESHARDABLE} if self.form == "distributed" else {})

    def _groups(self, weights: Sequence[MegatronWeight], experts: bool) -> list[dict[str, Any]]:
        """Returns the parameter groups, of which Megatron takes the members from its model; their learning rate follows the schedule."""
        optim, schedule = self.sections["optim"], self.sections["schedule"]
        kinds = {self._kind(weight) for weight in weights}
        rates = {False: (optim["lr"], schedule.get("min_lr", 0.0))}
        if optim.get("decoupled_lr") is not None:
            rates[True] = (optim["decoupled_lr"], schedule.get("decoupled_min_lr") or schedule.get("min_lr", 0.0))
        return [
            {
                "wd_mult": 0.0 if undecayed else 1.0,
                "lr_mult": 1.0,
                "is_expert_parallel": experts,
                "is_decoupled_lr": of_vocabulary,
                "default_config": not of_vocabulary and width == 1.0,
                "max_lr": rates[of_vocabulary][0] / width,
                "min_lr": rates[of_vocabulary][1] / width,
                "lr": rates[of_vocabulary][0] / width,
                "betas": (optim["adam_beta1"], optim["adam_beta2"]),
                "eps": optim["adam_eps"] / width,
                "weight_decay": 0.0 if undecayed else optim["weight_decay"],
                "bias_correction": True,
                "step": self.updates,
            }
            for undecayed, of_vocabulary, width in sorted(kinds)
        ]

    def _kind(self, weight: MegatronWeight) -> tuple[bool, bool, float]:
        """Returns whether a weight has no decay, whether it has the decoupled learning rate, and what muP divides its own by."""
        is_matrix = len(weight.shape) > 1 and not weight.name.endswith(".bias")
        decoupled = self.sections["optim"].get("decoupled_lr") is not None and weight.name in _VOCABULARY
        return not is_matrix, decoupled, self.width if is_matrix and weight.name not in _TABLES else 1.0
