"""Checks that the layers of a built model spec support the run; works for layer kinds defined outside the package too."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import DataError, Problem, raise_problems
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.recommender import RECOMMENDER_MODEL
from petatron.layers.spec.branch_spec import BranchSpec
from petatron.layers.spec.generation_state import PagedState
from petatron.mesh.rank_layout import Layout
from petatron.models.model_spec import ModelSpec


def check_training(run: RunConfig, spec: ModelSpec) -> None:
    """Raises `ConfigError` if some layer does not support a setting of the run."""
    problems: list[Problem] = []
    branches = _branches(spec)
    if run.parallel.context_parallel_size > 1 and spec.sequence_sharding == "whole":
        kinds = sorted(f"{branch.name} ({branch.sequence_sharding})" for branch in branches)
        rule = f"shards sequences, and no way of it suits all layers of this model: {', '.join(kinds)}"
        problems.append(Problem("--context-parallel-size", str(run.parallel.context_parallel_size), rule, "Use 1."))
    mixed = sorted({branch.name for branch in branches if not branch.separates_documents})
    if run.data.separates_documents and mixed:
        rule = f"separates packed documents, but layers of this model see the whole sequence: {', '.join(mixed)}"
        flag, value = "--reset-attention-mask", ""
        if not run.data.reset_attention_mask:
            flag, value = "--dataset-type", str(run.data.dataset_type)
        problems.append(Problem(flag, value, rule, "Leave it out."))
    raise_problems(problems)


def check_generation(
    spec: ModelSpec,
    layout: Layout,
    *,
    virtual_stages: int,
    fully_sharded: bool,
    fp8_weights: bool,
    speculative_tokens: int,
) -> None:
    """Raises `ConfigError` for layouts that only training needs, and `DataError` for layers without a generation state."""
    problems: list[Problem] = []
    if layout.cp > 1:
        rule = "splits sequences, which generation keeps whole"
        problems.append(Problem("--context-parallel-size", str(layout.cp), rule, "Load the model with 1."))
    if virtual_stages > 1:
        rule = "cuts a rank's layers into several stages, which only training needs"
        fix = "Load the model without it; --pp may stay."
        problems.append(Problem("--num-virtual-stages-per-pipeline-rank", str(virtual_stages), rule, fix))
    if fp8_weights and fully_sharded:
        rule = "quantizes whole weights, and this model's are sharded over data-parallel ranks"
        problems.append(Problem("--fp8-weights", "", rule, "Load it without a --data-parallel-sharding-strategy."))
    problems += _speculation_problems(spec, layout, speculative_tokens)
    if spec.source_length is not None:
        problems += _encoder_problems(spec, layout)
    raise_problems(problems)
    reason = why_reading_only(spec)
    if reason is not None:
        raise DataError(reason)


def why_reading_only(spec: ModelSpec) -> str | None:
    """Returns why a model reads texts and continues none; None if it continues them."""
    if spec.config.model_type == RECOMMENDER_MODEL:
        return "This model continues no text: it recommends items after a history (/v1/recommend of petatron serve)."
    if spec.config.pooling is not None:
        return (
            "This model does not continue text: it ends with a head on whole texts. It embeds them (/v1/embeddings of petatron serve, with "
            f'"pooling": "{spec.config.pooling}"), and petatron eval --task labels measures it.'
        )
    branches = {branch for layer in set(spec.generation_layers) for branch in layer.branches}
    mixed = sorted({branch.title or branch.name for branch in branches if not branch.can_generate})
    if not mixed:
        return None
    return (
        f"This model does not continue text: its {', '.join(mixed)} layers have no state to generate with. It can embed texts "
        "(/v1/embeddings of petatron serve), and an encoder can fill masks (petatron generate --fill-mask)."
    )


def _speculation_problems(spec: ModelSpec, layout: Layout, count: int) -> Iterator[Problem]:
    if count == 0:
        return
    flag, value = "--speculative-tokens", str(count)
    if count < 0:
        yield Problem(flag, value, "is below 0", "Leave it out for no drafts.")
    states = [branch.generation_state(layout.tp) for branch in _branches(spec)]
    if any(state is not None and not isinstance(state, PagedState) for state in states):
        rule = "takes rejected tokens back, and this model's recurrent layers cannot: their state has no token apart"
        yield Problem(flag, value, rule, "Leave it out.")
    elif not spec.config.mtp_num_layers:
        rule = "drafts with multi-token prediction, and this model was trained without --mtp-num-layers"
        yield Problem(flag, value, rule, "Leave it out, or use a model that has depths.")
    if layout.pp > 1:
        rule = f"needs embedding and output head on one stage, and --pipeline-model-parallel-size {layout.pp} separates them"
        yield Problem(flag, value, rule, "Load the model with --pp 1, perhaps with more --tp.")


def _encoder_problems(spec: ModelSpec, layout: Layout) -> Iterator[Problem]:
    """A prompt is encoded on one stage, at a time of its own."""
    if layout.pp > 1:
        rule = "puts encoder and decoder on several stages, and prompts are encoded on one"
        yield Problem(
            "--pipeline-model-parallel-size", str(layout.pp), rule, "Load the model with 1, perhaps with more --tp."
        )
    if spec.moe is not None and layout.ep > 1:
        rule = "shares experts between replicas, whose prompts are not encoded at one time"
        yield Problem("--expert-model-parallel-size", str(layout.ep), rule, "Load the model with 1.")


def _branches(spec: ModelSpec) -> set[BranchSpec]:
    return {branch for layer in set(spec.layers) for branch in layer.branches}
