"""The settings of models that end with a head on texts: classification, regression, embeddings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import SmallCount
from petatron.config.schema.setting_metadata import Feature, UsedWhen, settings_section

PoolingName = Literal["first", "last", "mean"]
"""Which hidden states of a text are its vector."""
_HAS_POOLING = UsedWhen(
    lambda run: run.model.pooling is not None,
    "it is for --pooling, or --objective classification, regression or contrastive",
)


@settings_section
class TaskHeadSettings:
    """Heads on whole texts, in place of the head that predicts tokens."""

    feature: ClassVar = Feature("task head", (_HAS_POOLING,), may_be_added=True)
    pooling: Annotated[PoolingName, "selects"] | None = None
    """The hidden states that stand for a text: those of its first token, of its last one, or the mean of all. Such a model has no output
    head for tokens. Derived from `--objective`: first for encoders, last for decoders, and mean for contrastive encoders."""
    num_labels: SmallCount | None = None
    """Outputs of a linear head on the pooled states; 0: none, the pooled states are an embedding of the text. Derived: the number of
    `--label-names`, else 1 with `--objective regression`, else 0."""
    label_names: Annotated[tuple[str, ...], "training"] = ()
    """Names of the labels, in the order of the outputs: a file may have these strings in place of numbers."""
    pooler: bool = False
    """A linear layer and tanh between the pooled states and the head, as BERT has. Derived: on for encoders with labels."""
    label_bias: bool = False
    """Bias of the linear head. Derived: on for encoders."""
