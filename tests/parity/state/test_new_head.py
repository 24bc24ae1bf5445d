"""A run starts from a model without its head: what both have is loaded, the head is drawn, in every layout; anything else is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import petatron
from petatron.base.errors import CheckpointError
from petatron.checkpoint.huggingface.folder_as_checkpoint import HuggingFaceFolder
from petatron.mesh.mesh import ParallelMesh
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.state.train_state import TrainState
from tests.dist import RankPool
from tests.heard import heard
from tests.longform import later
from tests.parity.harness import BOUNDS, check_traces, tiny_run, train

_BERT = (
    "--model-type bert --norm-placement post --embed-layernorm --normalization LayerNorm --activation gelu --add-bias-linear --norm-bias "
    "--position-embedding-type learned_absolute --no-untie-embeddings-and-output-weights"
)
_TASK = "--objective classification --num-labels 3"


def save_base(folder: Path, flags: str, *, form: str = "run") -> Path:
    """Saves a model that predicts tokens, of another seed: a run, or a folder of Hugging Face."""
    model = petatron.build_model(tiny_run(f"{flags} --seed 7"), ParallelMesh.single())
    if form == "run":
        petatron.save_checkpoint(folder, step=1, model=model)
    else:
        model.save_pretrained(folder)
    return folder


def weights(model: petatron.Model) -> dict[str, Tensor]:
    return {
        shard.name: view.clone()
        for group in model.param_groups
        for shard, view in group_tensor_shards(group, group.weights())
    }


def start(flags: str) -> dict[str, Tensor]:
    return weights(petatron.build_model(tiny_run(flags), ParallelMesh.single()))


@pytest.mark.parametrize("form", ["run", "folder"])
def test_a_decoder_gets_a_head(tmp_path: Path, form: str):
    base = save_base(tmp_path / "base", "", form=form)
    with heard("petatron.pretrained.load_checkpoint") as lines:
        started = start(f"{_TASK} --pretrained-checkpoint {base}")
    theirs, drawn = start("--seed 7"), start(_TASK)
    assert torch.equal(started.pop("task_head.out.weight"), drawn["task_head.out.weight"])
    assert drawn["task_head.out.weight"].abs().max() > 0
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in started.items())
    assert lines == [
        "the head is new: task_head.out.weight drawn with the run's seed",
        "not read, since this model has no such heads: head.weight",
    ]


@pytest.mark.parametrize("form", ["run", "folder"])
def test_an_encoder_keeps_its_pooler(tmp_path: Path, form: str):
    base = save_base(tmp_path / "base", _BERT, form=form)
    with heard("petatron.pretrained.load_checkpoint") as lines:
        started = start(f"{_BERT} {_TASK} --pretrained-checkpoint {base}")
    theirs = start(f"{_BERT} --seed 7")
    assert torch.equal(started["task_head.pooler.weight"], theirs["order_head.pooler.weight"])
    assert lines[0] == "the head is new: task_head.out.bias, task_head.out.weight drawn with the run's seed"
    assert lines[1].endswith("begin with the values of order_head.pooler.bias, order_head.pooler.weight")


def test_a_folder_without_heads_is_enough(tmp_path: Path):
    base = save_base(tmp_path / "base", _BERT, form="folder")
    file = base / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file({name: x for name, x in tensors.items() if not name.startswith(("cls.", "bert.pooler."))}, file)
    started, drawn = start(f"{_BERT} {_TASK} --pretrained-checkpoint {base}"), start(f"{_BERT} {_TASK}")
    assert torch.equal(started["task_head.pooler.weight"], drawn["task_head.pooler.weight"])


def test_what_is_no_head_must_be_there(tmp_path: Path):
    base = save_base(tmp_path / "base", "", form="folder")
    file = base / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file({name: x for name, x in tensors.items() if name != "model.norm.weight"}, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        start(f"{_TASK} --pretrained-checkpoint {base}")
    assert HuggingFaceFolder(base).settings()[0].get("pooling") is None


def test_a_run_that_continues_needs_its_head(tmp_path: Path):
    base = save_base(tmp_path / "base", "")
    with pytest.raises(CheckpointError):
        start(f"{_TASK} --load {base}")
    started = start(f"{_TASK} --load {base} --finetune")
    assert torch.equal(started["norm.weight"], start("--seed 7")["norm.weight"])


def test_master_weights_have_the_new_head_too(tmp_path: Path):
    base = save_base(tmp_path / "base", "")
    run = tiny_run(f"{_TASK} --bf16 --pretrained-checkpoint {base}")
    state = TrainState.build_for_load(run, ParallelMesh.single())
    state.load_pretrained_weights(str(base))
    masters = {shard.name: view for _, shard, view in state.optimizer.master_weights()}
    drawn = start(_TASK)["task_head.out.weight"]
    assert torch.equal(masters["task_head.out.weight"].bfloat16(), drawn.bfloat16())
    assert torch.equal(masters["layers.0.mlp.down.weight"], start("--seed 7")["layers.0.mlp.down.weight"])


LAYOUTS = {
    "--pp 2": 2,
    "--tp 2 --sequence-parallel": 2,
    "--dp 2 --use-distributed-optimizer": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
}


@pytest.mark.parametrize(
    "layout",
    ["--pp 2", "--dp 2 --data-parallel-sharding-strategy optim_grads_params", *map(later, tuple(LAYOUTS)[1:3])],
)
def test_every_layout_starts_with_the_same_weights(ranks: RankPool, tmp_path: Path, layout: str):
    flags = f"{_TASK} --pretrained-checkpoint {save_base(tmp_path / 'base', '')} --micro-batch-size 4"
    alone = train(tiny_run(flags, dtype="float64"))
    run = tiny_run(f"{flags} {layout}", world_size=LAYOUTS[layout], dtype="float64")
    check_traces(ranks, run, alone, BOUNDS["float64"])
