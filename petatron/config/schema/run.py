"""`RunConfig`, the root of the one typed schema behind flags, YAML, presets, Python and the reference page.

Every section is a frozen dataclass of plain values; the string under a field is its documentation and its help text.
A field's name is Megatron's flag with underscores (`num_layers` is `--num-layers`), and names are unique over all
sections, so a flag needs no prefix. A default is written in one of `model.py`, `parallel.py` and `training.py`,
and nowhere else. Nothing here imports torch.

There are two types. `RawRunConfig` is what a user wrote, where `None` means "derived": `config/derived_defaults.py` fills it and
records why, and `validate/` checks which values are compatible. `RunConfig` is the resolved config that everything else
uses: a `RawRunConfig` in which whatever derivation always fills is no longer optional. A section has a raw class of its own only
if it has such fields; the resolved class declares nothing but those fields again, with values for one rank, or zeros, for configs
that are built by hand. Where `None` remains in a resolved config, it means something: no window, no experts, the backend of the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from petatron.config.schema.checkpoint import CheckpointConfig
from petatron.config.schema.data import DataConfig, TokenizerConfig
from petatron.config.schema.log import LogConfig
from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.model import ModelConfig, MoEConfig, RawModelConfig
from petatron.config.schema.optimizer import OptimizerConfig, ScheduleConfig
from petatron.config.schema.parallel import ParallelConfig, RawParallelConfig
from petatron.config.schema.precision import PrecisionConfig
from petatron.config.schema.rollout import RolloutConfig
from petatron.config.schema.training import LaunchConfig, RawTrainConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRunConfig:
    """The settings of a run as a user wrote them; what is unset may be derived.

    >>> RawRunConfig(model=RawModelConfig(num_layers=2)).model.kv_channels is None
    True
    """

    model: RawModelConfig = field(default_factory=RawModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: RawParallelConfig = field(default_factory=RawParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: RawTrainConfig = field(default_factory=RawTrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(RawRunConfig):
    """Everything a run is made of, resolved.

    >>> RunConfig(model=ModelConfig(num_layers=2)).model.num_layers
    2
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
