"""The models that a config can name: `--model-type` is looked up here, and `model_spec` makes the description.

A model from outside is registered before its config is used, once per process:

    import petatron

    def hybrid(config, moe):
        spec = petatron.decoder_spec(config, moe)
        ...                                        # other layers, see docs/models.md
        return dataclasses.replace(spec, layers=layers)

    petatron.register_model("my-hybrid", hybrid)   # then: --model-type my-hybrid

On the command line `--import FILE_OR_MODULE` imports it first. Only code that was imported can register a model: a file can name one,
and cannot bring its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from petatron.base.errors import ConfigError, Problem
from petatron.config.import_user_modules import IMPORT_FLAG, import_installed_plugins
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.recommender import RECOMMENDER_MODEL
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.models.adapter_targets import with_adapters
from petatron.models.decoder_spec import decoder_spec
from petatron.models.encoder_decoder_spec import encoder_decoder_spec
from petatron.models.masked_language_spec import masked_language_spec
from petatron.models.model_spec import ModelSpec
from petatron.models.recommender_spec import recommender_spec
from petatron.models.vision_language_spec import vision_language_spec

ModelBuilder = Callable[[ModelConfig, MoEConfig], ModelSpec]
"""Makes a spec from the derived settings of a model; a dense one has no `num_experts`."""

_BUILDERS: dict[str, ModelBuilder] = {
    "decoder": decoder_spec,
    MASKED_LANGUAGE_MODEL: masked_language_spec,
    ENCODER_DECODER_MODEL: encoder_decoder_spec,
    RECOMMENDER_MODEL: recommender_spec,
    VISION_LANGUAGE_MODEL: vision_language_spec,
}


def register_model(name: str, builder: ModelBuilder) -> None:
    """Makes `--model-type name` build the model that `builder` describes; the name must be new, or have the same builder.

    >>> register_model("my-decoder", decoder_spec)
    >>> spec_from_config(ModelConfig(model_type="my-decoder", num_attention_heads=1)).layers
    ()
    """
    if _BUILDERS.setdefault(name, builder) is not builder:
        raise ConfigError([Problem("--model-type", name, "is registered already", "Register it under another name.")])


def model_spec(run: RunConfig) -> ModelSpec:
    """Returns the description of a run's model.

    >>> from petatron.validate import load_config
    >>> run = load_config(["--vocab-size", "256"], preset="tiny-llama", require_training=False).config
    >>> len(model_spec(run).layers) == run.model.num_layers
    True
    """
    return spec_from_config(run.model, run.moe)


def is_registered(model_type: str) -> bool:
    """Whether a model has been registered, by code that was imported or by an installed package.

    >>> is_registered("decoder")
    True
    """
    if model_type not in _BUILDERS:
        import_installed_plugins()
    return model_type in _BUILDERS


@lru_cache(maxsize=64)
def spec_from_config(config: ModelConfig, moe: MoEConfig | None = None) -> ModelSpec:
    """Returns the description of the model with these derived settings."""
    if not is_registered(config.model_type):
        raise ConfigError([_unknown_model(config.model_type)])
    return with_adapters(_BUILDERS[config.model_type](config, moe or MoEConfig()))


def without_task_head(spec: ModelSpec) -> ModelSpec:
    """Returns the description of the same layers in a model that predicts tokens: the one that a new head is trained on.

    >>> from petatron.validate import load_config
    >>> run = load_config(["--vocab-size", "256", "--pooling", "last"], preset="tiny-llama", require_training=False).config
    >>> sorted(without_task_head(model_spec(run)).params().keys() - model_spec(run).params().keys())
    ['head.weight']
    """
    plain = replace(spec.config, pooling=None, num_labels=0, label_names=(), pooler=False, label_bias=False)
    return spec_from_config(plain, spec.moe)


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Returns the description of the model that adapters are beside.

    >>> from petatron.validate import load_config
    >>> run = load_config(["--vocab-size", "256", "--adapter", "lora"], preset="tiny-llama", require_training=False).config
    >>> any("lora" in name for name in without_adapters(model_spec(run)).params())
    False
    """
    return spec if spec.config.adapter is None else spec_from_config(replace(spec.config, adapter=None), spec.moe)


def _unknown_model(name: str) -> Problem:
    close = difflib.get_close_matches(name, _BUILDERS, n=1)
    known = ", ".join(sorted(_BUILDERS))
    hint = f"Did you mean {close[0]}? " if close else ""
    fix = f"{hint}Known are {known}; add {IMPORT_FLAG} MODULE, the file or package that registers it."
    return Problem("--model-type", name, "is not a registered model", fix)
