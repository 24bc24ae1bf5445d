"""Conversion between the three forms: what arrives, how much memory it takes, what a crash leaves, and every refusal."""

from __future__ import annotations

import json
import math
import shutil
import signal
import weakref
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import petatron
from petatron.base.errors import CheckpointError, ConfigError, PetatronError
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.megatron import open_megatron
from petatron.checkpoint.save import assign_files_to_ranks
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.cli.main import main
from petatron.config import CheckpointConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.mesh.mesh import ParallelMesh
from petatron.models.hf import folder_entries, parse_config_json
from petatron.pretrained import convert_model as convert_module
from petatron.pretrained import model_reader
from petatron.pretrained.convert_model import (
    ConversionOptions,
    ConversionProgress,
    MegatronLayout,
    TokenizerFiles,
    convert,
)
from petatron.pretrained.detect_model_format import detect_format
from petatron.pretrained.model_reader import ModelReader, open_model_reader
from petatron.train.state.check_run_dirs import check_run_dirs
from petatron.train.state.train_state import TrainState
from petatron.validate import load_config
from tests.longform import diagonal
from tests.unit.checkpoint.megatron.megatron_files import Case, write_legacy

SHAPE = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --vocab-size 37 --seq-length 8 --make-vocab-size-divisible-by 1"
LLAMA = "--activation swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear"
MODELS = {
    "llama": f"{LLAMA} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "gpt2": "--position-embedding-type learned_absolute --activation gelu_tanh",
    "no family": "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --activation squared_relu",
    "mixtral": f"{LLAMA} --num-experts 4 --moe-router-topk 2 --untie-embeddings-and-output-weights",
    "expert bias": f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid",
}

OTHER_KINDS = {
    "deepseek": f"{LLAMA} --multi-latent-attention --q-lora-rank 6 --kv-lora-rank 10 --qk-head-dim 5 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 3 --qk-layernorm --norm-epsilon 1e-6 --position-embedding-type yarn --rotary-scaling-factor 4 --mscale 0.7 "
    "--mscale-all-dim 0.7 --original-max-position-embeddings 4096 --untie-embeddings-and-output-weights --num-experts 4 "
    "--moe-layer-freq [0,1] --moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-dtype fp32 "
    "--moe-shared-expert-intermediate-size 64 --moe-ffn-hidden-size 64 --mtp-num-layers 1",
    "hybrid": "--hybrid-layer-pattern M*-M --num-layers 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 6 --squared-relu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type none --untie-embeddings-and-output-weights",
}


@cache
def run_of(name: str, extra: str = "") -> petatron.RunConfig:
    return petatron.load(
        None,
        f"{SHAPE} {(MODELS | OTHER_KINDS)[name]} {extra} --mock-data --lr 1e-3 --train-iters 1".split(),
        world_size=1,
    ).config


def saved(name: str, folder: Path, extra: str = "", step: int = 3) -> Path:
    """A checkpoint; the weights of an optimizer in a wider precision have more digits than the model's."""
    run = run_of(name, extra)
    model = petatron.build_model(run, ParallelMesh.single())
    optimizer = petatron.build_optimizer(run, model)
    for _, _, view in optimizer.master_weights():
        view.mul_(1.001)
    optimizer.copy_master_to_model_weights()
    for _, bias in model.router_statistics.expert_biases():
        bias.normal_()
    petatron.save_checkpoint(str(folder), step=step, model=model, optimizer=optimizer)
    return folder


