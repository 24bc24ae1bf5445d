"""The settings of the optimizer, composed of those of each update rule, and of the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import (
    Factor,
    Fraction,
    IterationCount,
    LearningRate,
    SampleCount,
)
from petatron.config.schema.optimizers.adafactor import AdafactorSettings
from petatron.config.schema.optimizers.adam import AdamSettings
from petatron.config.schema.optimizers.lion import LionSettings
from petatron.config.schema.optimizers.muon import MuonSettings
from petatron.config.schema.optimizers.sgd import SgdSettings
from petatron.config.schema.optimizers.soap import SoapSettings
from petatron.config.schema.optimizers.update_rule_spec import OptimizerName
from petatron.config.schema.setting_metadata import Feature, used_with

_DECOUPLED = used_with("optim.decoupled_lr", reason="there is no --decoupled-lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(AdamSettings, SgdSettings, MuonSettings, LionSettings, AdafactorSettings, SoapSettings):
    """The update rule."""

    feature: ClassVar = Feature("optimizer", role="training")
    # The settings of an optimizer are those of a base class, which names the rule that reads them.

    optimizer: OptimizerName = "adam"
    """adam is AdamW (decoupled weight decay); sgd is SGD with momentum; muon is Muon for the matrices of layers and adam for all else;
    lion is Lion; adafactor is Adafactor; soap is SOAP
    for the matrices of layers and adam for all else. Any other name is that of an optimizer that an imported module registers."""
    optimizer_settings: tuple[str, ...] = ()
    """Settings of an optimizer from an imported module, as NAME=VALUE."""
    lr: LearningRate | None = None
    """Peak learning rate; required to train."""
    decoupled_lr: LearningRate | None = None
    """Peak learning rate of the token embedding and the output head; unset means that of all other parameters."""
    weight_decay: Factor = 0.01
    """Weight decay, added to the gradient in sgd and decoupled in all others; never on biases and other one-dimensional parameters."""
    start_weight_decay: Factor | None = None
    """First value of a weight-decay schedule."""
    end_weight_decay: Factor | None = None
    """Last value of a weight-decay schedule."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from start to end."""
    clip_grad: Factor = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    apply_wd_to_qk_layernorm: bool = False
    """Weight decay on the weights of q/k norms too, which other one-dimensional parameters never have (Qwen3-Next)."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are accumulated; bf16 takes half the memory and loses small contributions."""


BUILT_IN_RULES = {base.used_by.name: base for base in OptimizerConfig.__mro__ if "used_by" in vars(base)}
"""The settings class of each optimizer of this package, by the optimizer's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over time."""

    feature: ClassVar = Feature("schedule", role="training")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after warm-up."""
    min_lr: LearningRate = 0.0
    """Learning rate at the end of the decay."""
    decoupled_min_lr: Annotated[LearningRate, _DECOUPLED] | None = None
    """Learning rate at the end of the decay of `--decoupled-lr`; unset means that of `--min-lr`."""
    lr_warmup_init: LearningRate = 0.0
    """Learning rate at the start of warm-up."""
    lr_warmup_iters: Annotated[IterationCount, "at least 0"] = 0
    """Warm-up length in iterations."""
    lr_warmup_samples: Annotated[SampleCount, "at least 0"] = 0
    """Warm-up length in samples, for sample-based runs."""
    lr_warmup_fraction: Annotated[Fraction, "below 1"] | None = None
    """Warm-up length as a fraction of the decay length."""
    lr_decay_iters: IterationCount | None = None
    """Decay length in iterations. Derived: `--train-iters`."""
    lr_decay_samples: SampleCount | None = None
    """Decay length in samples, for sample-based runs. Derived: `--train-samples`."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay of WSD."""
    lr_wsd_decay_iters: IterationCount | None = None
    """Length of the final decay of WSD in iterations."""
    lr_wsd_decay_samples: SampleCount | None = None
    """Length of the final decay of WSD in samples."""
