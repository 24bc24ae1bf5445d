"""Folders of models that no family of transformers has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.data.tokenizer import ByteTokenizer
from petatron.models.hf import OWN_MODEL_TYPE
from petatron.pretrained.saveable_model import Model
from tests.hf.own_models import own_model
from tests.longform import later


@pytest.fixture(
    scope="module", params=["latent", "experts", "recurrent", later("activation"), later("learned positions")]
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    model, folder = own_model(request.param), tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(folder, tokenizer=ByteTokenizer())
    assert json.loads((folder / "config.json").read_text())["model_type"] == OWN_MODEL_TYPE
    return model, folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    own_model("activation").save_pretrained(folder)
    return folder