def whole(source: ModelReader, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = {key: torch.empty(shape, dtype=dtype) for key, shape in source.shapes.items()}
    source.fill([Chunk(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in tensors.items()])
    return tensors


def same(one: Path, other: Path) -> None:
    first, second = whole(open_model_reader(one)), whole(open_model_reader(other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@diagonal(2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_to_a_model_folder_and_back(tmp_path: Path, name: str):
    run = saved(name, tmp_path / "run")
    convert(open_model_reader(run), tmp_path / "model", ConversionOptions(target_format="huggingface"))
    kept = run / "step-00000003" / "model"
    assert {p.name: p.read_bytes() for p in kept.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()
    }, "a checkpoint's model folder is what a conversion makes"
    convert(open_model_reader(tmp_path / "model"), tmp_path / "again", ConversionOptions(target_format="petatron"))
    same(run, tmp_path / "again")
    again = petatron.from_pretrained(tmp_path / "again")
    assert again.spec.config.activation == run_of(name).model.activation
    petatron.load_checkpoint(str(tmp_path / "again"), model=again)


@diagonal(3)
@pytest.mark.parametrize(
    ("name", "by"), [(name, "petatron") for name in MODELS] + [("llama", "huggingface"), ("mixtral", "megatron")]
)
def test_a_run_of_the_same_model_has_nothing_to_say(tmp_path: Path, name: str, by: Any):
    """The settings of its own config.yaml, or those that the model was trained with; others are told."""
    first = saved(name, tmp_path / "first")
    if by != "petatron":
        convert(open_model_reader(first), tmp_path / "between", ConversionOptions(target_format=by))
        first = tmp_path / "between"
    convert(open_model_reader(first), tmp_path / "start", ConversionOptions(target_format="petatron"))
    load = f"--load {tmp_path}/start --finetune"
    words = f"--config {tmp_path}/start/config.yaml {load} --mock-data --lr 1e-3 --train-iters 1".split()
    written = load_config(words, world_size=1).config
    for run, changes in (
        (written, []),
        (run_of(name, load), []),
        (
            run_of(name, f"{load} --norm-epsilon 1e-3"),
            ["norm_epsilon: 1e-05 then, 0.001 now: the weights are used in another model"],
        ),
    ):
        state = TrainState.build(run, ParallelMesh.single())
        assert state.load(str(tmp_path / "start")) and state.resume_changes == changes


def test_a_checkpoint_that_does_not_say_its_settings_is_not_said_to_have_others(tmp_path: Path):
    saved("llama", tmp_path / "own")  # by a loop of somebody's own
    state = TrainState.build(run_of("llama", f"--load {tmp_path}/own --finetune"), ParallelMesh.single())
    assert state.load(str(tmp_path / "own")) and state.resume_changes == []


def test_a_model_of_no_family_stays_ours(tmp_path: Path):
    run = saved("no family", tmp_path / "run")
    with pytest.raises(CheckpointError) as caught:
        convert(open_model_reader(run), tmp_path / "model", ConversionOptions(target_format="huggingface"))
    assert "no Hugging Face family can express:" in str(caught.value) and "--to petatron" in str(caught.value)
    assert "--activation squared_relu" in str(caught.value) and not (tmp_path / "model").exists()
    petatron.from_pretrained(run).save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "petatron"
    convert(open_model_reader(tmp_path / "model"), tmp_path / "again", ConversionOptions(target_format="petatron"))
    same(run, tmp_path / "again")
    assert petatron.from_pretrained(tmp_path / "again").spec.config.activation == "squared_relu"


@diagonal(2)
@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_to_megatron_and_back(tmp_path: Path, name: str, form: Any):
    run = saved(name, tmp_path / "run")
    layout = MegatronLayout(format=form, tp=2, pp=2, ep=2 if name == "mixtral" else 1)
    convert(open_model_reader(run), tmp_path / "theirs", ConversionOptions(target_format="megatron", megatron=layout))
    source = open_model_reader(tmp_path / "theirs")
    assert (source.format, source.step) == ("megatron", 3)
    convert(source, tmp_path / "again", ConversionOptions(target_format="petatron"))
    same(run, tmp_path / "again")
    convert(
        open_model_reader(tmp_path / "theirs", step=3),
        tmp_path / "model",
        ConversionOptions(target_format="huggingface"),
    )
    kept = run / "step-00000003" / "model" / "model.safetensors"
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == kept.read_bytes()


@diagonal(2)
@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_other_kinds_of_layers_to_megatron_and_back(tmp_path: Path, name: str, form: Any):
    """Also as a Hugging Face folder, whose config.json says the same of the model."""
    run = saved(name, tmp_path / "run")
    layout = MegatronLayout(format=form, tp=2, ep=2 if name == "deepseek" else 1)
    convert(open_model_reader(run), tmp_path / "theirs", ConversionOptions(target_format="megatron", megatron=layout))
    convert(open_model_reader(tmp_path / "theirs"), tmp_path / "again", ConversionOptions(target_format="petatron"))
    same(run, tmp_path / "again")
    convert(open_model_reader(tmp_path / "theirs"), tmp_path / "model", ConversionOptions(target_format="huggingface"))
    folders = (run / "step-00000003" / "model", tmp_path / "model")
    before, after = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert before == after
    before, after = (parse_config_json(json.loads((folder / "config.json").read_text())) for folder in folders)
    assert before == after


def test_expert_biases_go_along(tmp_path: Path):
    run = saved("expert bias", tmp_path / "run")
    convert(open_model_reader(run), tmp_path / "again", ConversionOptions(target_format="petatron"))
    same(run, tmp_path / "again")
    convert(open_model_reader(run), tmp_path / "theirs", ConversionOptions(target_format="megatron"))
    convert(open_model_reader(tmp_path / "theirs"), tmp_path / "back", ConversionOptions(target_format="petatron"))
    same(run, tmp_path / "back")
    loaded = dict(petatron.from_pretrained(tmp_path / "back").router_statistics.expert_biases())
    wanted = whole(open_model_reader(run))
    assert loaded and all(torch.equal(wanted[f"router/{name}"], bias) for name, bias in loaded.items())
    with pytest.raises(CheckpointError, match="--moe-router-enable-expert-bias True cannot be written"):
        convert(open_model_reader(run), tmp_path / "model", ConversionOptions(target_format="huggingface"))
    assert not (tmp_path / "model").exists() and not (tmp_path / "model.tmp").exists()


def test_the_folder_of_a_model_holds_its_expert_biases(tmp_path: Path):
    run = saved("expert bias", tmp_path / "run")
    model = petatron.from_pretrained(run)
    wanted = {name: bias.clone() for name, bias in model.router_statistics.expert_biases()}
    model.save_pretrained(tmp_path / "model")
    for folder in (tmp_path / "model", run / "step-00000003" / "model"):
        found = dict(petatron.from_pretrained(folder).router_statistics.expert_biases())
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], bias) for name, bias in wanted.items())
        assert any(bias.any() for bias in wanted.values())
    convert(
        open_model_reader(tmp_path / "model"),
        tmp_path / "half",
        ConversionOptions(target_format="petatron", dtype=torch.bfloat16),
    )
    narrow = load_file(tmp_path / "half" / "step-00000000" / "model" / "model.safetensors")
    assert {value.dtype for name, value in narrow.items() if "expert_bias" in name} == {torch.float32}
    weights = load_file(tmp_path / "model" / "model.safetensors")
    without = {name: value for name, value in weights.items() if "layers.1.mlp.router.expert_bias" not in name}
    save_file(without, tmp_path / "model" / "model.safetensors")
    for opened in (open_model_reader, petatron.from_pretrained):
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.router\.expert_bias is missing"):
            opened(tmp_path / "model")


def test_wide_weights_come_from_the_optimizer(tmp_path: Path):
    run = saved("llama", tmp_path / "run", "--bf16")
    narrow = load_file(run / "step-00000003" / "model" / "model.safetensors")
    for flag, folder in ((None, "as it is"), (torch.float32, "wide"), (torch.float16, "half")):
        convert(open_model_reader(run), tmp_path / folder, ConversionOptions(target_format="huggingface", dtype=flag))
    as_it_is, wide, half = (load_file(tmp_path / f / "model.safetensors") for f in ("as it is", "wide", "half"))
    assert all(torch.equal(as_it_is[key], value) for key, value in narrow.items())
    assert all(value.dtype == torch.float32 for value in wide.values())
    assert all(torch.equal(wide[key].bfloat16(), value) for key, value in narrow.items())
    assert any(not torch.equal(wide[key], value.float()) for key, value in narrow.items()), (
        "more digits than the model's"
    )
    assert all(torch.equal(half[key], value.half()) for key, value in narrow.items())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("to", ["huggingface", "megatron"])
def test_values_too_large_for_the_dtype_are_refused(tmp_path: Path, to: Any):
    folder = model_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = -1e5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.down.* has values up to 1e\+05, and float16 ends at 6.55e\+04"
    ):
        convert(open_model_reader(folder), tmp_path / "half", ConversionOptions(target_format=to, dtype=torch.float16))
    assert not (tmp_path / "half").exists() and not (tmp_path / "half.tmp").exists()
    convert(open_model_reader(folder), tmp_path / "brain", ConversionOptions(target_format=to, dtype=torch.bfloat16))
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = math.inf  # was there before, and is nobody's loss
    save_file(tensors, folder / "model.safetensors")
    convert(open_model_reader(folder), tmp_path / "half", ConversionOptions(target_format=to, dtype=torch.float16))


def test_one_tensor_at_a_time(tmp_path: Path):
    """Every tensor is read into the same memory, which has the size of the largest."""
    source = open_model_reader(saved("mixtral", tmp_path / "run"))
    entries = folder_entries(source.spec)
    memories = set()

    def fill(chunks: Any) -> None:
        memories.update((c.tensor.untyped_storage().data_ptr(), c.tensor.untyped_storage().nbytes()) for c in chunks)
        source.fill(chunks)

    seen: list[ConversionProgress] = []
    convert(
        replace(source, fill=fill),
        tmp_path / "out",
        ConversionOptions(target_format="petatron"),
        on_progress=seen.append,
    )
    assert [size for _, size in memories] == [max(math.prod(entry.shape) for entry in entries) * 4]
    assert sorted(now.name for now in seen) == sorted(entry.name for entry in entries)
    assert [now.done_bytes for now in seen] == sorted(now.done_bytes for now in seen) and seen[0].done_bytes == 0
    assert seen[-1].total_bytes == sum(math.prod(entry.shape) * 4 for entry in entries) > seen[-1].done_bytes


def test_megatron_is_read_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    convert(
        open_model_reader(saved("mixtral", tmp_path / "run")),
        tmp_path / "theirs",
        ConversionOptions(target_format="megatron"),
    )
    loads: dict[str, weakref.ref[torch.Tensor]] = {}

    def load(name: str, lazy: Any) -> torch.Tensor:
        assert name not in loads, "each of them once, although experts are tensors of their own in the folder"
        assert all(tensor() is None for tensor in loads.values()), "the one before is freed first"
        tensor = lazy.load()
        loads[name] = weakref.ref(tensor)
        return tensor

    checkpoint = open_megatron(tmp_path / "theirs")
    tensors = {name: replace(lazy, load=partial(load, name, lazy)) for name, lazy in checkpoint.tensors.items()}
    monkeypatch.setattr(model_reader, "open_megatron", lambda path: replace(checkpoint, tensors=tensors))
    source = open_model_reader(tmp_path / "theirs")
    convert(source, tmp_path / "out", ConversionOptions(target_format="huggingface"))
    assert sorted(loads) == sorted(tensors)


def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(assign_files_to_ranks, "_MAX_FILE_BYTES", 4000)
    run = saved("llama", tmp_path / "run")
    convert(open_model_reader(run), tmp_path / "model", ConversionOptions(target_format="huggingface"))
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "model" / file)
    same(run, tmp_path / "model")


