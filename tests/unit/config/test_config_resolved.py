"""Raw and resolved configs: what a user wrote, and what everything else uses, are two types."""

from __future__ import annotations

import typing
from dataclasses import fields

import pytest

from petatron.base.errors import ConfigError
from petatron.config import (
    ModelConfig,
    ParallelConfig,
    RawModelConfig,
    RawParallelConfig,
    RawRunConfig,
    RawTrainConfig,
    RunConfig,
    TrainConfig,
)
from petatron.config.derived_defaults import resolve_derived
from petatron.config.required_settings import known_vocab_size, required
from petatron.models.registry import model_spec
from petatron.validate import load_config, resolve_config

TWINS = [(RawModelConfig, ModelConfig), (RawParallelConfig, ParallelConfig), (RawTrainConfig, TrainConfig)]
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split()


@pytest.mark.parametrize(("raw", "resolved"), TWINS)
def test_a_resolved_class_only_declares_optional_fields_as_not_optional(raw: type, resolved: type):
    raw_hints, hints = (typing.get_type_hints(config) for config in (raw, resolved))
    defaults = {item.name: item.default for item in fields(raw)}
    assert [item.name for item in fields(resolved)] == list(defaults), "a file would list the fields in another order"
    assert resolved.__annotations__, "a section without derived fields needs no raw class"
    for name in resolved.__annotations__:
        assert defaults[name] is None
        assert hints[name] | None == raw_hints[name], name


def test_every_section_of_a_loaded_config_is_resolved():
    config = load_config(SHAPE, require_training=False).config
    assert type(config) is RunConfig
    for section, (_, resolved) in zip((config.model, config.parallel, config.train), TWINS):
        assert type(section) is resolved
        assert all(getattr(section, name) is not None for name in resolved.__annotations__)


def test_a_config_with_problems_stays_raw():
    loaded, problems = resolve_config([*SHAPE, "--hidden-size", "65"], require_training=False)
    assert type(loaded.config) is RawRunConfig
    assert loaded.config.model.kv_channels is None
    assert [problem.where for problem in problems] == ["--hidden-size"]


def test_resolving_what_was_not_derived_names_every_value_that_is_missing():
    with pytest.raises(ConfigError) as caught:
        resolve_derived(RawRunConfig())
    names = [name for _, resolved in TWINS for name in resolved.__annotations__]
    assert [problem.where for problem in caught.value.problems] == [f"--{name.replace('_', '-')}" for name in names]
    assert "--kv-channels is not set, and does not follow from the other settings. Give it" in str(caught.value)


def test_a_missing_setting_is_asked_for_by_its_flag():
    assert required("lr", 0.0) == 0.0
    with pytest.raises(ConfigError, match=r"--lr is not set, and is needed here\. It is: Peak learning rate"):
        required("lr", None)


def test_a_model_without_a_vocabulary_asks_for_one():
    run = load_config(SHAPE, require_training=False).config
    assert run.model.vocab_size is None
    with pytest.raises(ConfigError, match="--vocab-size is not known"):
        known_vocab_size(run.model)
    with pytest.raises(ConfigError, match="--vocab-size is not known"):
        model_spec(run).params()
