"""Losses and gradients of reinforcement learning are those that TRL's GRPO and RLOO trainers compute of the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import petatron
from petatron.data.packed_segments import PackedSegment
from petatron.mesh.mesh import ParallelMesh
from tests.parity.harness import tiny_run
from tests.trl.tiny import (
    check_gradients,
    gradients,
    open_transformers,
    packed,
    random_pairs,
    tokenizer,
)

pytestmark = pytest.mark.trl
ANSWERS = [(pair.prompt, ids) for pair in random_pairs(4, seed=3) for ids in (pair.chosen, pair.rejected)]
ADVANTAGES = [1.0, -0.5, 0.25, -1.5, 2.0, 0.0, 0.75, -0.125]


@pytest.fixture(scope="module")
def old_log_probs() -> list[np.ndarray]:
    """Of the tokens of each answer: near those of the policy, so that some ratios are clipped and others are not."""
    random = np.random.default_rng(5)
    return [random.normal(-4.9, 0.6, len(ids)) for _, ids in ANSWERS]


def our_step(
    folder: Path,
    settings: str,
    old: list[np.ndarray],
    drawn: list[np.ndarray],
    of_tokens: list[np.ndarray] | None = None,
) -> tuple[petatron.Model, float]:
    """Takes a step with advantages of answers, or of tokens if they are given."""
    segments = []
    named = [np.full(len(ids), x) for (_, ids), x in zip(ANSWERS, ADVANTAGES)] if of_tokens is None else of_tokens
    for (prompt, ids), advantage, before, at_draw in zip(ANSWERS, named, old, drawn):
        zeros, learned = np.zeros(len(prompt)), np.array([0.0] * len(prompt) + [1.0] * len(ids), np.float32)
        of_ids = {
            "advantages": np.concatenate([zeros, advantage]),
            "old_log_probs": np.concatenate([zeros, before]),
            "drawn_log_probs": np.concatenate([zeros, at_draw]),
        }
        segments.append(PackedSegment(np.array([*prompt, *ids]), learned, of_ids, {"rewards": 0.0, "truncated": 0.0}))
    batch = packed(segments, 32, pairs=False)
    wide = {name: x.double() for name, x in batch.arrays.items() if name in segments[0].of_ids}
    flags = (
        f"--pretrained-checkpoint {folder} --objective policy-gradient --objective-settings {settings} --seq-length 32"
    )
    model = petatron.build_model(tiny_run(f"{flags} --micro-batch-size 8", dtype="float64"), ParallelMesh.single())
    return model, float(model.train_step([batch.with_arrays(**wide)]))


def padded(rows: list[Any], dtype: torch.dtype, *, left: bool = False) -> torch.Tensor:
    length = max(map(len, rows))
    out = torch.zeros(len(rows), length, dtype=dtype)
    for place, row in enumerate(rows):
        part = slice(length - len(row), length) if left else slice(0, len(row))
        out[place, part] = torch.as_tensor(np.asarray(row)).to(dtype)
    return out


def trl_inputs(old: list[np.ndarray]) -> dict[str, Any]:
    prompts, answers = [prompt for prompt, _ in ANSWERS], [ids for _, ids in ANSWERS]
    return {
        "prompt_ids": padded(prompts, torch.int64, left=True),
        "prompt_mask": padded([[1] * len(x) for x in prompts], torch.int64, left=True),
        "completion_ids": padded(answers, torch.int64),
        "completion_mask": padded([[1] * len(x) for x in answers], torch.int64),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": padded(old, torch.float64),
        "num_items_in_batch": torch.tensor(float(sum(map(len, answers)))),
    }


def trainer(kind: str, folder: Path, tmp_path: Path, **options: Any) -> Any:
    import trl
    from datasets import Dataset

    config = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=2, report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_dropout=False, temperature=1.0, **options,
    )  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        open_transformers(folder), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=Dataset.from_list([{"prompt": "1 2"}] * 8), processing_class=tokenizer(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ("average=sequence", {"loss_type": "grpo"}),
        ("average=token clip_high=0.28", {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("average=constant constant_tokens=16", {"loss_type": "dr_grpo", "max_completion_length": 16}),
        ("average=sequence dual_clip=1.5", {"loss_type": "grpo", "delta": 1.5}),
        ("ratio=sequence clip_low=3e-2 clip_high=4e-2", {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2,
        }),
        ("average=token kl_weight=0.1", {"loss_type": "dapo", "beta": 0.1}),
        ("kl_weight=0.1 unbiased_kl=false", {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}),
    ],
    ids=["grpo", "dapo", "dr-grpo", "dual-clip", "gspo", "kl", "plain-kl"],
)  # fmt: skip
def test_policy_gradients(
    folders: tuple[Path, Path], tmp_path: Path, old_log_probs: list[np.ndarray], settings: str, options: dict[str, Any]
):
    policy, reference = folders
    ours = f"{settings} max_importance_weight=0 reference={reference}"
    model, loss = our_step(policy, ours, old_log_probs, old_log_probs)
    theirs = trainer("GRPO", policy, tmp_path, **options)
    inputs = trl_inputs(old_log_probs)
    if "beta" in options:
        other = trainer("GRPO", reference, tmp_path).model
        with torch.no_grad():
            inputs["ref_per_token_logps"] = theirs._get_per_token_logps_and_entropies(
                other, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1), inputs["completion_ids"].shape[1],
            )[0]  # fmt: skip
    theirs.current_gradient_accumulation_steps = theirs.args.steps_per_generation = 1
    theirs.model.train()
    expected = theirs._compute_loss(theirs.model, inputs)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(gradients(model), theirs.model, bound=1e-5)


def test_truncated_importance_weights(folders: tuple[Path, Path], tmp_path: Path, old_log_probs: list[np.ndarray]):
    random = np.random.default_rng(9)
    drawn = [old + random.normal(0, 0.7, len(old)) for old in old_log_probs]
    model, loss = our_step(folders[0], "max_importance_weight=1.5", old_log_probs, drawn)
    theirs = trainer("GRPO", folders[0], tmp_path, loss_type="grpo")
    theirs.use_vllm = theirs.vllm_importance_sampling_correction = True
    inputs = trl_inputs(old_log_probs)
    ratio = torch.exp(inputs["old_per_token_logps"] - padded(drawn, torch.float64))
    inputs |= {
        "importance_sampling_ratio": ratio.clamp(max=1.5),
        "sampling_per_token_logps": padded(drawn, torch.float64),
    }
    theirs.current_gradient_accumulation_steps = 1
    theirs.model.train()
    expected = theirs._compute_loss(theirs.model, inputs)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(gradients(model), theirs.model, bound=1e-5)


def test_whole_answers_against_each_other(folders: tuple[Path, Path], tmp_path: Path):
    """RLOO: the ratio of an answer is the product of its tokens' ratios."""
    theirs = trainer("RLOO", folders[0], tmp_path)
    inputs = trl_inputs([np.zeros(len(ids)) for _, ids in ANSWERS])
    with torch.no_grad():
        per_token = theirs._get_per_token_logps_and_entropies(
            theirs.model, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1), inputs["completion_ids"].shape[1],
        )[0]  # fmt: skip
    random = np.random.default_rng(11)
    old = [row[: len(ids)].numpy() + random.normal(0, 0.1, len(ids)) for row, (_, ids) in zip(per_token, ANSWERS)]
    model, loss = our_step(folders[0], "ratio=product max_importance_weight=0", old, old)
    inputs["old_logps"] = torch.tensor([x.sum() for x in old])
    theirs.current_gradient_accumulation_steps = 1
    theirs.model.train()
    expected = theirs._compute_loss(theirs.model, inputs)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(gradients(model), theirs.model, bound=1e-5)
