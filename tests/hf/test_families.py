"""The list of families: all of them are tested and documented, and a family that is not there is told apart from the nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import ConfigError
from petatron.models.hf import FAMILIES, family_name_of_config
from tests.hf import test_equal, test_generate
from tests.hf.encoder_decoder_zoo import ENCODER_DECODERS
from tests.hf.encoder_zoo import ENCODERS
from tests.hf.family_table import DENSE_LAYOUTS, EXPERT_LAYOUTS, family_table
from tests.hf.images_and_text_zoo import MODELS as IMAGE_MODELS
from tests.hf.zoo import BUILDERS

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_the_table_of_families_is_up_to_date():
    assert family_table() in PAGE.read_text(), "replace the table by tests.hf.family_table.family_table()"


def test_every_family_has_a_model_that_is_compared_and_a_row_that_says_something():
    built = (*BUILDERS.values(), *ENCODERS.values(), *ENCODER_DECODERS.values(), *IMAGE_MODELS.values())
    compared = {build().config.model_type for build in built}
    assert compared == set(FAMILIES)
    assert all(family.models and family.what_differs for family in FAMILIES.values())


def test_the_layouts_of_the_table_are_those_compared():
    stages = {name.removeprefix("variants-") for name in test_generate.LAYOUTS}
    assert set(DENSE_LAYOUTS) <= test_equal.LAYOUTS.keys() | stages
    assert set(EXPERT_LAYOUTS) <= test_equal.EXPERTS.keys() | stages
    assert {name for _, _, names in test_generate.LAYOUTS.values() for name in names} == set(BUILDERS)


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (
        {"model_type": "opt"},
        'model_type "opt" is not a family this version can read or write. Families: gpt2',
    ),
    "more settings": (
        {
            **SHAPE,
            "model_type": "cohere",
            "head_dim": 16,
            "attention_bias": False,
            "mlp_bias": False,
            "logit_scale": 0.1,
        },
        "The nearest is llama; it has logit_scale besides. Families:",
    ),
    "fewer settings": (
        {key: value for key, value in SHAPE.items() if key != "num_attention_heads"} | {"model_type": "mamba"},
        "it lacks num_attention_heads",
    ),
    "many settings": (
        {**SHAPE, "model_type": "odd", **{f"setting_{number}": number for number in range(10)}},
        "setting_7 and 2 more besides",
    ),
    "same settings": (
        {**SHAPE, "model_type": "cohere", "head_dim": 16, "attention_bias": False, "mlp_bias": False},
        "The nearest is llama; config.json has the same settings, so what differs is in its code.",
    ),
    "text model inside": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        "Its text model is a gemma3_text, which is one: save that by itself.",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_family_that_is_not_there_is_told_apart_from_the_nearest(case: str):
    config, message = UNKNOWN[case]
    with pytest.raises(ConfigError) as caught:
        family_name_of_config(config)
    assert message in str(caught.value)
