"""Sampling by a model's generation_config.json: which values, and that flags win."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from petatron.base.errors import CheckpointError
from petatron.cli.generation.arguments import GenerationCommand, generation_parser, request_options
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import NO_DEFAULTS, read_sampling_defaults
from petatron.pretrained.detect_model_format import model_files
from petatron.serve.open_engine import ModelSettings

CONFIG = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3, "max_new_tokens": 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def params(folder: Path, *words: str) -> Any:
    options = generation_parser("generate", "", "").parse_args([str(folder), *words])
    command = GenerationCommand(options, [], request_options(options), EngineOptions())
    settings = SimpleNamespace(stop_ids=(3,), sampling_defaults=lambda: read_sampling_defaults(folder))
    return command.with_model_defaults(cast(ModelSettings, settings)).params


def test_the_file_s_sampling_is_the_default_and_flags_win(folder: Path):
    found = params(folder)
    assert (found.temperature, found.top_k, found.top_p, found.stop_ids) == (0.6, 20, 0.95, (3,))
    typed = params(folder, "--temperature", "0", "--top-p", "1")
    assert (typed.temperature, typed.top_k, typed.top_p) == (0.0, 20, 1.0)
    off = params(folder, "--generation-config", "off")
    assert (off.temperature, off.top_k, off.top_p, off.stop_ids) == (1.0, None, None, (3,))


def test_values_that_no_request_may_have_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture):
    wrong = {"temperature": "hot", "top_k": 2.5, "top_p": 0, "min_p": True, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps(wrong))
    assert read_sampling_defaults(folder).given() == {"repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text('{"top_k": 0, "temperature": NaN}')
    assert params(folder).top_k is None and params(folder).temperature == 1.0
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read_sampling_defaults(folder)


def test_a_folder_without_the_file_has_none_and_a_step_has_its_model_s(tmp_path: Path):
    assert read_sampling_defaults(tmp_path) == NO_DEFAULTS
    (tmp_path / "model").mkdir()
    assert model_files(tmp_path) == tmp_path / "model"
