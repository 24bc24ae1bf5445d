"""The one typed schema behind flags, YAML, presets, Python and the reference page.

Every section is a frozen dataclass of plain values; the string under a field is its documentation and its help text.
A field's name is Megatron's flag with underscores (`num_layers` is `--num-layers`), and names are unique over all
sections, so a flag needs no prefix. A default is written in one of `model.py`, `parallel.py` and `training.py`,
and nowhere else. `None` means "derived": `config/derived_defaults.py` fills it and records why. Which values are compatible is
checked in `config/checks/`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from petatron.config.schema.model import LatentAttentionConfig, ModelConfig, MoEConfig
from petatron.config.schema.parallel import MemoryConfig, ParallelConfig, PrecisionConfig
from petatron.config.schema.training import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run is made of.

    >>> RunConfig(model=ModelConfig(num_layers=2)).model.num_layers
    2
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    latent: LatentAttentionConfig = field(default_factory=LatentAttentionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