def test_all_names_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = saved("llama", tmp_path / "run")
    saved("llama", run, step=5)
    for path, step in ((run, 5), (run / "step-00000003", 3), (run / "step-00000003" / "model", 3)):
        assert (detect_format(path), open_model_reader(path).step) == ("petatron", step)
    assert open_model_reader(run, step=3).step == 3
    assert open_model_reader(run / "step-00000003", step=3).step == 3
    monkeypatch.chdir(run / "step-00000003" / "model")
    assert open_model_reader(Path(".")).step == 3
    assert petatron.from_pretrained(".").dtype == torch.float32
    with pytest.raises(CheckpointError, match=r"step-00000003 is one step, and not step 5\. Leave"):
        open_model_reader(run / "step-00000003", step=5)
    with pytest.raises(CheckpointError, match="no checkpoint of step 4"):
        open_model_reader(run, step=4)


class Killed(BaseException):
    """The end of the process."""


class FailingDisk(Disk):
    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def failpoint(self, event: str, path: Path) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@diagonal(2)
@pytest.mark.parametrize("to", ["huggingface", "petatron"])
def test_what_is_there_is_complete(tmp_path: Path, to: Any):
    """Whenever it is stopped, there is nothing or everything; of the many writes it is every third."""
    run = saved("llama", tmp_path / "run")
    at, finished = 0, False
    while not finished:
        at += 1 if at < 8 else 3
        target = tmp_path / f"out-{at}"
        error = Killed() if at % 2 else OSError(28, "No space left on device")
        try:
            convert(open_model_reader(run), target, ConversionOptions(target_format=to), disk=FailingDisk(at, error))
            finished = True
        except (Killed, CheckpointError) as caught:
            assert isinstance(caught, Killed) or "No space left on device" in str(caught)
        assert not target.with_name(f"{target.name}.tmp").exists()
        assert target.exists() or not finished
        if target.exists():
            same(run, target)
    assert at > 10


