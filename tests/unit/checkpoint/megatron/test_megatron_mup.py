"""muP in Megatron's files: its arguments as typed, the factors that follow from them, and the learning rates of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import petatron
from petatron.base.errors import CheckpointError
from petatron.checkpoint.megatron.arguments import config_from_arguments, unsupported_by_megatron
from petatron.checkpoint.megatron.read_megatron_pickles import load_torch_file
from petatron.mesh.mesh import ParallelMesh
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.validate import load_config

SHAPE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 37 --seq-length 8 --make-vocab-size-divisible-by 1 --mock-data "
    "--lr 1e-2 --min-lr 1e-3 --train-iters 2 --eval-iters 0 --num-workers 0"
)
LLAMA = "--swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
GPT = "--position-embedding-type learned_absolute"
MUP = "--use-mup --mup-base-hidden-size 4 --mup-base-head-dim 2 --mup-embedding-mult 3"
TYPED = {
    "use_mup": True, "mup_base_hidden_size": 4, "mup_base_head_dim": 2.0, "mup_embedding_mult": 3.0, "mup_output_mult": 1.0,
    "mup_attn_scale_power": 1.0,
}  # fmt: skip


def saved(flags: str, folder: Path) -> petatron.RunConfig:
    run = load_config(f"{SHAPE} {flags} --save {folder}".split(), world_size=1).config
    state = TrainState.build(run, ParallelMesh.single())
    for batches in petatron.build_loader(run, state.mesh):
        train_step(state, batches)
        if state.progress.iteration == 2:
            break
    state.save()
    return run


def to(target: Path, source: Path, form: Any) -> None:
    convert(open_model_reader(source), target, ConversionOptions(target_format=form))


def arguments_of(**more: Any) -> dict[str, Any]:
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 37, "seq_length": 8}
    return {**shape, "add_bias_linear": True, "position_embedding_type": "learned_absolute", **more}


@pytest.mark.parametrize("flags", [LLAMA, GPT])
def test_there_and_back(flags: str, tmp_path: Path):
    run = saved(f"{flags} {MUP}", tmp_path / "run")
    to(tmp_path / "theirs", tmp_path / "run", "megatron")
    stored = load_torch_file(next((tmp_path / "theirs").glob("iter_*/common.pt")))
    arguments = stored["args"].fields if hasattr(stored["args"], "fields") else vars(stored["args"])
    assert {name: arguments[name] for name in TYPED} == TYPED and "mup_width_mult" not in arguments
    check_groups(stored["optimizer"]["optimizer"]["param_groups"])
    to(tmp_path / "again", tmp_path / "theirs", "petatron")
    for folder in ("theirs", "again"):
        model = open_model_reader(tmp_path / folder).spec.config
        for name in (*TYPED, "embedding_multiplier", "logits_scaling", "softmax_scale", "mup_width_mult"):
            assert getattr(model, name) == getattr(run.model, name), name
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        logits = [
            petatron.from_pretrained(tmp_path / name).module.logits(tokens) for name in ("run", "theirs", "again")
        ]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def check_groups(groups: list[Mapping[str, Any]]) -> None:
    """Matrices have a fourth of rates and epsilon; embeddings, the output head and vectors have those of the run."""
    rates = {(group["wd_mult"], group["max_lr"], group["min_lr"], group["eps"]) for group in groups}
    assert rates == {(0.0, 1e-2, 1e-3, 1e-8), (1.0, 1e-2, 1e-3, 1e-8), (1.0, 2.5e-3, 2.5e-4, 2.5e-9)}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"use_mup": True}, (1.0, 1.0, 1 / 8)),
        ({"use_mup": True, "mup_base_hidden_size": 4, "mup_width_mult": 1.0}, (1.0, 4.0, 1 / 8)),
        ({**TYPED, "mup_output_mult": 0.5}, (3.0, 2.0, 2**0.5 / 8)),
        ({**TYPED, "use_mup": False}, None),
        ({**TYPED, "multi_latent_attention": True}, (3.0, 4.0, None)),
    ],
)
def test_arguments_say_the_factors(more: dict[str, Any], expected: tuple[float, float, float | None] | None):
    model, _, problems = config_from_arguments(arguments_of(**more), None)
    assert not problems
    found = tuple(model.get(name) for name in ("embedding_multiplier", "logits_scaling", "softmax_scale"))
    assert found == (expected or (None, None, None))


@pytest.mark.parametrize(
    "more", [{"mup_base_hidden_size": 0}, {"mup_output_mult": "x"}, {"mup_base_head_dim": float("nan")}]
)
def test_damaged_arguments_are_refused_by_name(more: dict[str, Any]):
    *_, problems = config_from_arguments(arguments_of(use_mup=True, **more), None)
    assert [problem.where for problem in problems] == [f"--{name.replace('_', '-')}" for name in more]


def test_factors_that_mup_does_not_say_are_refused():
    model = load_config(f"{SHAPE} {LLAMA} {MUP} --softmax-scale 0.3".split(), world_size=1).config.model
    [problem] = unsupported_by_megatron(model)
    assert str(problem).startswith("--softmax-scale 0.3 is not the 0.176777 of --use-mup, and Megatron has no argument")
    plain = load_config(f"{SHAPE} {LLAMA} --logits-scaling 2".split(), world_size=1).config.model
    assert [problem.where for problem in unsupported_by_megatron(plain)] == ["--logits-scaling"]


def test_damaged_settings_of_a_step_are_told(tmp_path: Path):
    saved(f"{LLAMA} {MUP}", tmp_path / "run")
    manifest = next((tmp_path / "run").glob("step-*/manifest.json"))
    text = manifest.read_text()
    assert '"mup_base_hidden_size": 4' in text
    manifest.write_text(text.replace('"mup_base_hidden_size": 4', '"mup_base_hidden_size": "many"'))
    with pytest.raises((CheckpointError, petatron.ConfigError)):
        open_model_reader(tmp_path / "run")
