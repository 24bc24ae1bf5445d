"""What Megatron-LM saved opens wherever the folder of a Hugging Face model does, here what real Megatron-Core wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import petatron
from petatron.base.errors import CheckpointError, ConfigError
from petatron.cli.main import main
from petatron.serve.open_engine import model_settings
from tests.golden.make_megatron import CASES, FOLDER
from tests.megatron_core.models import VOCAB

TRAIN = "--mock-data --lr 1e-3 --train-iters 1 --eval-iters 0 --log-interval 1".split()


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer beside it."""
    folder = tmp_path / "megatron"
    shutil.copytree(FOLDER / "llama-torch_dist-newer", folder)
    words = {f"w{number}": number for number in range(VOCAB - 1)} | {"<eos>": VOCAB - 1}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_from_pretrained_has_megatrons_logits(name: str):
    model = petatron.from_pretrained(FOLDER / name)
    model.module.eval()
    reference = load_file(FOLDER / name / "reference.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model.module.logits(reference["tokens"]), reference["logits"], rtol=0, atol=2e-6)


def test_a_run_starts_from_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """With the model's own settings: neither its shape nor its vocabulary is asked for."""
    source = str(FOLDER / "moe-torch_dist")
    assert main(["train", "--from", source, *TRAIN, "--save", str(tmp_path / "run"), "--log-dir", str(tmp_path)]) == 0
    assert "2 layers of width 16" in capfd.readouterr().out
    started, loaded = petatron.from_pretrained(tmp_path / "run"), petatron.from_pretrained(source)
    assert (started.module.norm.weight - loaded.module.norm.weight).abs().max() < 2e-3  # one update away
    run = petatron.load(None, ["--from", source, *TRAIN])
    assert run.config.moe.num_experts == 4 and run.config.model.vocab_size == VOCAB


def test_load_with_finetune_takes_its_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    source = str(FOLDER / "run-legacy-distributed-pp2")
    flags = ["--load", source, "--use-checkpoint-args", *TRAIN, "--log-dir", str(tmp_path)]
    assert main(["train", *flags, "--finetune"]) == 0
    assert main(["train", *flags]) == 1
    said = capfd.readouterr().err
    assert f"petatron checkpoint convert {source} NEW_FOLDER --to petatron" in said and f"--from {source}" in said


def test_another_model_is_told(tmp_path: Path):
    flags = ["--pretrained-checkpoint", str(FOLDER / "llama-torch_dist-newer"), "--vocab-size", str(VOCAB), *TRAIN]
    run = petatron.load("tiny-llama", flags)
    with pytest.raises(CheckpointError, match=r"is of another model: it has no .*weight"):
        petatron.build_model(run, petatron.launch(run))


def test_it_generates_with_a_tokenizer_beside_it(with_tokenizer: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", str(with_tokenizer), "--prompt", "w1", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip().startswith("w")
    settings = model_settings(with_tokenizer)  # what serve, eval and lm-eval open a checkpoint with
    assert settings.tokenizer is not None and settings.vocab_size == VOCAB and settings.stop_ids == (VOCAB - 1,)


def test_it_is_evaluated(with_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data.txt").write_text("w1\n\nw2\n")
    assert main(["eval", str(with_tokenizer), "--task", "text", "--data", str(tmp_path / "data.txt"), "--no-bos"]) == 0
    assert "loss" in capsys.readouterr().out.lower()


def test_kinds_of_weights_are_those_of_our_checkpoints():
    with pytest.raises(ConfigError, match="a megatron model has one set of weights"):
        petatron.from_pretrained(FOLDER / "moe-torch_dist", weights="ema")
