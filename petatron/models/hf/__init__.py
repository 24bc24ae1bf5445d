"""Converts Hugging Face models and back: config.json, tensor names, and filling a model in any layout.

values, experts = parse_config_json(config_json)                             # for ModelConfig and MoEConfig
logical = to_logical(family_name_of_config(config_json), tensors, spec)      # whole tensors under our names
fill_model(model.module, model.placements, logical)                          # this rank's shards of them

folder_entries(spec)                                                         # the tensors of a model folder, for streaming
build_config_json(spec, dtype)                                               # its config.json
"""

from petatron.models.hf.config_json import (
    build_config_json,
    from_hf_config,
    matching_family,
    parse_config_json,
    to_hf_config,
)
from petatron.models.hf.convert_hf_tensors import (
    fill_model,
    fit_values_to_tensors,
    output_head_name,
    stored_names_by_full_name,
    to_hf,
    to_logical,
)
from petatron.models.hf.family import OWN_MODEL_TYPE, Family
from petatron.models.hf.find_family import (
    FAMILIES,
    family_name_of_config,
    fp8_block_size,
    get_family,
    has_mxfp4_weights,
    has_separate_experts,
    keys_of_flags,
)
from petatron.models.hf.folder_entries import EntryRegion, FolderEntry, family_entries, folder_entries, folder_shapes

__all__ = [
    "FAMILIES",
    "OWN_MODEL_TYPE",
    "EntryRegion",
    "Family",
    "FolderEntry",
    "build_config_json",
    "family_entries",
    "family_name_of_config",
    "fill_model",
    "fit_values_to_tensors",
    "folder_entries",
    "folder_shapes",
    "fp8_block_size",
    "from_hf_config",
    "get_family",
    "has_mxfp4_weights",
    "has_separate_experts",
    "keys_of_flags",
    "matching_family",
    "output_head_name",
    "parse_config_json",
    "stored_names_by_full_name",
    "to_hf",
    "to_hf_config",
    "to_logical",
]
