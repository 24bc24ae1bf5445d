"""What a setting declares beside its type: every list of settings elsewhere is derived from it, also for settings that are added."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Any, ClassVar

import pytest

from petatron.config import ModelConfig, RawModelConfig, RawRunConfig
from petatron.config.adapt.adapt_preset_to_flags import meaningless_values
from petatron.config.adapt.toy_model import toy_values
from petatron.config.flags.reference_page import reference_page
from petatron.config.schema import fields, model_identity
from petatron.config.schema.fields import FieldInfo, all_fields, fields_by_name, flatten_config, unflatten_config
from petatron.config.schema.model_identity import identity_differences, is_identity_field
from petatron.config.schema.numeric_bounds import Size
from petatron.config.schema.optimizers.update_rule_spec import OPTIMIZER_NAME
from petatron.config.schema.setting_metadata import Feature, NotWith, ToySize, settings_section, used_with
from petatron.config.schema.setting_types import WeightsCopy
from petatron.config.setting_bounds_and_conflicts import conflict_problems, number_problems
from petatron.config.unused_settings import training_flags, unused_flag_notices, unused_settings
from petatron.config.value_origins import Setting, SourcedValues, ValueOrigin
from petatron.validate import load_config, resolve_config


@settings_section
class LightningSettings:
    """Lightning attention."""

    feature: ClassVar = Feature(
        "lightning attention", (used_with("model.lightning_heads", reason="no layer is lightning attention"),)
    )
    lightning_heads: (
        Annotated[Size, "selects", ToySize(4), NotWith("multi_latent_attention", rule="is not latent")] | None
    ) = None
    """Number of its heads."""
    lightning_slope: Annotated[float, "above 0"] = 1.0
    """Slope of its decay."""
    lightning_block: Annotated[Size, "runtime", ToySize(16)] = 256
    """Tokens of a block."""


@dataclass(frozen=True, kw_only=True)
class LightningModelConfig(RawModelConfig, LightningSettings):
    """A model with one section more."""

    feature: ClassVar = RawModelConfig.feature


@pytest.fixture
def with_lightning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kind of layer brings its settings: one class, and its name among the bases of the model's."""
    caches = (fields.all_fields, fields.fields_by_name, fields.fields_by_path, model_identity.model_settings)
    more = {**fields.sections(), "model": LightningModelConfig}
    monkeypatch.setattr(fields, "sections", lambda: more)
    model = field(default_factory=LightningModelConfig)
    run_class = dataclasses.make_dataclass(
        "LightningRunConfig", [("model", LightningModelConfig, model)], bases=(RawRunConfig,), frozen=True, kw_only=True
    )
    monkeypatch.setattr(fields, "RawRunConfig", run_class)
    for cached in caches:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


def run_with(**values: Any) -> RawRunConfig:
    return unflatten_config({fields_by_name()[name].path: value for name, value in values.items()})


@pytest.mark.usefixtures("with_lightning")
def test_a_section_of_ones_own_is_everywhere_without_an_edit():
    origins = {info.path: ValueOrigin("flag", info.flag) for info in all_fields()}
    run = run_with(lightning_slope=2.0, lightning_block=64)
    notices = [notice for notice in unused_flag_notices(run, origins) if "lightning" in notice]
    reason = "has no effect: no layer is lightning attention"
    assert notices == [f"--lightning-slope {reason}", f"--lightning-block {reason}"]
    assert unused_settings(run) >= {"model.lightning_slope", "model.lightning_block"}
    assert (
        "### lightning attention\n\nNotice where they have no effect: no layer is lightning attention."
        in reference_page()
    )

    wrong = run_with(lightning_heads=-1, lightning_slope=0.0, multi_latent_attention=True)
    assert {problem.where for problem in number_problems(wrong)} >= {"--lightning-heads", "--lightning-slope"}
    assert "--lightning-heads -1 is not latent. Leave one out." in [
        str(problem) for problem in conflict_problems(wrong)
    ]
    assert not [problem for problem in number_problems(run_with(lightning_slope=0.0)) if "lightning" in problem.where]

    assert [is_identity_field(name) for name in ("lightning_slope", "lightning_block")] == [True, False]
    first, second = ({"lightning_heads": 4, "lightning_slope": slope, "lightning_block": slope} for slope in (1.0, 2.0))
    assert identity_differences(first, second) == ["lightning_slope"]
    assert identity_differences(first, {**second, "lightning_heads": None}) == ["lightning_heads"]
    toy, _ = toy_values(flatten_config(run_with(lightning_heads=32)), {}, has_tokenizer=False)
    assert toy["model.lightning_heads"] == 4 and toy["model.lightning_block"] == 16
    values = flatten_config(run_with(lightning_heads=8))
    of_preset = dict.fromkeys(values, ValueOrigin("preset", "mine"))
    typed = {
        "model.multi_latent_attention": Setting("model.multi_latent_attention", True, ValueOrigin("flag", "--mla"))
    }
    dropped, said = meaningless_values(SourcedValues(values, of_preset), typed, heads_may_follow=True)
    assert dropped == ["model.lightning_heads"] and "--lightning-heads 8" in said[0]


