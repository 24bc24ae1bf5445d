"""Folders of transformers through our converter and back, and folders that our trainer saved opened by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import petatron
from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.step_folder import read_manifest
from petatron.cli.main import main
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.dist import RankPool
from tests.hf.ours import copy_model, logits_of, problem_of, run_config
from tests.hf.zoo import BUILDERS, NEW_TOKENS, ONE_EXPERT, Truth, build, continued, truth
from tests.longform import diagonal, later, one_in

BOUND = 1e-4


def close(logits: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(logits, wanted, rtol=0, atol=BOUND)


def their_folder(name: str, folder: Path) -> Path:
    build(name).save_pretrained(folder)
    return folder


@diagonal(3)
@pytest.mark.parametrize("name", one_in(3, [*ONE_EXPERT, *BUILDERS]))
def test_a_folder_of_transformers_is_converted(name: str, tmp_path: Path):
    """There: the same logits. Back: the same tensors, bit for bit, and the same settings."""
    true = truth(name)
    theirs = their_folder(name, tmp_path / "theirs")
    convert(open_model_reader(theirs), tmp_path / "ours", ConversionOptions(target_format="petatron"))
    close(logits_of(str(tmp_path / "ours"), true.tokens, {}), true.logits)
    convert(open_model_reader(tmp_path / "ours"), tmp_path / "back", ConversionOptions(target_format="huggingface"))
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == true.weights.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in true.weights.items())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (theirs, tmp_path / "back"))
    assert {key: after[key] for key in before} == before


LAYOUTS = [
    ("llama-gqa", {"tp": 2}),
    ("mixtral", {"dp_shard": 2, "ep": 2}),
    later("gpt2", {"tp": 2}),
    later("qwen2-moe", {"tp": 2}),
    later("qwen3-moe-every-second", {"dp_shard": 2, "ep": 2}),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_any_layout_reads_a_converted_model(ranks: RankPool, name: str, layout: dict[str, int], tmp_path: Path):
    true = truth(name)
    convert(
        open_model_reader(their_folder(name, tmp_path / "theirs")),
        tmp_path / "ours",
        ConversionOptions(target_format="petatron"),
    )
    for logits in ranks.run(logits_of, 2, str(tmp_path / "ours"), true.tokens, layout):
        close(logits, true.logits)


def trained(name: str, folder: Path, flags: str = "") -> tuple[Any, Truth]:
    """Two steps from a folder of transformers, and a checkpoint."""
    true = truth(name)
    run = run_config(true.config, folder, length=true.tokens.shape[1], layout=flags)
    model = petatron.build_model(run, ParallelMesh.single())
    optimizer = petatron.build_optimizer(run, model)
    petatron.load_checkpoint(
        str(their_folder(name, folder / "theirs")), model=model, optimizer=optimizer, moments=False
    )
    for _ in range(2):
        model.train_step([Batch(true.tokens, true.tokens.roll(-1, dims=1), true.counted.float())])
        optimizer.step(lr=1e-3, weight_decay=0.0)
    petatron.save_checkpoint(str(folder / "run"), step=2, model=model, optimizer=optimizer)
    return model, true


@diagonal(3)
@pytest.mark.parametrize("name", one_in(3, BUILDERS))
def test_transformers_opens_what_the_trainer_saved(name: str, tmp_path: Path):
    model, true = trained(name, tmp_path)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "step-00000002" / "model")
    model.module.eval()
    with torch.no_grad():
        ours = model.module.logits(true.tokens)
        close(opened.eval()(true.tokens).logits, ours)
        grown = true.tokens[:, :8]
        theirs = continued(opened, name, grown)
        for _ in range(NEW_TOKENS):
            grown = torch.cat((grown, model.module.logits(grown)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(theirs, grown)
    assert (ours - true.logits).abs().max() > 1e-2, "it did not learn anything"


@pytest.mark.parametrize("name", ["llama-gqa", "mixtral"])
def test_a_checkpoint_of_muon_is_converted_and_back(name: str, tmp_path: Path):
    """Weights alone: transformers computes the same logits, and what comes back is the same, bit for bit, without optimizer state."""
    model, true = trained(name, tmp_path, "--optimizer muon --muon-nesterov")
    convert(open_model_reader(tmp_path / "run"), tmp_path / "theirs2", ConversionOptions(target_format="huggingface"))
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs2").eval()
    model.module.eval()
    with torch.no_grad():
        ours = model.module.logits(true.tokens)
        close(opened(true.tokens).logits, ours)
    assert (ours - true.logits).abs().max() > 1e-2, "it did not learn anything"
    convert(open_model_reader(tmp_path / "theirs2"), tmp_path / "again", ConversionOptions(target_format="petatron"))
    saved, again = (next((tmp_path / folder).glob("step-*")) for folder in ("run", "again"))
    first, second = (
        {
            key: tensor
            for file in sorted((step / "model").glob("*.safetensors"))
            for key, tensor in load_file(file).items()
        }
        for step in (saved, again)
    )
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    kinds = [{key.split("/")[0] for key in read_manifest(step).tensors} for step in (saved, again)]
    assert kinds == [{"model", "momentum_buffer", "exp_avg", "exp_avg_sq"}, {"model"}]


@pytest.mark.parametrize("name", ["gpt2", "mixtral", later("qwen3-head-norm"), later("qwen2-moe")])
def test_a_transformers_model_in_memory(name: str, tmp_path: Path):
    true, theirs = truth(name), build(name)
    theirs.config.bos_token_id, theirs.config.eos_token_id = 3, 5
    model = petatron.from_pretrained(theirs)
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(again, key) == getattr(theirs.config, key)
    model.module.eval()
    with torch.no_grad():
        close(model.module.logits(true.tokens), true.logits)


def test_a_tied_head_in_memory_may_have_another_name_than_in_files():
    """That of GPT-NeoX is `embed_out` there."""
    model = build("gpt-neox")
    tied = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**{**model.config.to_dict(), "tie_word_embeddings": True})
    )
    tokens = truth("gpt-neox").tokens
    with torch.no_grad():
        close(petatron.from_pretrained(tied).module.eval().logits(tokens), tied.eval()(tokens).logits)


@pytest.mark.parametrize(("name", "layout"), [("qwen3-head-norm", {"tp": 2}), ("mixtral", {"pp": 2})])
def test_a_split_model_is_saved_whole(ranks: RankPool, name: str, layout: dict[str, int], tmp_path: Path):
    true = truth(name)
    their_folder(name, tmp_path / "theirs")
    ranks.run(copy_model, 2, str(tmp_path / "theirs"), str(tmp_path / "ours"), layout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"], "nothing else is left"
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        close(opened(true.tokens).logits, true.logits)


def test_dtypes(tmp_path: Path):
    model = build("llama-gqa").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    assert petatron.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16
    assert petatron.from_pretrained(model).dtype == torch.bfloat16
    assert petatron.from_pretrained(tmp_path / "theirs", dtype=torch.float32).dtype == torch.float32
    assert petatron.from_pretrained(tmp_path / "theirs", flags=["--fp16"]).dtype == torch.float16
    convert(open_model_reader(tmp_path / "theirs"), tmp_path / "ours", ConversionOptions(target_format="petatron"))
    convert(
        open_model_reader(tmp_path / "ours"),
        tmp_path / "half",
        ConversionOptions(target_format="huggingface", dtype=torch.float16),
    )
    for folder, dtype in (("ours/step-00000000/model", torch.bfloat16), ("half", torch.float16)):
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto")
        assert {parameter.dtype for parameter in opened.parameters()} == {dtype}
        for ours, theirs in zip(opened.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs.to(dtype))


def test_a_tied_head_that_is_stored_anyway(tmp_path: Path):
    theirs = their_folder("llama-mha-tied", tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, theirs / "model.safetensors")
    convert(open_model_reader(theirs), tmp_path / "ours", ConversionOptions(target_format="petatron"))
    close(logits_of(str(tmp_path / "ours"), truth("llama-mha-tied").tokens, {}), truth("llama-mha-tied").logits)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, theirs / "model.safetensors")
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        open_model_reader(theirs)


def test_flags_that_contradict_the_mesh(ranks: RankPool, tmp_path: Path):
    for text in ranks.run(problem_of, 2, str(their_folder("gpt2", tmp_path)), {"tp": 2}, ["--tp", "1"]):
        assert "--tp 1 say another layout than the mesh has, which is tp 2" in text


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_starts_from_a_folder_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The command line, at two ranks: settings and weights are those of the folder."""
    theirs = their_folder("llama-gqa", tmp_path / "theirs")
    words = "train --from theirs --tp 2 --mock-data --lr 1e-3 --train-iters 2 "
    words += "--eval-iters 0 --log-interval 1 --live off --seq-length 32 --save run --make-vocab-size-divisible-by 4"
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 0
    begin, end = (
        load_file(theirs / "model.safetensors"),
        load_file(tmp_path / "run/step-00000002/model/model.safetensors"),
    )
    assert begin.keys() == end.keys()
    moved = max((begin[key] - end[key]).abs().max().item() for key in begin)
    assert 1e-5 < moved < 1e-2, "two steps away from where it began"