def test_nothing_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = open_model_reader(saved("llama", tmp_path / "run"))
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", ConversionOptions(target_format="huggingface"))
    with pytest.raises(CheckpointError, match="is already there, and nothing is written over it"):
        convert(source, tmp_path / "empty", ConversionOptions(target_format="petatron"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is already there"):
        convert(source, tmp_path / "file", ConversionOptions(target_format="petatron"))
    (tmp_path / "other.tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"other.tmp is in the way"):
        convert(source, tmp_path / "other", ConversionOptions(target_format="petatron"))
    with pytest.raises(CheckpointError, match="already there"):
        petatron.from_pretrained(tmp_path / "run").save_pretrained(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"other.tmp is in the way"):
        petatron.from_pretrained(tmp_path / "run").save_pretrained(tmp_path / "other")
    monkeypatch.setattr(convert_module, "free_bytes", lambda folder: 10)
    with pytest.raises(CheckpointError, match=r"has 10 B left. Free space there"):
        convert(source, tmp_path / "new", ConversionOptions(target_format="petatron"))
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.tmp").exists()


def test_nothing_is_put_into_a_checkpoint(tmp_path: Path):
    run = saved("llama", tmp_path / "run")
    step = run / "step-00000003"
    for inside in (step / "hf", step / "model" / "deeper" / "hf"):
        with pytest.raises(
            CheckpointError, match=r"is inside the checkpoint .*step-00000003, where nothing else may be"
        ):
            convert(open_model_reader(run), inside, ConversionOptions(target_format="huggingface"))
        with pytest.raises(CheckpointError, match="is inside the checkpoint"):
            petatron.from_pretrained(run).save_pretrained(inside)
    for save in (step, step / "run"):
        with pytest.raises(CheckpointError, match=r"--save .* is inside the checkpoint"):
            check_run_dirs(CheckpointConfig(save=str(save)))
    assert sorted(path.name for path in step.iterdir()) == ["manifest.json", "model", "state"]
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')  # a stranger's
    convert(open_model_reader(run), run / "hf", ConversionOptions(target_format="huggingface"))


def model_folder(tmp_path: Path) -> Path:
    convert(
        open_model_reader(saved("llama", tmp_path / "run")),
        tmp_path / "model",
        ConversionOptions(target_format="huggingface"),
    )
    return tmp_path / "model"


def test_all_tensors_that_do_not_fit_are_named(tmp_path: Path):
    folder = model_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["visual.patch.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.norm.weight"] = torch.zeros(17)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_model_reader(folder)
    for part in (
        "model.layers.1.mlp.up_proj.weight is missing",
        "visual.patch.weight is not a tensor",
        "model.norm.weight is [17]",
    ):
        assert part in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(assign_files_to_ranks, "_MAX_FILE_BYTES", 4000)
    folder = model_folder(tmp_path)
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {gone.name}, which model.safetensors.index.json names"):
        open_model_reader(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match=r"index.json cannot be understood"):
        open_model_reader(folder)


def test_a_run_of_other_settings_is_told_where_to_get_them(tmp_path: Path):
    model = petatron.build_model(run_of("gpt2"), ParallelMesh.single())
    with pytest.raises(CheckpointError, match=r"another model.*say --from .*/model, which takes those of the folder"):
        petatron.load_checkpoint(str(model_folder(tmp_path)), model=model)


def test_a_checkpoint_with_another_models_config(tmp_path: Path):
    run = saved("llama", tmp_path / "run")
    path = run / "step-00000003" / "model" / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    for use in (open_model_reader, petatron.from_pretrained):
        with pytest.raises(CheckpointError, match=r"config.json does not have the content that was saved.*Restore it"):
            use(run)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_model_reader(run)


def test_flipped_bits_are_noticed(tmp_path: Path):
    run = saved("llama", tmp_path / "run")
    path = run / "step-00000003" / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its digest differs"):
        convert(open_model_reader(run), tmp_path / "out", ConversionOptions(target_format="huggingface"))
    assert not (tmp_path / "out").exists()


def test_pickles_are_refused(tmp_path: Path):
    folder = model_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for attempt in (open_model_reader, petatron.from_pretrained):
        with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model.bin\).*Save it again as safetensors"):
            attempt(folder)
    with pytest.raises(CheckpointError, match="Save it again as safetensors"):
        check_run_dirs(CheckpointConfig(load=str(folder), finetune=True))
    with pytest.raises(CheckpointError, match="Save it again as safetensors"):
        check_run_dirs(CheckpointConfig(pretrained_checkpoint=str(folder)))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has config.json and no safetensors"):
        open_model_reader(folder)
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        open_model_reader(tmp_path / "run" / "step-00000003" / "state", model_format="huggingface")


def test_what_holds_no_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"is not a folder.*the name of a model on the hub"):
        open_model_reader(tmp_path / "meta-llama" / "Llama-3.1-8B")
    with pytest.raises(CheckpointError, match="holds no model: neither steps of Petatron"):
        petatron.from_pretrained(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(CheckpointError, match=r"names iter_0000005, but there is no folder"):
        petatron.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"petatron checkpoint convert .* --to petatron"):
        check_run_dirs(CheckpointConfig(load=str(tmp_path)))


def test_a_run_starts_from_a_model_only_when_told(tmp_path: Path):
    folder = str(model_folder(tmp_path))
    check_run_dirs(CheckpointConfig(load=folder, finetune=True))
    with pytest.raises(CheckpointError, match=r"no run to go on with. Use --from"):
        check_run_dirs(CheckpointConfig(load=folder))
    with pytest.raises(CheckpointError, match="Leave --ckpt-step out"):
        check_run_dirs(CheckpointConfig(load=folder, finetune=True, ckpt_step=3))


def test_settings_that_make_no_sense_for_a_model_folder(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        open_model_reader(model_folder(tmp_path), step=3, vocab_size=5)
    assert len(caught.value.problems) == 2


def test_a_tokenizer_goes_along(tmp_path: Path):
    folder = model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "old"}')
    (folder / "README.md").write_text("no part of a model")
    convert(open_model_reader(folder), tmp_path / "ours", ConversionOptions(target_format="petatron"))
    kept = tmp_path / "ours" / "step-00000000" / "model"
    assert (kept / "tokenizer_config.json").read_text() == '{"eos_token": "old"}'
    assert not (kept / "README.md").exists()
    assert petatron.from_pretrained(tmp_path / "ours").spec.config.vocab_size == 37
    new = TokenizerFiles({"tokenizer.json": b"{}"}, eod=7)
    convert(
        open_model_reader(tmp_path / "ours"),
        tmp_path / "back",
        ConversionOptions(target_format="huggingface", tokenizer=new),
    )
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == b"{}"
    assert not (tmp_path / "back" / "tokenizer_config.json").exists()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text())["eos_token_id"] == 7


