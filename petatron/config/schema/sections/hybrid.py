"""The settings of a hybrid model, whose layers are given one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from petatron.config.schema.hybrid_pattern import ATTENTION, branch_letters
from petatron.config.schema.metadata import Feature, NotWith, UsedWhen, settings_section
from petatron.config.schema.numeric_bounds import Fraction

if TYPE_CHECKING:
    from petatron.config.schema.model import RawModelConfig


def has_attention(model: RawModelConfig) -> bool:
    """Whether a model has attention layers."""
    return model.hybrid_layer_pattern is None or ATTENTION in branch_letters(model.hybrid_layer_pattern)


HAS_ATTENTION = UsedWhen(lambda run: has_attention(run.model), "no layer is attention")


@settings_section
class HybridSettings:
    """Layers of several kinds, given one by one."""

    feature: ClassVar = Feature("hybrid models", (UsedWhen(lambda run: run.model.hybrid_layer_pattern is not None),))
    is_hybrid_model: Annotated[bool, "redundant"] = False
    """A model whose layers are given one by one, by letters or ratios of kinds. Derived: on with a pattern or a ratio of them."""
    hybrid_layer_pattern: (
        Annotated[str, "selects", "later", NotWith("is_hybrid_model", lambda hybrid: not hybrid)] | None
    ) = None
    """The layers of a hybrid model, one letter each: M Mamba-2, G gated delta net, * attention, - MLP, E experts, P
    attention and Mamba-2 in parallel. Derived: from ratios."""
    hybrid_attention_ratio: Annotated[Fraction, "redundant"] = 0.0
    """Hybrid models without a pattern: the share of layers that are attention."""
    hybrid_mlp_ratio: Annotated[Fraction, "redundant"] = 0.0
    """Hybrid models without a pattern: the share of layers that are MLPs; what remains is Mamba-2."""
