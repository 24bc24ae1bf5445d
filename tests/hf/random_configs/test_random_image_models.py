"""Folders of random models that read images compute in Petatron what they do in transformers, and come back as they were."""

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
from petatron.models.image_text_batch import make_image_text_batch
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.hf.images_and_text_zoo import grids_of, inputs_of, samples, settings, with_random_vectors
from tests.hf.random_configs.image_families import IMAGE_FAMILIES, random_image_config
from tests.longform import diagonal, later

BOUND, CASES = 1e-4, 25


def test_every_family_that_reads_images_is_drawn():
    assert set(IMAGE_FAMILIES) == {name for name, family in FAMILIES.items() if family.model_type == "vlm"}


@diagonal(3)
@pytest.mark.parametrize(
    ("family", "number"),
    [(family, at) if at < 3 else later(family, at) for family in IMAGE_FAMILIES for at in range(CASES)],
)
def test_a_random_model_of_images_is_that_of_transformers(family: str, number: int, tmp_path: Path):
    config, folder = random_image_config(family, number), tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kind = getattr(transformers, FAMILIES[family].architecture)
    their_config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(number)
    model = with_random_vectors(kind._from_config(their_config, attn_implementation="eager", dtype=torch.float32))
    model.eval().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    ours = petatron.from_pretrained(folder, ParallelMesh.single(), dtype="float32")
    made = samples(settings(model), grids_of(ours.spec.config))
    with torch.no_grad():
        wanted = model(**inputs_of(model, ours.spec.config, made)).logits
    ours.module.eval()
    with torch.no_grad():
        batch = make_image_text_batch(made, ours.spec.config)
        logits = ours.module(batch, collect=("logits",)).collected["logits"]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=BOUND * max(1.0, wanted.std().item()))
    convert(open_model_reader(folder), tmp_path / "ours", ConversionOptions(target_format="petatron"))
    convert(open_model_reader(tmp_path / "ours"), tmp_path / "back", ConversionOptions(target_format="huggingface"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    # What LLaVA's decoder does not read is not kept.
    assert after.keys() <= before.keys() and all(torch.equal(before[name], after[name]) for name in after)
    assert family == "llava" or before.keys() == after.keys()
    assert ours.spec == petatron.from_pretrained(tmp_path / "back", ParallelMesh.single(), dtype="float32").spec
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert from_hf_config(back) == from_hf_config(config)