def test_what_came_with_a_model_goes_along(tmp_path: Path):
    folder = model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["bos_token_id"]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [3, 5], "pad_token_id": 4}))
    beside = {"tokenizer.json": "{}", "generation_config.json": '{"temperature": 0.5}', "chat_template.jinja": "hi"}
    for name, text in beside.items():
        (folder / name).write_text(text)
    model = petatron.from_pretrained(folder)
    model.save_pretrained(tmp_path / "copy")
    assert {name: (tmp_path / "copy" / name).read_text() for name in beside} == beside
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"], "bos_token_id" in written) == ([3, 5], 4, False)
    train_bpe(["some text"], 300, tmp_path / "tokenizer.json")
    model.save_pretrained(tmp_path / "other", tokenizer=tmp_path / "tokenizer.json")
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert not (tmp_path / "other" / "chat_template.jinja").exists()
    assert "temperature" not in (tmp_path / "other" / "generation_config.json").read_text()
    assert json.loads((tmp_path / "other" / "config.json").read_text())["pad_token_id"] is None


def test_dtypes_by_name(tmp_path: Path):
    folder = model_folder(tmp_path)
    for name in ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16):
        assert petatron.from_pretrained(folder, dtype=name).dtype == torch.bfloat16
    for wrong in ("auto", "bf-16", torch.int8):
        with pytest.raises(
            ConfigError, match=r"dtype .* can be computed in. Use one of torch's bfloat16, float16, float32"
        ):
            petatron.from_pretrained(folder, dtype=wrong)


