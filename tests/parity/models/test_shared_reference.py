"""Where adapters alone are trained, the reference is the model without them: no copy, and the same run to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import petatron
from petatron.mesh.mesh import ParallelMesh
from petatron.parallel.model_beneath_adapters import ModelBeneathAdapters
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.state.train_state import TrainState
from petatron.verify.compare_traces import Tolerances
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import check_traces, tiny_run, train
from tests.parity.models import test_preference_objectives as preferences
from tests.unit.posttrain import rollouts

folder = preferences.folder
"""A model to start from, pairs, and answers that are desirable or not."""

BOUNDS = Tolerances(loss=1e-12, gradient=1e-12, parameter=1e-12)
LORA = "--adapter lora --adapter-rank 3 --adapter-alpha 5 --num-query-groups 4 --lr 0.05"
LAYOUTS = {
    "": 1,
    "--tp 2 --sequence-parallel": 2,
    "--pp 2": 2,
    "--cp 2": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
}


def dpo_run(folder: Path, reference: str, flags: str = "", world_size: int = 1):
    settings = f"--objective-settings beta=0.5 reference={reference}"
    return preferences.run_of(folder, "dpo", f"{LORA} {settings} {flags}", world_size=world_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shared_reference_trains_as_a_copy(ranks: RankPool, folder: Path, layout: str):
    copied = train(dpo_run(folder, f"{folder}/start"))
    check_traces(ranks, dpo_run(folder, "start", layout, LAYOUTS[layout]), copied, BOUNDS)


@pytest.mark.parametrize("kind", [later("dora"), "ia3"])
def test_others_are_turned_off_too(ranks: RankPool, folder: Path, kind: str):
    copied = train(dpo_run(folder, f"{folder}/start", f"--adapter {kind}"))
    check_traces(ranks, dpo_run(folder, "start", f"--adapter {kind}"), copied, BOUNDS)


def open_reference(folder: Path, flags: str, reference: str = "start") -> tuple[ParallelModel, object]:
    state = TrainState.build_for_load(dpo_run(folder, reference, flags), ParallelMesh.single())
    return state.model, state.model.role_models["reference"]


def test_it_has_no_tensors_of_its_own(folder: Path):
    model, reference = open_reference(folder, "")
    assert isinstance(reference, ModelBeneathAdapters) and reference.model is model
    _, copied = open_reference(folder, "", reference=f"{folder}/start")
    assert isinstance(copied, ParallelModel)
    assert sum(p.numel() for p in copied.module.parameters()) > 10_000


def test_whatever_else_is_trained_is_copied(folder: Path, tmp_path: Path):
    """Its weights would change with the run; so would adapters that the run starts with."""
    assert isinstance(open_reference(folder, "--adapter-also-train *norm*")[1], ParallelModel)
    adapted = tiny_run(f"--vocab-size 257 --make-vocab-size-divisible-by 1 --seq-length 48 {LORA}", dtype="float64")
    petatron.build_model(adapted, ParallelMesh.single()).save_pretrained(tmp_path / "adapted")
    _, reference = open_reference(folder, f"--pretrained-checkpoint {tmp_path}/adapted")
    assert isinstance(reference, ParallelModel) and reference.spec.config.adapter == "lora"


def test_the_model_has_its_adapters_again_when_a_reference_fails(folder: Path):
    model, reference = open_reference(folder, "")
    with torch.no_grad():
        for parameter in model.module.parameters():  # which are zero before a load
            parameter.normal_(std=0.3)
    batch = petatron.Batch(torch.zeros(2, 8, dtype=torch.int64))
    before, beneath = (x.forward([batch], collect=["logits"])[0]["logits"] for x in (model, reference))
    assert not torch.allclose(before, beneath)
    with pytest.raises(petatron.PetatronError, match="has no output"):
        reference.forward([batch], collect=["nothing"])
    torch.testing.assert_close(model.forward([batch], collect=["logits"])[0]["logits"], before, rtol=0, atol=0)


def test_reinforcement_learning_shares_its_reference_too(tmp_path: Path):
    prompts = rollouts.write_prompts(tmp_path / "prompts.jsonl")
    start = rollouts.load(f"--rollout-prompts {prompts} --seed 7").config
    petatron.build_model(start, ParallelMesh.single()).save_pretrained(tmp_path / "start")
    learned = []
    for reference in ("start", f"{tmp_path}/start"):
        flags = f"--rollout-prompts {prompts} --pretrained-checkpoint {tmp_path}/start {LORA}"
        settings = f"--objective-settings kl_weight=0.3 reference={reference}"
        learned.append(rollouts.learn(rollouts.load(f"{flags} {settings}")))
    for shared, copied in zip(*learned, strict=True):
        assert shared.loss == pytest.approx(copied.loss, abs=1e-12) and shared.metrics == pytest.approx(copied.metrics)
        assert shared.grad_norm == pytest.approx(copied.grad_norm, rel=1e-12) and shared.grad_norm > 1e-6
