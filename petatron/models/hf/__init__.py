"""Hugging Face models as ours and back: config.json, tensor names, and filling a model on any layout.

values, experts = read_config_json(config_json)                           # for ModelConfig and MoEConfig
logical = to_logical(family_of(config_json), tensors, model, moe, experts_in)  # whole tensors under our names
fill(model.module, model.placements, logical)                             # this rank's boxes of them

folder_entries(model, moe, experts_in)                                    # the tensors of a model folder, for streaming
model_config_json(model, moe, experts_in, dtype)                          # its config.json
"""

from petatron.models.hf.config_json import family_or_none, from_hf_config, to_hf_config
from petatron.models.hf.family import Family
from petatron.models.hf.fill_model import fill
from petatron.models.hf.find_family import FAMILIES, family_for, family_named, family_of
from petatron.models.hf.folder_config_json import OWN_TYPE, model_config_json, read_config_json
from petatron.models.hf.folder_entries import Entry, Region, family_entries, folder_entries, logical_shapes
from petatron.models.hf.tensor_names import full_names, head_name, to_hf, to_logical

__all__ = [
    "FAMILIES",
    "OWN_TYPE",
    "Entry",
    "Family",
    "Region",
    "family_entries",
    "family_for",
    "family_named",
    "family_of",
    "family_or_none",
    "fill",
    "folder_entries",
    "from_hf_config",
    "full_names",
    "head_name",
    "logical_shapes",
    "model_config_json",
    "read_config_json",
    "to_hf",
    "to_hf_config",
    "to_logical",
]