def cli(*words: object) -> int:
    return main(["checkpoint", "convert", *map(str, words)])


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, ours = saved("llama", tmp_path / "run", "--bf16"), tmp_path / "ours"
    assert cli(run, tmp_path / "model", "--to", "huggingface", "--dtype", "fp32", "--step", "3") == 0
    assert "run (petatron, step 3) is now" in capsys.readouterr().out
    assert cli(tmp_path / "model", ours, "--from", "huggingface", "--to", "petatron", "--dtype", "fp16") == 0
    assert f"petatron train --from {ours} ..." in capsys.readouterr().out
    assert load_file(ours / "step-00000000/model/model.safetensors")["model.norm.weight"].dtype == torch.float16
    assert (
        cli(run, tmp_path / "theirs", "--to", "megatron", "--megatron-format", "legacy", "--tp", "2", "--pp", "2") == 0
    )
    assert len(list((tmp_path / "theirs" / "iter_0000003").iterdir())) == 4
    assert cli(tmp_path / "theirs", tmp_path / "back", "--to", "huggingface", "--vocab-size", "37") == 0
    run_again = petatron.load_config(["--lr", "1"], files=[ours / "config.yaml"], require_training=False).config
    assert run_again.model.num_layers == 2 and run_again.model.vocab_size == 37


