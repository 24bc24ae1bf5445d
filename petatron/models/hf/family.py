"""The tables that describe a family of Hugging Face models.

A `ModuleMapping` pairs modules of ours with the Hugging Face module that holds their tensors; `*` stands for the layer and `#` for
the expert. The other tables of a `Family` are about config.json. Whether a row's tensors exist at all (biases, qk-norms, an untied
head, experts in this layer) is not in the tables: the model's spec knows (`ModelSpec.logical_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.fields import flag_name
from petatron.config.schema.sections.mlp import ActivationName
from petatron.models.model_spec import ModelSpec

OWN_MODEL_TYPE = "petatron"
"""The `model_type` of a folder in our own names, for a model that no family can express."""


OWN_FOLDER_FIX = "Take config.json from the model's own folder."
"""What helps where a config.json says what no model of its family does."""


@dataclass(frozen=True, slots=True)
class ModuleMapping:
    """`logical_modules`, fused along their output if there are several, and the Hugging Face module of the same tensors.

    A `#` in the name means one such module per expert, where ours holds all experts of a layer. `transposed`: the matrix is
    stored [in, out] there; `no_weight_suffix`: the name is the tensor's own, without `.weight`; `leaf` is then its name in our module;
    `fused_by_head`: the rows of one head of each module are adjacent, and then those of the next head; `heads` is the ModelConfig field
    that counts them, of which a module may have several heads' rows each; `interleaved`: the rows of all modules alternate.
    """

    logical_modules: tuple[str, ...]
    hf_module: str
    transposed: bool = False
    no_weight_suffix: bool = False
    leaf: str = "weight"
    fused_by_head: bool = False
    interleaved: bool = False
    heads: str = "num_attention_heads"


ROPE_TYPES: Mapping[str, str] = {
    **{name: name for name in ("default", "linear", "llama3", "yarn", "longrope")},
    "su": "longrope",  # its name in older files of Phi-3
}


@dataclass(frozen=True, slots=True)
class HybridLayers:
    """How a family's layers are those of `--hybrid-layer-pattern`, which have one branch each.

    branches: how many of ours make one layer there. patterns: a regular expression of those that it has. read: returns the
    pattern of a config.json, or what is wrong with it. write: returns the keys that say the pattern. stand_ins: values of these keys by
    which the other keys are checked where the pattern cannot be read.
    """

    branches: int
    patterns: str
    read: Callable[[Mapping[str, Any]], str | Problem]
    write: Callable[[str], Mapping[str, Any]]
    stand_ins: Mapping[str, Any] = field(default_factory=dict)


ReadMore = Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[Problem]]]
"""Takes config.json with its defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    other_names: further model types with this family's names, keys and mathematics.
    in_memory_mappings: the mappings of a transformers model in memory, where they differ from those of its files.
    prefix: the part of names that a checkpoint of the bare model, without its head, leaves out.
    ignored_tensors: patterns of tensors in old checkpoints that are no weights.
    tensor_aliases: parts of tensors' names in some folders, read but not written, and what stands for them in the names of `mappings`.
    keys: ModelConfig fields whose value is that of a config.json key.
    defaults: transformers' defaults of keys; a key not listed here is required.
    fixed: ModelConfig values that every model of the family has.
    aliases: other spellings of keys, read but not written.
    moe_keys, moe_fixed: the same as `keys` and `fixed` for MoEConfig; no keys means that the family has no experts.
    single_values: keys for which the decoder supports a single value.
    has_rope: whether positions are rotary, with the keys of `rope_config_json.py`.
    rope_types: the kinds of rotary scaling that transformers has for the family, by their names in files.
    rope_by_layer_type: whether layers with a window have rope settings of their own.
    full_attention_every: every n-th layer has no window, n being this, where `layer_types` does not say which.
    read_more, write_more: what tables cannot say: further ModelConfig values from config.json, with what the decoder cannot express,
        and further keys of config.json.
    more_settings: the ModelConfig fields that these two are about.
    unsupported: returns the settings of a model that the family has no key for, where tables cannot say it.
    hybrid: how layers are those of a hybrid; None: every layer has attention and a channel mixer. A hybrid may be without experts.
    required: optional ModelConfig fields that every model of the family has set.
    unsupported_choices: values of ModelConfig fields with choices that the family has no word for.
    models, what_differs: the published models of the family, and what tells them apart, for the table of `docs/huggingface.md`.
    mtp_keys: keys of the number of depths of multi-token prediction, the first of which is written; none: the family has no such.
    routing_keys: other spellings of DeepSeek's keys of routing (`deepseek_config_json.py`).
    group_score_topk: how many of its experts' scores are summed to rank a group of experts; None: experts have no groups.
    heads_divide_width: whether transformers refuses a width that is no multiple of the heads.
    activation_key, activations: names of activations there and here; the first of several for one of ours is the one written. No
        key: the family has no MLP.
    """

    name: str
    architecture: str
    prefix: str
    mappings: tuple[ModuleMapping, ...]
    in_memory_mappings: tuple[ModuleMapping, ...] = ()
    ignored_tensors: tuple[str, ...]
    keys: Mapping[str, str]
    activation_key: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    single_values: Mapping[str, Any]
    activations: Mapping[str, ActivationName]
    aliases: Mapping[str, str] = field(default_factory=dict)
    moe_keys: Mapping[str, str] = field(default_factory=dict)
    moe_fixed: Mapping[str, Any] = field(default_factory=dict)
    has_rope: bool = True
    rope_types: Mapping[str, str] = field(default_factory=lambda: ROPE_TYPES)
    rope_by_layer_type: bool = False
    full_attention_every: int | None = None
    read_more: ReadMore | None = None
    write_more: Callable[[ModelSpec], Mapping[str, Any]] | None = None
    more_settings: tuple[str, ...] = ()
    unsupported: Callable[[ModelSpec], list[Problem]] | None = None
    hybrid: HybridLayers | None = None
    required: tuple[str, ...] = ()
    unsupported_choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: str = ""
    what_differs: str = ""
    heads_divide_width: bool = False
    group_score_topk: int | None = None
    other_names: tuple[str, ...] = ()
    mtp_keys: tuple[str, ...] = ()
    tensor_aliases: Mapping[str, str] = field(default_factory=dict)
    routing_keys: Mapping[str, str] = field(default_factory=dict)


def unsupported_setting(name: str, value: object, family: Family, allowed: str) -> Problem:
    """Returns the problem of a setting that the family has no key for."""
    rule = f"cannot be written as a Hugging Face {family.name} model, which has {allowed}"
    return Problem(flag_name(name), str(value), rule, "Such a model is saved in Petatron's own names.")
