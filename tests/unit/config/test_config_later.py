"""Features that are not in this version: each is refused by one problem, and other rules go on as usual."""

# ruff: noqa: E501  (a table of whole messages reads better unwrapped)

from __future__ import annotations

import importlib
import shlex

import pytest

from petatron.config import check_config, load_config, resolve_config
from petatron.config.checks.check_all import UNSUPPORTED_FIELDS
from petatron.config.derived_defaults import derive_defaults
from petatron.config.schema.fields import fields_by_path, flatten_config, unflatten_config

BASE = shlex.split("--preset tiny-llama --mock-data --lr 1e-3 --train-iters 100")
LATER = "which is not in this version."
PREDICTIONS = {"model.mtp_num_layers": "multi-token prediction"}
"""A feature that is there, refused as if it were not."""


def refuse(monkeypatch: pytest.MonkeyPatch, refused: dict[str, str]) -> None:
    monkeypatch.setattr(importlib.import_module("petatron.config.checks.check_all"), "UNSUPPORTED_FIELDS", refused)


def test_rule_beside_a_later_feature(monkeypatch: pytest.MonkeyPatch):
    """Rules about flags that are not themselves refused still speak, beside the refusals of others."""
    refuse(monkeypatch, PREDICTIONS)
    flags = [*BASE, "--mtp-num-layers", "1", "--multi-latent-attention", "--group-query-attention"]
    found = [str(problem) for problem in resolve_config(flags)[1]]
    message = "--group-query-attention cannot be combined with --multi-latent-attention, which has no key/value heads to share. Use --no-group-query-attention, or leave the other out."
    assert [text for text in found if LATER not in text] == [message]
    assert len([text for text in found if LATER in text]) == 1


def test_a_refused_flag_has_no_other_problem(monkeypatch: pytest.MonkeyPatch):
    flags = [*BASE, "--pp", "3", "--cp", "3"]
    assert [problem.where for problem in resolve_config(flags)[1]] == ["--seq-length", "--pipeline-model-parallel-size"]
    refuse(monkeypatch, {"parallel.pipeline_model_parallel_size": "pipelines"})
    assert [str(problem) for problem in resolve_config(flags)[1]] == [
        "--seq-length 128 is not a multiple of 2 x --context-parallel-size 3 = 6. Nearest: 126 or 132.",
        f"--pipeline-model-parallel-size 3 needs pipelines, {LATER} Use 1.",
    ]


@pytest.mark.parametrize("path", [*UNSUPPORTED_FIELDS, *PREDICTIONS, "model.qk_layernorm"])
def test_refused_until_its_feature_arrives(monkeypatch: pytest.MonkeyPatch, path: str):
    refused = {**PREDICTIONS, "model.qk_layernorm": "qk-norm", **UNSUPPORTED_FIELDS}
    refuse(monkeypatch, refused)
    info = fields_by_path()[path]
    value = {"bool": True, "choice": info.choices[0] if info.choices else ""}.get(info.kind, 2)
    config, _ = derive_defaults(unflatten_config({**flatten_config(load_config(BASE).config), path: value}))
    messages = [str(problem) for problem in check_config(config) if LATER in str(problem)]
    found = info.flag if info.kind == "bool" else f"{info.flag} {value}"
    assert f"{found} needs {refused[path]}, {LATER} Leave it out." in messages
