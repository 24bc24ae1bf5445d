"""Two losses of one's own, for `petatron train --import examples/losses.py --objective NAME`.

    z-loss         cross-entropy, and weight * log(Z)^2, which keeps the normalizer Z of the softmax near 1
    distillation   alpha * T^2 * KL(teacher || student) at temperature T, and (1 - alpha) * cross-entropy

Neither says a word about the layout: the logits are whole, whatever --tp, --pp, --cp and --dp are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from petatron import Batch, LossSpec, ModelRole, Objective, register_objective


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of every token [B, S]."""
    return F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")


@dataclass(frozen=True)
class ZLoss(Objective):
    weight: float = 1e-4  # --objective-settings weight=1e-3

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return LossSpec("lm loss"), LossSpec("z loss", weight=self.weight)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("logits",)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        logits = outputs["logits"]
        return {"lm loss": cross_entropy(logits, batch), "z loss": logits.logsumexp(dim=-1) ** 2}


@dataclass(frozen=True)
class Distillation(Objective):
    teacher: str  # the folder of a run, of one of its steps, or of a Hugging Face model; an absolute path
    temperature: float = 2.0
    alpha: float = 0.5

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return LossSpec("lm loss", weight=1 - self.alpha), LossSpec("distillation loss", weight=self.alpha)

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {"teacher": ModelRole(self.teacher)}

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("logits",)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        logits = outputs["logits"]
        student = F.log_softmax(logits / self.temperature, dim=-1)
        teacher = F.log_softmax(batch["teacher.logits"].to(logits) / self.temperature, dim=-1)
        divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=-1)
        return {"lm loss": cross_entropy(logits, batch), "distillation loss": self.temperature**2 * divergence}


register_objective("z-loss", ZLoss)
register_objective("distillation", Distillation)
