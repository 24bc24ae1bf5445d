"""Folders of random configurations compute in Petatron what they do in transformers, and come back as they were, or are refused by name.

Both read the same config.json, which has the spellings of published files and not those that transformers writes. Of every family the
default suite has one configuration that can be read, the long form many of any kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import petatron
from petatron.base.errors import ConfigError
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.models.hf import FAMILIES, from_hf_config
from petatron.models.hf.config_translation import ConfigReader
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.hf.random_configs import families
from tests.hf.random_configs.families import random_config
from tests.hf.zoo import weights_of
from tests.longform import diagonal, later

LENGTH, PROMPT, NEW_TOKENS = 40, 8, 5
BOUND = 1e-4
# The recurrence of delta nets carries rounding from token to token, in both programs.
BOUNDS = {"qwen3_next": 3e-3, "kimi_linear": 3e-3}
CASES = 12


def is_read(config: dict[str, Any]) -> bool:
    try:
        from_hf_config(config)
    except ConfigError:
        return False
    return True


def first_read(family: str) -> int:
    return next(number for number in range(100) if is_read(random_config(family, number)))


def build(folder: Path, config: dict[str, Any], number: int) -> Any:
    """A folder with this config.json and random weights, and its model by transformers; None if transformers has no such model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        their_config = transformers.AutoConfig.from_pretrained(folder)
        plain = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
        model = transformers.AutoModelForCausalLM.from_config(their_config, **plain).eval()
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.25)
            model(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception:  # it has no error of its own for what it cannot compute
        return None
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def their_logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def rounding(model: Any, tokens: Tensor, logits: Tensor) -> float:
    """How far their own logits are from those in float64: some weights amplify rounding, on some CPUs more than on others."""
    exact = their_logits(model.double(), tokens)
    model.float()
    return (logits - exact).abs().max().item()


def check_refusal(error: ConfigError, config: dict[str, Any]) -> None:
    """Every problem names a key that is in the file, or that its family has."""
    reader = ConfigReader(config["model_type"], config)
    FAMILIES[config["model_type"]].translate(reader)
    keys = {*config, *reader.keys()}
    for problem in error.problems:
        assert problem.where.split("config.json: ")[-1].partition(".")[0] in keys, str(error)


def stored(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder; dense layers of Kimi-Linear have two names (`tests/hf/models/test_kimi_linear.py`)."""
    return weights_of(load_file(folder / "model.safetensors"))


def check_round_trip(folder: Path, target: Path, config: dict[str, Any]) -> None:
    """The same tensors bit for bit, and a config.json that means the same."""
    convert(open_model_reader(folder), target / "ours", ConversionOptions(target_format="petatron"))
    convert(open_model_reader(target / "ours"), target / "back", ConversionOptions(target_format="huggingface"))
    before, after = stored(folder), stored(target / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert from_hf_config(json.loads((target / "back" / "config.json").read_text())) == from_hf_config(config)


@diagonal(4)
@pytest.mark.parametrize(
    ("family", "number"),
    [case for family in families.FAMILIES for case in ((family, None), *(later(family, at) for at in range(CASES)))],
)
def test_a_random_configuration_is_that_of_transformers(family: str, number: int | None, tmp_path: Path):
    number = first_read(family) if number is None else number
    config = random_config(family, number)
    theirs = build(tmp_path / "theirs", config, number)
    if theirs is None:
        pytest.skip("transformers has no such model")
    tokens = torch.randint(config["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(number))
    wanted = their_logits(theirs, tokens)
    try:
        ours = petatron.from_pretrained(tmp_path / "theirs", ParallelMesh.single(), dtype="float32")
    except ConfigError as error:
        check_refusal(error, config)
        return
    with torch.no_grad():
        found = ours.module.eval().logits(tokens)
    bound = BOUNDS.get(family, BOUND) * max(1.0, wanted.std().item())
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound + 4 * rounding(theirs, tokens, wanted))
    engine = Engine(ours, options=EngineOptions(page_size=4, max_step_tokens=6))
    prompts = tokens[:, :PROMPT]
    answers = engine.complete_on_all_ranks(prompts.tolist(), SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0))
    for _ in range(NEW_TOKENS):  # without their cache, which differs from this in some families
        prompts = torch.cat((prompts, their_logits(theirs, prompts)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert [answer.ids for [answer] in answers] == prompts[:, PROMPT:].tolist()
    check_round_trip(tmp_path / "theirs", tmp_path, config)


def test_every_family_is_drawn():
    assert set(families.FAMILIES) == {name for name, family in FAMILIES.items() if family.model_type == "decoder"}
