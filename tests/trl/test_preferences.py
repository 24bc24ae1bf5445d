"""Losses, gradients and metrics of preference objectives are those that TRL's trainers compute of the same pairs and weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import petatron
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from tests.parity.harness import tiny_run
from tests.trl.tiny import (
    Pair,
    answer,
    check_gradients,
    gradients,
    open_transformers,
    packed,
    random_pairs,
    tokenizer,
)

pytestmark = pytest.mark.trl
PAIRS = random_pairs(6)


def our_model(folder: Path, objective: str, batch: Batch) -> tuple[petatron.Model, float]:
    flags = f"--pretrained-checkpoint {folder} --objective {objective} --seq-length 32 --micro-batch-size 8"
    model = petatron.build_model(tiny_run(flags, dtype="float64"), ParallelMesh.single())
    return model, float(model.train_step([batch]))


def pair_batch(pairs: Sequence[Pair]) -> Batch:
    segments = [answer(pair.prompt, ids) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    return packed(segments, 32, pairs=True)


def pair_rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    def text(ids: Sequence[int]) -> str:
        return "".join(f" {number}" for number in ids)

    return [{"prompt": text(x.prompt), "chosen": text(x.chosen), "rejected": text(x.rejected)} for x in pairs]


def trainer_options(folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "report_to": "none", "use_cpu": True, "bf16": False,
        "max_length": 64, "gradient_checkpointing": False, "disable_dropout": False, **others,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("beta=0.5", {"loss_type": ["sigmoid"]}),
        ("beta=0.5 loss_type=ipo", {"loss_type": ["ipo"]}),
        ("beta=0.5 loss_type=hinge", {"loss_type": ["hinge"]}),
        ("beta=0.5 loss_type=robust label_smoothing=0.2", {"loss_type": ["robust"], "label_smoothing": 0.2}),
        ("beta=0.5 length_normalized=true", {"loss_type": ["sigmoid_norm"]}),
        ("beta=0.5 chosen_weight=0.3", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_direct_preferences(folders: tuple[Path, Path], tmp_path: Path, ours: str, theirs: dict[str, Any]):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    policy, reference = folders
    batch = pair_batch(PAIRS)
    model, loss = our_model(policy, f"dpo --objective-settings reference={reference} {ours}", batch)
    args = DPOConfig(**trainer_options(tmp_path, beta=0.5, **theirs))
    trainer = DPOTrainer(
        open_transformers(policy), open_transformers(reference), args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_list(pair_rows(PAIRS)),
    )  # fmt: skip
    examples = [{"prompt_ids": x.prompt, "chosen_ids": x.chosen, "rejected_ids": x.rejected} for x in PAIRS]
    expected = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    check_gradients(gradients(model), trainer.model)


def test_odds_ratios(folders: tuple[Path, Path], tmp_path: Path):
    """TRL's cross-entropy of chosen answers has their prompts too, so it is compared apart."""
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model, loss = our_model(folders[0], "orpo --objective-settings beta=0.5 chosen_weight=0", pair_batch(PAIRS))
    trainer = ORPOTrainer(
        open_transformers(folders[0]), args=ORPOConfig(**trainer_options(tmp_path, beta=0.5)),
        processing_class=tokenizer(), train_dataset=Dataset.from_list(pair_rows(PAIRS)),
    )  # fmt: skip
    chosen, rejected = mean_log_probs(trainer.model, PAIRS)
    losses = trainer.odds_ratio_loss(chosen, rejected)[0]
    expected = -losses.mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5), "TRL computes in float32"
    check_gradients(gradients(model), trainer.model, bound=1e-5)
    model, whole = our_model(folders[0], "orpo --objective-settings beta=0.5", pair_batch(PAIRS))
    answers = [(x.prompt, x.chosen) for x in PAIRS]
    log_probs = torch.cat([token_log_probs(trainer.model, *x) for x in answers])
    assert whole == pytest.approx(loss - log_probs.mean().item(), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simple_preferences(folders: tuple[Path, Path], tmp_path: Path, smoothing: float):
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    settings = f"beta=2.5 gamma=1.5 label_smoothing={smoothing}"
    model, loss = our_model(folders[0], f"simpo --objective-settings {settings}", pair_batch(PAIRS))
    options = trainer_options(tmp_path, beta=2.5, loss_type="simpo", simpo_gamma=1.5, label_smoothing=smoothing)
    trainer = CPOTrainer(
        open_transformers(folders[0]), args=CPOConfig(**options, cpo_alpha=0.0), processing_class=tokenizer(),
        train_dataset=Dataset.from_list(pair_rows(PAIRS)),
    )  # fmt: skip
    expected = trainer.cpo_loss(*mean_log_probs(trainer.model, PAIRS))[0].mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    check_gradients(gradients(model), trainer.model)


def test_answers_without_pairs(folders: tuple[Path, Path], tmp_path: Path):
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    policy, reference = folders
    labels = [True, False, True, True, False, False]
    others = [*PAIRS[1:], PAIRS[0]]
    segments = []
    for pair, other, label in zip(PAIRS, others, labels):
        segments += [answer(pair.prompt, ids, desirable=label) for ids in (pair.chosen, other.chosen)]
    weights = "desirable_weight=1.5 undesirable_weight=0.5"
    objective = f"kto --objective-settings reference={reference} beta=0.5 {weights}"
    model, loss = our_model(policy, objective, packed(segments, 32, pairs=True))
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": label}
        for row, label in zip(pair_rows(PAIRS), labels)
    ]
    options = trainer_options(tmp_path, beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)
    trainer = KTOTrainer(
        open_transformers(policy), open_transformers(reference), args=KTOConfig(**options), processing_class=tokenizer(),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    examples = [
        {"prompt_ids": x.prompt, "completion_ids": x.chosen, "KL_completion_ids": other.chosen, "label": label}
        for x, other, label in zip(PAIRS, others, labels)
    ]
    expected = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    check_gradients(gradients(model), trainer.model)


def token_log_probs(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    tokens = torch.tensor([[*prompt, *ids]])
    log_probs = model(tokens[:, :-1]).logits.log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None])[0, len(prompt) - 1 :, 0]


def mean_log_probs(model: Any, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.stack([token_log_probs(model, x.prompt, x.chosen).mean() for x in pairs])
    return chosen, torch.stack([token_log_probs(model, x.prompt, x.rejected).mean() for x in pairs])
