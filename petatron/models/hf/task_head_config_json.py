"""Classifiers of Hugging Face families: what their config.json says of the head, besides what it says of the layers.

`architectures` names the class, `id2label` the labels. Only what a family's class computes is written: LlamaForSequenceClassification reads
the last token and has no bias, BertForSequenceClassification has a pooler on the first token and biases. A model with another head, or with
pooled states alone, is saved in our own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.models.hf.family import Family, TaskHeadForm
from petatron.models.model_spec import ModelSpec

_MAX_LABELS = 1_000_000
_UNNAMED = "LABEL_{}"


def read_task_head(family: Family, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the settings of the head of a classifier, with what is wrong; none of another model."""
    names, form = config.get("architectures"), family.task_head
    if form is None or not isinstance(names, list) or form.architecture not in names:
        return {}, []
    labels = config.get("id2label")
    if labels is None:
        labels = {str(number): _UNNAMED.format(number) for number in range(2)}  # transformers' default
    numbers = {str(number) for number in range(len(labels))} if isinstance(labels, Mapping) else set()
    is_sound = isinstance(labels, Mapping) and set(map(str, labels)) == numbers and 0 < len(labels) <= _MAX_LABELS
    if not is_sound or not all(isinstance(name, str) for name in labels.values()):
        rule = "does not number the labels from 0 on, with a name for each"
        return {}, [Problem("id2label", f"{labels!r:.40}", rule, "Correct config.json.")]
    by_number = {str(number): name for number, name in labels.items()}
    in_order = tuple(by_number[str(number)] for number in range(len(labels)))
    is_named = in_order != tuple(map(_UNNAMED.format, range(len(labels)))) and len(set(in_order)) == len(in_order)
    head = {"pooling": form.pooling, "pooler": form.pooler, "label_bias": form.bias}
    return {**head, "num_labels": len(labels), "label_names": in_order if is_named else ()}, []


def task_head_problem(family: Family, spec: ModelSpec) -> Problem | None:
    """Returns why a family has no class for the head of a model; None if it has, or the model has no head."""
    config, form = spec.config, family.task_head
    if config.pooling is None:
        return None
    wanted = TaskHeadForm("", config.pooling, pooler=config.pooler, bias=config.label_bias)
    if form is not None and config.num_labels and form.has_shape_of(wanted):
        return None
    rule = f"cannot be written as a Hugging Face {family.name} model, which has no such head"
    return Problem("--pooling", config.pooling, rule, "Such a model is saved in Petatron's own names.")


def task_head_keys(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """Returns the keys of a classifier that a family has a class for; none of another model."""
    config, form = spec.config, family.task_head
    if config.pooling is None or form is None:
        return {}
    names = config.label_names or tuple(map(_UNNAMED.format, range(config.num_labels)))
    return {
        "architectures": [form.architecture],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