def test_every_condition_reads_settings_that_exist_and_completes_the_sentence():
    """Conditions are functions of a config, and reasons may name its settings: a misspelled one would fail in a user's run."""
    random = Random(0)
    for _ in range(30):
        values = {info.path: random.choice(_some_values(info)) for info in all_fields()}
        run = unflatten_config(values)
        for info in all_fields():
            for condition in info.used_when:
                condition.holds(run)
                reason = condition.reason.format(run=run)
                assert reason == "" or (reason[0].islower() or reason.startswith(("--", "FP8"))), reason
                assert not reason.endswith("."), reason


def _some_values(info: FieldInfo) -> list[Any]:
    if info.name == "hybrid_layer_pattern":
        return [None, "M*-E", "G-", "MM"]
    if info.is_list:
        return [info.default]
    kinds = {
        "int": [1, 2],
        "float": [0.5, 1.0],
        "bool": [False, True],
        "str": ["1", "[0,1]"],
        "choice": [*info.choices],
    }
    return [info.default, *kinds[info.kind]]


def test_notes_name_settings_and_words_that_exist():
    known = {"path", "private", "repeatable", "one start", "one load", "switch", "selects", "variant", "later"}
    known |= {"identity", "redundant", "limit", "runtime", "training", OPTIMIZER_NAME, WeightsCopy}
    for info in all_fields():
        numbers = {mark for mark in info.marks if mark.rpartition(" ")[0] in ("at least", "above", "below")}
        assert info.marks - numbers <= known, info.path
        assert all(note.setting in fields_by_name() for note in info.notes_of(NotWith)), info.path
        if info.section not in ("model", "moe"):
            assert info.role in ("runtime", "training"), f"{info.path} is no part of a model"


def test_a_model_has_no_difference_from_itself():
    """Whatever its settings, used or not; and a default that is stored or not is the same."""
    random = Random(1)
    settings = {info.name: info for info in all_fields() if info.section in ("model", "moe")}
    for _ in range(200):
        chosen = random.sample(sorted(settings), 12)
        run = run_with(**{name: random.choice(_some_values(settings[name])) for name in chosen})
        derived = dict.fromkeys(ModelConfig.__annotations__, 1)
        resolved = ModelConfig(**{**dataclasses.asdict(run.model), **derived})
        identity = model_identity.model_identity(resolved, run.moe)
        assert identity_differences(identity, {**dataclasses.asdict(resolved), **dataclasses.asdict(run.moe)}) == []
        assert identity_differences(identity, identity) == []


def test_a_checkpoint_that_says_every_setting_equals_one_that_says_what_it_uses():
    """Identities had more settings before: those of features that a model does not use are not compared."""
    run = load_config(["--num-layers", "2"], preset="tiny-llama", require_training=False).config
    identity = model_identity.model_identity(run.model, run.moe)
    full = {**dataclasses.asdict(run.model), **dataclasses.asdict(run.moe)}
    assert not identity.keys() & {
        "kv_lora_rank",
        "mamba_state_dim",
        "moe_router_topk",
        "mtp_loss_scaling_factor",
        "clip_qkv",
    }
    assert identity.keys() >= {"rotary_base", "yarn_mscale", "window_size", "ffn_hidden_size"}
    assert identity_differences({**full, "mamba_state_dim": 7, "kv_lora_rank": 7, "moe_router_topk": 7}, identity) == []
    assert identity_differences({**full, "clip_qkv": 7.0}, identity) == ["clip_qkv"]


def test_only_training_reads_what_is_for_training():
    origins = {info.path: ValueOrigin("flag", info.flag) for info in all_fields()}
    flags = training_flags(origins)
    assert {"--lr", "--hidden-dropout", "--moe-aux-loss-coeff", "--save", "--train-iters", "--profile"} <= {*flags}
    assert not {"--seed", "--device", "--load", "--max-position-embeddings", "--tp-comm-overlap", "--rotary-base"} & {
        *flags
    }


def test_factors_of_longrope_without_the_short_ones_are_a_problem():
    """This was a traceback."""
    flags = ["--position-embedding-type", "yarn", "--longrope-long-factor", "[1.0,1.0]"]
    _, problems = resolve_config(flags, preset="tiny-llama", require_training=False)
    assert "--longrope-short-factor is missing, and LongRoPE has two lists of factors. Give both, or neither." in map(
        str, problems
    )
