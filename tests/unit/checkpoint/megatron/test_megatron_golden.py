"""Checkpoints that real Megatron-Core wrote (`tests/golden/make_megatron.py`) load, and give the logits of its own model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.make_megatron import CASES, FOLDER
from tests.megatron_core.compare import logit_difference


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_megatron_core(tmp_path: Path, name: str):
    assert logit_difference(FOLDER / name, tmp_path / "converted") < 2e-6
