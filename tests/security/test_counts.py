"""What a file claims of a model is held against bounds before anything of that size is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import CheckpointError
from petatron.models.hf.check_claimed_counts import MAX_WIDTH, check_counts


@pytest.mark.parametrize("name", ["hidden_size", "kv_channels"])
@pytest.mark.parametrize("width", [MAX_WIDTH + 1, -1, 1.5, "64", 10**30])
def test_a_width_that_no_model_has_is_refused(name: str, width: object) -> None:
    with pytest.raises(CheckpointError, match=f"for {name}"):
        check_counts(
            Path("config.json"),
            lambda path, why: CheckpointError(f"{path} {why}"),
            {"num_layers": 1, name: width},
            {},
            num_tensors=10,
            separate_experts=False,
        )
