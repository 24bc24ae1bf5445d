"""Rules about maximal update parametrization (muP)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from petatron.base.errors import ConfigError, Problem
from petatron.config.optimizer_registry import find_rule_spec, rule_spec, used_rules
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.mup import relative_width

_USE_MUP = "--use-mup"


def check_mup(config: RawRunConfig) -> Iterator[Problem]:
    if config.model.use_mup:
        yield from _width(config.model)
        yield from _factors(config.model)
        yield from _optimizer(config)


def _width(model: RawModelConfig) -> Iterator[Problem]:
    given, base = model.mup_width_mult, model.mup_base_hidden_size
    if given is None or not base or base < 0 or model.hidden_size <= 0:
        return
    width = relative_width(model, model.hidden_size)
    if not math.isclose(given, width, rel_tol=1e-12):
        rule = f"is not --hidden-size {model.hidden_size} / --mup-base-hidden-size {base} = {width:g}"
        yield Problem("--mup-width-mult", f"{given:g}", rule, "Leave it out: it follows from the two.")


def _factors(model: RawModelConfig) -> Iterator[Problem]:
    """Checks that multipliers set both for muP and for the model are equal; the model's are the ones applied."""
    logits = 1.0 / model.logits_scaling if model.logits_scaling > 0 else model.mup_output_mult
    pairs = (
        ("--mup-embedding-mult", model.mup_embedding_mult, "--embedding-multiplier", model.embedding_multiplier),
        ("--mup-output-mult", model.mup_output_mult, "1 / --logits-scaling", logits),
    )
    for flag, value, name, factor in pairs:
        # The schema declares the conflict of two multipliers on embeddings.
        told = flag == "--mup-embedding-mult" and model.scale_embeddings
        if value not in (1.0, factor) and value > 0 and not told and not math.isclose(value, factor, rel_tol=1e-12):
            yield Problem(flag, f"{value:g}", f"is not {name}, which is {factor:g} here", "Leave one out.")


def _optimizer(config: RawRunConfig) -> Iterator[Problem]:
    if find_rule_spec(config.optim.optimizer) is None:
        return
    try:
        rules = used_rules(config.optim)
    except ConfigError:  # `optimizer.py` reports it
        return
    for rule in rules:
        if rule.width_scaling is None:
            rule_text = f"does not say how --optimizer {rule.name} changes its learning rate with the width"
            fix = "Declare `width_scaling` in its UpdateRuleSpec, or use --optimizer adam."
            yield Problem(_USE_MUP, "", f"cannot be used: the declaration {rule_text}", fix)
        else:
            yield from rule.mup_problems()


def mup_notices(config: RawRunConfig) -> Iterator[str]:
    """Yields valid settings that keep the base model's best learning rate from transferring."""
    model, optim = config.model, config.optim
    if not model.use_mup:
        return
    if find_rule_spec(optim.optimizer) is not None:
        yield from rule_spec(optim).mup_notices()
    if optim.decoupled_lr is not None:
        yield "--decoupled-lr is the learning rate of embedding and output head at every width: --use-mup does not scale it"