def test_command_line_says_what_of_a_megatron_checkpoint_stays_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_legacy(tmp_path / "run", Case(), edit=lambda content: content.update(optimizer={}, opt_param_scheduler={}))
    assert cli(tmp_path / "run", tmp_path / "start", "--to", "petatron", "--no-optim") == 0
    assert "note: optimizer, opt_param_scheduler of" in (text := capsys.readouterr().out) and "stay behind" in text


def test_command_line_to_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = model_folder(tmp_path)
    assert cli(folder, tmp_path / "plain", "--to", "megatron") == 0
    assert "note:" not in capsys.readouterr().out
    (folder / "tokenizer.json").write_text("{}")
    assert cli(folder, tmp_path / "dist", "--to", "megatron", "--tp", 2) == 0
    text = capsys.readouterr().out
    assert "torch_dist files have no layout and load in any. --tp 2 stands in" in text
    assert "note: tokenizer.json stay behind" in text
    assert cli(folder, tmp_path / "legacy", "--to", "megatron", "--tp", 2, "--megatron-format", "legacy") == 0
    assert "have no layout" not in capsys.readouterr().out
    words = ("--to", "megatron", "--megatron-format", "legacy", "--megatron-spec", "local")
    assert cli(folder, tmp_path / "local", *words) == 0
    (file,) = (tmp_path / "local").glob("*/mp_rank_00/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    assert content["args"].transformer_impl == "local" and "decoder.layers.0.input_layernorm.weight" in content["model"]
    assert cli(tmp_path / "dist", tmp_path / "back", "--to", "petatron", "--vocab-size", 30) == 2
    assert "--vocab-size 30 contradicts the checkpoint, whose arguments say 37" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_sigterm_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = saved("llama", tmp_path / "run")
    drafts = []

    def failpoint(self: Disk, event: str, path: Path) -> None:
        if event == "written":
            drafts.append((tmp_path / "out.tmp").exists())
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Disk, "failpoint", failpoint)

    def ignore(number: int, frame: object) -> None:
        """Or a failure would end the whole session."""

    before = signal.signal(signal.SIGTERM, ignore)
    try:
        with pytest.raises(SystemExit, match="143"):
            cli(run, tmp_path / "out", "--to", "huggingface")
        assert drafts == [True] and not any(tmp_path.glob("out*"))
        assert signal.getsignal(signal.SIGTERM) is ignore, "as it was before"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = saved("llama", tmp_path / "run")
    words = "--to huggingface --tp 2 --megatron-format legacy --step -1".split()
    assert cli(run, tmp_path / "out", *words) == 2
    assert "3 problems" in (text := capsys.readouterr().err) and "--megatron-format legacy is about Megatron's" in text
    assert cli(run, tmp_path / "out", *"--to megatron --pp 0 --vocab-size 0 --tokenizer x".split()) == 2
    text = capsys.readouterr().err
    assert "--pp 0 is below 1" in text and "no place for it" in text and "--vocab-size 0 is below 1" in text
    train_bpe(["some text"], 300, tmp_path / "tokenizer.json")
    assert cli(run, tmp_path / "out", "--to", "huggingface", "--tokenizer", tmp_path / "tokenizer.json") == 1
    assert "has 264 ids, and the model in" in capsys.readouterr().err
    assert cli(run, tmp_path / "out", "--to", "huggingface", "--tokenizer", tmp_path / "none.json") == 1
    assert cli(tmp_path / "nothing", tmp_path / "out", "--to", "huggingface") == 1
    assert not (tmp_path / "out").exists()


def test_save_pretrained_says_why_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = petatron.build_model(run_of("llama"), ParallelMesh.single())
    (tmp_path / "file").write_text("")
    with pytest.raises(PetatronError, match="model cannot be written: Not a directory"):
        model.save_pretrained(tmp_path / "file" / "model")

    def fail(self: Disk, old: Path, new: Path) -> None:
        if new == tmp_path / "model":
            raise OSError(30, "Read-only file system")
        old.replace(new)

    monkeypatch.setattr(Disk, "rename", fail)
    with pytest.raises(CheckpointError, match="cannot be written: Read-only file system"):
        model.save_pretrained(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    tokenizer = train_bpe(["some text"], 300, tmp_path / "tokenizer.json")
    monkeypatch.undo()
    model.save_pretrained(tmp_path / "model", tokenizer=tmp_path / "tokenizer.json")
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == tokenizer.files()["tokenizer.json"]


def test_a_model_without_a_vocabulary(tmp_path: Path):
    run = saved("no family", tmp_path / "run")
    model = Path(shutil.copytree(run / "step-00000003" / "model", tmp_path / "model"))
    path = model / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 37', '"vocab_size": null'))
    with pytest.raises(ConfigError, match="--vocab-size is not known"):
        open_model_reader(model)
