"""Folders of random encoder-decoders compute in Petatron what they do in transformers, padded, and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import petatron
from petatron.mesh.mesh import ParallelMesh
from petatron.models.hf import FAMILIES, from_hf_config
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.hf.encoder_decoder_zoo import inputs_of, make_pairs, with_random_weights
from tests.hf.random_configs.encoder_decoder_families import ENCODER_DECODER_FAMILIES, random_encoder_decoder_config
from tests.longform import diagonal, later

BOUND, CASES = 1e-4, 25


def test_every_encoder_decoder_is_drawn():
    assert set(ENCODER_DECODER_FAMILIES) == {name for name, family in FAMILIES.items() if family.model_type == "t5"}


@diagonal(3)
@pytest.mark.parametrize(
    ("family", "number"),
    [(family, at) if at < 3 else later(family, at) for family in ENCODER_DECODER_FAMILIES for at in range(CASES)],
)
def test_a_random_encoder_decoder_is_that_of_transformers(family: str, number: int, tmp_path: Path):
    config, folder = random_encoder_decoder_config(family, number), tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kind = getattr(transformers, FAMILIES[family].architecture)
    their_config = transformers.AutoConfig.from_pretrained(folder)
    model = kind._from_config(their_config, attn_implementation="eager", dtype=torch.float32)
    if number % 2:  # with an output head of its own, which the tensors alone say
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
        config = {**config, "tie_word_embeddings": False}
        model.config.scale_decoder_outputs = False
    with_random_weights(model, number).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    batch, is_source, is_token = make_pairs(number, config["vocab_size"])
    with torch.no_grad():
        wanted = model(**inputs_of(batch, is_source)).logits
    ours = petatron.from_pretrained(folder, ParallelMesh.single(), dtype="float32")
    ours.module.eval()
    with torch.no_grad():
        logits = ours.module(batch, collect=("logits",)).collected["logits"]
    bound = BOUND * max(1.0, wanted.std().item())
    torch.testing.assert_close(logits[is_token], wanted[is_token], rtol=0, atol=bound)
    convert(open_model_reader(folder), tmp_path / "ours", ConversionOptions(target_format="petatron"))
    convert(open_model_reader(tmp_path / "ours"), tmp_path / "back", ConversionOptions(target_format="huggingface"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert ours.spec == petatron.from_pretrained(tmp_path / "back", ParallelMesh.single(), dtype="float32").spec
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert from_hf_config(back) == from_hf_config(config)
