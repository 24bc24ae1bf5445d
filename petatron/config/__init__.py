"""Configuration: one typed schema, read from flags, YAML and presets, derived, and explained; `petatron.validate` checks it."""

from petatron.config.presets import preset_names
from petatron.config.read_config_sources import LoadedConfig, RawLoadedConfig, with_vocab_size
from petatron.config.schema.checkpoint import CheckpointConfig
from petatron.config.schema.data_blend import parse_blend, parse_split
from petatron.config.schema.model import ModelConfig, MoEConfig, RawModelConfig
from petatron.config.schema.parallel import ParallelConfig, RawParallelConfig
from petatron.config.schema.precision import PrecisionConfig
from petatron.config.schema.run import RawRunConfig, RunConfig
from petatron.config.schema.training import RawTrainConfig, TrainConfig
from petatron.config.yaml_file import dump_yaml

__all__ = [
    "CheckpointConfig",
    "LoadedConfig",
    "MoEConfig",
    "ModelConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RawLoadedConfig",
    "RawModelConfig",
    "RawParallelConfig",
    "RawRunConfig",
    "RawTrainConfig",
    "RunConfig",
    "TrainConfig",
    "dump_yaml",
    "parse_blend",
    "parse_split",
    "preset_names",
    "with_vocab_size",
]
