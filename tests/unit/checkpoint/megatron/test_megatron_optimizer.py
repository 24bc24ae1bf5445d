"""Optimizer state, schedule and position of runs of real Megatron-Core (`tests/golden/make_megatron.py`), both ways."""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_map_only

import petatron
from petatron.base.errors import CheckpointError, ConfigError
from petatron.checkpoint.megatron import TrainingExport, open_megatron
from petatron.checkpoint.megatron.arguments import checkpoint_arguments
from petatron.checkpoint.megatron.legacy_optimizer import _laid_out, _Parameter
from petatron.checkpoint.megatron.optimizer_state import optimizer_parts, read_grad_scaler, read_step
from petatron.checkpoint.megatron.read_megatron_pickles import load_torch_file
from petatron.checkpoint.megatron.training_arguments import megatron_arguments, megatron_scheduler, training_sections
from petatron.checkpoint.megatron.weight_names import MegatronWeight
from petatron.cli.main import main
from petatron.models.batch import Batch
from petatron.pretrained.convert_model import ConversionOptions, MegatronLayout, convert
from petatron.pretrained.model_reader import open_model_reader
from petatron.train.state.train_state import TrainState
from petatron.validate import load_config
from tests.golden.make_megatron import FOLDER, NUM_LOSSES, RUNS, SAVED_AT
from tests.megatron_core.models import TRAINING


def to_petatron(source: Path, target: Path) -> Path:
    assert convert(open_model_reader(source), target, ConversionOptions(target_format="petatron")).has_training
    return target


