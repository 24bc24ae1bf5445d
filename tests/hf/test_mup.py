"""A model that was trained with muP is a model with factors: transformers computes the same logits, in a family that has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import petatron
from petatron.base.errors import CheckpointError
from petatron.mesh.mesh import ParallelMesh
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from petatron.validate import load_config

SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 16 --vocab-size 96 --mock-data "
    "--train-iters 2 --lr 1e-2 --init-method-std 0.4 --num-workers 0 --eval-iters 0"
)
LLAMA = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
MUP = "--use-mup --mup-base-hidden-size 24 --mup-base-head-dim 6 --mup-embedding-mult 3"
BOUND = 1e-4


def trained(flags: str, folder: Path) -> ParallelModel:
    run = load_config(f"{SHAPE} {flags} {MUP}".split(), world_size=1).config
    model = petatron.build_model(run, ParallelMesh.single())
    optimizer = petatron.build_optimizer(run, model)
    for batches, _ in zip(petatron.build_loader(run, model.mesh), range(2), strict=False):
        model.train_step(batches)
        optimizer.step()
    petatron.save_checkpoint(str(folder), step=2, model=model, optimizer=optimizer)
    return model


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        (LLAMA, "granite"),
        (f"{LLAMA} --untie-embeddings-and-output-weights --num-query-groups 2", "granite"),
        (f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 32", "granitemoe"),
    ],
)
def test_transformers_computes_the_same_logits(flags: str, family: str, tmp_path: Path):
    model, tokens = trained(flags, tmp_path / "run"), torch.randint(96, (2, 16))
    convert(open_model_reader(tmp_path / "run"), tmp_path / "model", ConversionOptions(target_format="huggingface"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert theirs.config.model_type == family
    with torch.no_grad():
        logits = model.module.eval().logits(tokens)
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=0, atol=BOUND)
        again = petatron.from_pretrained(tmp_path / "model").module.eval().logits(tokens)
    assert logits.std() > 0.1, "logits this small would hide a difference"
    torch.testing.assert_close(again, logits, rtol=0, atol=BOUND)


def test_it_generates_without_knowing_of_mup(tmp_path: Path):
    model, prompt = trained(LLAMA, tmp_path / "run"), torch.randint(96, (1, 8))
    opened = petatron.from_pretrained(tmp_path / "run")
    assert not opened.spec.config.use_mup and opened.spec.config.logits_scaling == pytest.approx(64 / 24)
    text = petatron.generate(opened, prompt[0].tolist(), max_new_tokens=4, temperature=0.0)
    grown = prompt
    with torch.no_grad():
        for _ in range(4):
            grown = torch.cat((grown, model.module.eval().logits(grown)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert text == grown[0, 8:].tolist()


def test_what_no_family_has_is_refused_with_the_reasons(tmp_path: Path):
    trained("--position-embedding-type learned_absolute", tmp_path / "run")
    with pytest.raises(CheckpointError, match="no Hugging Face family can express") as error:
        convert(open_model_reader(tmp_path / "run"), tmp_path / "model", ConversionOptions(target_format="huggingface"))
    for flag in ("--softmax-scale", "--logits-scaling", "--embedding-multiplier"):
        assert flag in str(error.value)
