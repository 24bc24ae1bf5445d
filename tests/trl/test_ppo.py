"""Losses and gradients of PPO, entropies, and rewards with a divergence are those of TRL on the same models and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import petatron
from petatron.data.packed_segments import PackedSegment
from petatron.mesh.mesh import ParallelMesh
from petatron.posttrain.advantages import advantages
from petatron.posttrain.token_advantages import divergences
from tests.parity.harness import tiny_run
from tests.trl.test_policy_gradients import ANSWERS, our_step, padded, trainer, trl_inputs
from tests.trl.tiny import check_gradients, gradients, packed, tokenizer

pytestmark = pytest.mark.trl
HEAD = "--pooling last --num-labels 1"
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.0.attention.q.weight": "model.layers.0.self_attn.q_proj.weight",
    "layers.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "task_head.out.weight": "score.weight",
}


@pytest.fixture(scope="module")
def numbers() -> dict[str, list[np.ndarray]]:
    """Of each token of the answers; some values are clipped and others are not."""
    random = np.random.default_rng(21)
    old = [random.normal(0, 0.2, len(ids)) for _, ids in ANSWERS]
    return {"old_values": old, "returns": [x + random.normal(0, 0.5, len(x)) for x in old]}


def test_values_and_their_loss(tmp_path: Path, numbers: dict[str, list[np.ndarray]]):
    """TRL reads values by the same function as the scores of a reward model; the loss is that of the paper's code, as TRL had it."""
    from transformers import AutoModelForSequenceClassification
    from trl.experimental.utils import get_reward

    scorer = petatron.build_model(
        tiny_run(f"{HEAD} --objective reward --seed 4", dtype="float64"), ParallelMesh.single()
    )
    scorer.save_pretrained(tmp_path / "scorer")
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer", dtype=torch.float64)
    segments = []
    for place, (prompt, ids) in enumerate(ANSWERS):
        zeros, learned = np.zeros(len(prompt)), np.array([0.0] * len(prompt) + [1.0] * len(ids), np.float32)
        of_ids = {name: np.concatenate([zeros, of_answers[place]]) for name, of_answers in numbers.items()}
        segments.append(PackedSegment(np.array([*prompt, *ids]), learned, of_ids))
    batch = packed(segments, 32, pairs=False)
    flags = f"--pretrained-checkpoint {tmp_path}/scorer {HEAD} --objective value --seq-length 32 --micro-batch-size 8"
    model = petatron.build_model(tiny_run(flags, dtype="float64"), ParallelMesh.single())
    loss = float(model.train_step([batch]))

    total, count, seen = torch.zeros((), dtype=torch.float64), 0, 0
    for place, (prompt, ids) in enumerate(ANSWERS):
        tokens = torch.tensor([[*prompt, *ids]])
        values = get_reward(theirs, tokens, -1, len(prompt))[0][0, len(prompt) - 1 : -1, 0]
        old, returns = (torch.tensor(numbers[name][place]).float().double() for name in ("old_values", "returns"))
        clipped = torch.clamp(values, old - 0.2, old + 0.2)
        total = total + 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).sum()
        count, seen = count + len(ids), seen + int(((values - old).abs() > 0.2).sum())
    expected = total / count
    expected.backward()
    assert 0 < seen < count
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    ours, named = gradients(model), dict(theirs.named_parameters())
    for name, other in NAMES.items():
        wanted = named[other].grad
        torch.testing.assert_close(ours[name], wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def test_entropy_bonus(folders: tuple[Path, Path], tmp_path: Path):
    random = np.random.default_rng(5)
    old = [random.normal(-4.9, 0.6, len(ids)) for _, ids in ANSWERS]
    model, loss = our_step(folders[0], "average=token entropy_weight=0.3 max_importance_weight=0", old, old)
    theirs, inputs = trainer("GRPO", folders[0], tmp_path, loss_type="dapo", entropy_coef=0.3), trl_inputs(old)
    theirs.current_gradient_accumulation_steps = theirs.args.steps_per_generation = 1
    theirs.model.train()
    expected = theirs._compute_loss(theirs.model, inputs)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(gradients(model), theirs.model, bound=1e-5)


def test_advantages_of_tokens(folders: tuple[Path, Path], tmp_path: Path):
    """What PPO learns with a critic's advantages is what TRL learns with those of tokens."""
    random = np.random.default_rng(8)
    old = [random.normal(-4.9, 0.6, len(ids)) for _, ids in ANSWERS]
    of_tokens = [random.normal(size=len(ids)) for _, ids in ANSWERS]
    model, loss = our_step(folders[0], "average=token max_importance_weight=0", old, old, of_tokens)
    theirs, inputs = trainer("GRPO", folders[0], tmp_path, loss_type="dapo"), trl_inputs(old)
    inputs["advantages"] = padded(of_tokens, torch.float64)
    theirs.current_gradient_accumulation_steps = theirs.args.steps_per_generation = 1
    theirs.model.train()
    expected = theirs._compute_loss(theirs.model, inputs)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(gradients(model), theirs.model, bound=1e-5)


def test_rewards_with_a_divergence(folders: tuple[Path, Path], tmp_path: Path):
    """RLOO subtracts the divergence of a whole answer from its reward; TRL's trainer gets our answers in place of its own."""
    theirs = trainer("RLOO", folders[0], tmp_path, beta=0.2)
    theirs.ref_model = trainer("RLOO", folders[1], tmp_path).model
    theirs.model.train()
    prompts, answers = [[int(x) for x in prompt] for prompt, _ in ANSWERS], [list(map(int, ids)) for _, ids in ANSWERS]
    theirs._generate = lambda _: (prompts, answers, tokenizer().batch_decode(answers))
    rewards = np.array([1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 0.0, 0.75])
    theirs._calculate_rewards = lambda *_: torch.tensor(rewards).unsqueeze(1)
    wanted = theirs._generate_and_score_completions([{"prompt": "1 2"}] * len(ANSWERS))["advantages"]
    log_probs = []
    for folder in folders:
        model = petatron.from_pretrained(folder, ParallelMesh.single())
        of_answers = []
        for prompt, ids in zip(prompts, answers):
            tokens = torch.tensor([[*prompt, *ids]])
            batch = petatron.Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(1, tokens.shape[1] - 1))
            [outputs] = model.forward([batch], collect=["token_losses"])
            of_answers.append(-outputs["token_losses"][0, len(prompt) - 1 :].numpy())
        log_probs.append(of_answers)
    penalties = [float(divergences(now, reference, "k1").sum()) for now, reference in zip(*log_probs)]
    ours = advantages((rewards - 0.2 * np.array(penalties)).reshape(4, 2), "leave-one-out").reshape(-1)
    np.testing.assert_allclose(ours, wanted.numpy(), atol=1e-5)