def state_of(folder: Path) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """All tensors of a Megatron checkpoint by kind and logical name, its training state, and the state of its schedule."""
    opened = open_megatron(folder)
    assert opened.open_training is not None
    training = opened.open_training()
    named = {"model": opened.tensors, **training.tensors}
    tensors = {f"{kind}/{name}": lazy.load() for kind, of_kind in named.items() for name, lazy in of_kind.items()}
    return tensors, training, opened


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if not run.get("bf16")])
def test_the_next_losses_are_megatrons(tmp_path: Path, name: str):
    """Of the run that Megatron-Core continued itself, on the same samples."""
    folder, reference = to_petatron(FOLDER / name, tmp_path / "in"), load_file(FOLDER / name / "reference.safetensors")
    flags = ["--load", str(folder), "--mock-data", "--eval-iters", "0"]
    run = load_config(flags, files=[folder / "config.yaml"]).config
    state = TrainState.build_for_load(run, petatron.launch(run))
    assert state.load(str(folder))
    assert state.progress.iteration == state.progress.updates == SAVED_AT
    losses = []
    for samples in reference["tokens"][SAVED_AT:].long():
        rows = samples.split(run.train.micro_batch_size)
        batches = [Batch(ids[:, :-1], ids[:, 1:], torch.ones(len(ids), ids.shape[1] - 1)) for ids in rows]
        losses.append(float(state.model.train_step(batches)))
        state.advance(batches, state.optimizer.step(**state.update_settings()))
    assert len(losses) == NUM_LOSSES
    torch.testing.assert_close(torch.tensor(losses).double(), reference["losses"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_there_and_back_is_the_same_bit_for_bit(tmp_path: Path, name: str):
    """Weights, master weights, moments, step, schedule, position."""
    source = to_petatron(FOLDER / name, tmp_path / "in")
    layout = MegatronLayout(layer_spec="local", optimizer=RUNS[name].get("optimizer", "plain"))
    back = ConversionOptions(target_format="megatron", megatron=layout)
    assert convert(open_model_reader(source), tmp_path / "back", back).has_training
    tensors, training, _ = state_of(FOLDER / name)
    ours, ours_training, opened = state_of(tmp_path / "back")
    assert ours.keys() == tensors.keys() and {key.partition("/")[0] for key in tensors} >= {"exp_avg", "exp_avg_sq"}
    assert all(torch.equal(ours[key], tensor) for key, tensor in tensors.items())
    assert ("master/norm.weight" in tensors) == bool(RUNS[name].get("bf16"))
    assert all(bool(tensor.any()) for key, tensor in tensors.items() if key.startswith("exp_avg"))
    assert ours_training.updates == training.updates == SAVED_AT
    assert ours_training.progress == training.progress and ours_training.loss_scale == training.loss_scale
    assert opened.iteration == SAVED_AT
    theirs = {
        name: TRAINING[name] for name in ("lr", "min_lr", "lr_decay_iters", "lr_warmup_iters", "adam_beta2", "seed")
    }
    assert (
        theirs.items()
        <= {key: value for section in training.sections.values() for key, value in section.items()}.items()
    )


def test_the_state_of_the_schedule_is_written_as_megatron_wrote_it(tmp_path: Path):
    source = to_petatron(FOLDER / "run-torch_dist-distributed-bf16", tmp_path / "in")
    convert(open_model_reader(source), tmp_path / "back", ConversionOptions(target_format="megatron"))
    ours, theirs = (
        common_of(folder / "iter_0000003" / "common.pt")
        for folder in (tmp_path / "back", FOLDER / "run-torch_dist-distributed-bf16")
    )
    assert ours["opt_param_scheduler"] == theirs["opt_param_scheduler"]
    groups = ours["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["step"]) for group in groups] == [(1.0, SAVED_AT), (0.0, SAVED_AT)]
    assert ours["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert vars(ours["args"])["consumed_train_samples"] == SAVED_AT * TRAINING["global_batch_size"]


def test_what_stays_behind_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = str(FOLDER / "run-torch_dist-distributed-bf16")
    assert main(["checkpoint", "convert", source, str(tmp_path / "in"), "--to", "petatron"]) == 0
    said = capsys.readouterr().out
    assert (
        "optimizer state, schedule and progress went along" in said and "--load" in said and "stay behind" not in said
    )
    assert main(["checkpoint", "convert", source, str(tmp_path / "alone"), "--to", "petatron", "--no-optim"]) == 0
    said = capsys.readouterr().out
    assert "note: optimizer, opt_param_scheduler of" in said and "stay behind" in said and "--from" in said
    legacy = ["--to", "megatron", "--megatron-format", "legacy"]
    assert main(["checkpoint", "convert", str(tmp_path / "in"), str(tmp_path / "legacy"), *legacy]) == 0
    assert re.search(
        "optimizer state, schedule and progress .* stay behind: legacy .* torch_dist", capsys.readouterr().out
    )
    assert main(["checkpoint", "convert", str(tmp_path / "in"), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    assert "optimizer state, schedule and progress of" in capsys.readouterr().out


def changed(tmp_path: Path, name: str, file: str, change: Any) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(FOLDER / name, folder)
    (path,) = folder.glob(f"iter_*/{file}")
    content = common_of(path)
    change(content)
    path.unlink()  # it is mapped
    torch.save(content, path)
    return folder


def common_of(path: Path) -> dict[str, Any]:
    """The content of a file, with the plain ones of its arguments."""
    content = load_torch_file(path)
    plain = (bool, int, float, str, type(None))
    arguments = {name: value for name, value in checkpoint_arguments(content, path).items() if isinstance(value, plain)}
    return tree_map_only(torch.Tensor, torch.clone, {**content, "args": Namespace(**arguments)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda common: common["optimizer"].update(param_state_sharding_type="dp_reshardable"),
            "as dp_reshardable, which is not read. Save it once more with --dist-ckpt-optim-fully-reshardable",
        ),
        (
            lambda common: common["optimizer"].update(param_state_sharding_type="fully_sharded_model_space"),
            "as fully_sharded_model_space, which is not read",
        ),
        (lambda common: vars(common["args"]).update(optimizer="sgd"), "the state of --optimizer sgd"),
        (lambda common: vars(common["args"]).update(decoupled_weight_decay=False), "--no-decoupled-weight-decay"),
        (
            lambda common: [group.pop("step") for group in common["optimizer"]["optimizer"]["param_groups"]],
            "does not say how many updates",
        ),
    ],
)
def test_other_state_is_refused_by_name(tmp_path: Path, change: Any, message: str):
    """And the weights alone convert."""
    folder = changed(tmp_path, "run-torch_dist-distributed-bf16", "common.pt", change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        convert(open_model_reader(folder), tmp_path / "in", ConversionOptions(target_format="petatron"))
    options = ConversionOptions(target_format="petatron", training=False)
    assert not convert(open_model_reader(folder), tmp_path / "in", options).has_training


def test_settings_that_are_missing_are_told_together(tmp_path: Path):
    def change(common: dict[str, Any]) -> None:
        common.pop("opt_param_scheduler")
        for name in ("lr", "train_iters", "global_batch_size"):
            vars(common["args"]).pop(name)

    folder = changed(tmp_path, "run-torch_dist-distributed-bf16", "common.pt", change)
    with pytest.raises(ConfigError) as caught:
        convert(open_model_reader(folder), tmp_path / "in", ConversionOptions(target_format="petatron"))
    assert [problem.where for problem in caught.value.problems] == ["--lr", "--global-batch-size", "--train-iters"]


def test_legacy_state_that_is_not_of_the_weights_is_refused(tmp_path: Path):
    def change(content: dict[str, Any]) -> None:
        content["optimizer"]["optimizer"]["param_groups"][0]["params"].pop()

    folder = changed(tmp_path, "run-legacy-plain-bf16", "mp_rank_00/model_optim_rng.pt", change)
    with pytest.raises(CheckpointError, match=r"is not that of its weights: a group has .* torch_dist"):
        convert(open_model_reader(folder), tmp_path / "in", ConversionOptions(target_format="petatron"))


def test_a_changed_batch_size_continues_in_samples():
    """Megatron counts its schedule in samples, so iterations of two sizes are no measure of it."""
    scheduler = {
        "max_lr": 1e-3,
        "min_lr": 0.0,
        "lr_decay_style": "linear",
        "lr_decay_steps": 800,
        "lr_warmup_steps": 80,
    }
    arguments = {**TRAINING, "iteration": 20, "consumed_train_samples": 100, "global_batch_size": 8, "train_iters": 100}
    sections = training_sections(arguments, {**scheduler, "num_steps": 100}, iteration=20)
    assert sections["schedule"]["lr_decay_samples"] == 800 and sections["schedule"]["lr_warmup_samples"] == 80
    assert sections["train"]["train_samples"] == 100 + 80 * 8 and "train_iters" not in sections["train"]
    steady = training_sections(arguments, {**scheduler, "num_steps": 160}, iteration=20)
    assert steady["schedule"]["lr_decay_iters"] == 100 and steady["schedule"]["lr_warmup_iters"] == 10
    back = megatron_scheduler(megatron_arguments(steady), update_samples=160)
    assert scheduler.items() <= back.items() and back["num_steps"] == 160


def test_flat_buffers_are_laid_out_as_megatron_does():
    """From the last parameter to the first, at multiples of 64; the padding at the end of a bucket is not stored."""
    sizes = {"embedding.word_embeddings.weight": 100, "a.weight": 70, "b.bias": 10}
    group = [_Parameter(name, 0, torch.empty(size)) for name, size in sizes.items()]
    places, total = _laid_out(group, None, 128, tied=False)
    assert [(member.name, start) for member, start in places] == [("b.bias", 0), ("a.weight", 64), (group[0].name, 192)]
    assert total == 292
    places, total = _laid_out(group, None, 128, tied=True)  # the embedding is a bucket of its own, after 192 elements
    assert [start for _, start in places] == [0, 64, 192] and total == 292
    places, total = _laid_out(group, 50, 128, tied=False)  # the first bucket ends with `a`, at 134 of 256 elements
    assert [start for _, start in places] == [0, 64, 134] and total == 234


def test_a_dynamic_loss_scale_goes_both_ways():
    loss_scale = {"value": 512.0, "clean_steps": 7, "patience": 1}
    optim = {"lr": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    sections = {
        "optim": optim,
        "schedule": {},
        "train": {"global_batch_size": 4, "train_iters": 9},
        "precision": {"fp16": True},
    }
    progress = {"consumed_samples": 12, "update_samples": 8}
    weights = [MegatronWeight("a.weight", "row", ("a",), (2, 2)), MegatronWeight("a.bias", "whole", ("b",), (2,))]
    for form in ("distributed", "plain"):
        export = TrainingExport(lambda kind, name: torch.zeros(2), 2, sections, progress, loss_scale, form)
        parts = optimizer_parts(export.common_state(weights, "te", ep=1)["optimizer"], Path("common.pt"))
        assert read_grad_scaler(parts) == loss_scale and read_step(parts, Path("common.pt")) == 2
        assert export.arguments()["params_dtype"] == torch.float16 and export.arguments()["fp16"] is True
