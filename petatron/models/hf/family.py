"""A family of Hugging Face models: its names, the table of its tensors' names, and the function that translates its config.json.

A `ModuleMapping` pairs modules of ours with the Hugging Face module that holds their tensors; `*` stands for the layer and `#` for
the expert. Whether a row's tensors exist at all (biases, qk-norms, an untied head, experts in this layer) is not in the table: the
model's spec knows (`ModelSpec.logical_shapes`). `config_translation.py` says how a function translates settings, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.task_head import PoolingName
from petatron.models.hf.config_translation import Translation
from petatron.sharding.shard_spec import Shape

OWN_MODEL_TYPE = "petatron"
"""The `model_type` of a folder in our own names, for a model that no family can express."""


@dataclass(frozen=True, slots=True)
class ModuleMapping:
    """`logical_modules`, fused along their output if there are several, and the Hugging Face module of the same tensors.

    A `#` in the name means one such module per expert, where ours holds all experts of a layer. `transposed`: the matrix is
    stored [in, out] there; `no_weight_suffix`: the name is the tensor's own, without `.weight`; `leaf` is then its name in our module;
    `fused_by_head`: the rows of one head of each module are adjacent, and then those of the next head; `heads` is the ModelConfig field
    that counts them, of which a module may have several heads' rows each; `interleaved`: the rows of all modules alternate.
    `stack`: of an encoder's and a decoder's layers, those that are numbered by themselves there. `shape_there`: the shape that the weight
    has there, of as many elements. `beside`, `not_beside`: a module that the
    layer has or does not have, where the name depends on it.
    """

    logical_modules: tuple[str, ...]
    hf_module: str
    transposed: bool = False
    no_weight_suffix: bool = False
    leaf: str = "weight"
    fused_by_head: bool = False
    interleaved: bool = False
    heads: str = "num_attention_heads"
    stack: Literal["encoder", "decoder"] | None = None
    beside: str | None = None
    not_beside: str | None = None
    shape_there: Callable[[ModelConfig], Shape] | None = None


@dataclass(frozen=True, slots=True)
class TaskHeadForm:
    """The head of a family's classifier: the name of its class, the token that it reads, whether it has a pooler, and biases of labels."""

    architecture: str
    pooling: PoolingName
    pooler: bool = False
    bias: bool = False

    def has_shape_of(self, other: TaskHeadForm) -> bool:
        return replace(self, architecture="") == replace(other, architecture="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    other_names: further model types with this family's names, keys and mathematics.
    models, what_differs: the published models of the family, and what tells them apart, for the table of `docs/huggingface.md`.
    translate: says how config.json and settings correspond.
    in_memory_mappings: the mappings of a transformers model in memory, where they differ from those of its files.
    prefix: the part of names that a checkpoint of the bare model, without its head, leaves out.
    ignored_tensors: patterns of tensors in files that are no weights, or that nothing is computed with; those that a model has are read.
    tensor_aliases: parts of tensors' names in some folders, read but not written, and what stands for them in the names of `mappings`.
    model_type: the `--model-type` of its models.
    task_head: the head of its class for sequence classification, if models with that head are read and written.
    branches: how many layers of `--hybrid-layer-pattern`, which have one branch each, make one layer there; 0: the family is no hybrid.
    """

    name: str
    architecture: str
    models: str
    what_differs: str
    translate: Callable[[Translation], None]
    mappings: tuple[ModuleMapping, ...]
    in_memory_mappings: tuple[ModuleMapping, ...] = ()
    prefix: str = "model."
    ignored_tensors: tuple[str, ...] = ("*rotary_emb.inv_freq",)
    tensor_aliases: Mapping[str, str] = field(default_factory=dict)
    other_names: tuple[str, ...] = ()
    model_type: str = "decoder"
    task_head: TaskHeadForm | None = None
    branches: int = 0
