"""Hugging Face models as ours and back: config.json, tensor names, and filling a model on any layout.

family = family_of(config_json)
values = from_hf_config(config_json)                      # for ModelConfig
logical = to_logical(family, tensors, run.model)          # whole tensors under our names
fill(model.module, model.placements, logical)             # this rank's boxes of them
"""

from petatron.models.hf.config import from_hf_config, to_hf_config
from petatron.models.hf.families import FAMILIES, family_for, family_of
from petatron.models.hf.fill import fill
from petatron.models.hf.names import logical_shapes, to_hf, to_logical

__all__ = [
    "FAMILIES",
    "family_for",
    "family_of",
    "fill",
    "from_hf_config",
    "logical_shapes",
    "to_hf",
    "to_hf_config",
    "to_logical",
]
