"""Two tiny models in Hugging Face folders, which all files beside compare on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trl.tiny import save_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy, and the reference."""
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder / "policy", seed=1), save_model(folder / "reference", seed=2)
