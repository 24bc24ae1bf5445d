"""Configuration: one typed schema, read from flags, YAML and presets, derived, checked, and explained."""

from petatron.config.blend import BlendError, BlendPart, parse_blend, parse_split
from petatron.config.check import check
from petatron.config.document import dump_yaml
from petatron.config.load import Loaded, load_config, resolve_config, with_vocab_size
from petatron.config.origins import Origin
from petatron.config.presets import preset_names
from petatron.config.schema import (
    LatentAttentionConfig,
    MemoryConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from petatron.config.schema_run import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    LogConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
)

__all__ = [
    "BlendError",
    "BlendPart",
    "CheckpointConfig",
    "DataConfig",
    "LatentAttentionConfig",
    "LaunchConfig",
    "Loaded",
    "LogConfig",
    "MemoryConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Origin",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainConfig",
    "check",
    "dump_yaml",
    "load_config",
    "parse_blend",
    "parse_split",
    "preset_names",
    "resolve_config",
    "with_vocab_size",
]
