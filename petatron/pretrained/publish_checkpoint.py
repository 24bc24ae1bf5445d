"""Publishes a checkpoint: the components of a run's state, and its model as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.stateful_components import Stateful, build_document, local_tensors
from petatron.data.tokenizer import Tokenizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.hf_folder_contents import CompanionFiles, build_hf_folder


def publish_checkpoint(
    manager: CheckpointManager,
    components: Sequence[Stateful],
    *,
    step: int,
    model: ParallelModel,
    metadata: Mapping[str, Any] | None,
    tokenizer: Tokenizer | CompanionFiles | None,
    wait: bool = True,
) -> None:
    """Publishes a checkpoint through a manager, which may save asynchronously; every rank calls it. `metadata` is only recorded."""
    groups = sorted(model.param_groups, key=lambda group: not group.spec.trainable)
    # The storage dtype of the weights: fully sharded ones are fp32, since they are the master weights, unless frozen.
    dtype = next((weight.dtype for group in groups for weight in group.weights()), model.dtype)
    manager.save(
        step,
        [chunk for component in components for chunk in component.chunks()],
        metadata=build_document(components, metadata, model.frozen_tensors),
        same_layout_key=model.layout_key,
        local=local_tensors(components),
        model=build_hf_folder(model.spec, dtype, tokenizer),
        wait=wait,
    )
