"""The settings of a hybrid model, whose layers are given one by one by `--hybrid-layer-pattern`, or by ratios of kinds.

    M  Mamba-2      G  gated delta net      *  attention      -  MLP      E  experts      P  attention and Mamba-2 in parallel

Each symbol is a layer with this one residual branch; P has two, which take the same normed input and are added (Falcon-H1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from petatron.config.schema.numeric_bounds import Fraction
from petatron.config.schema.setting_metadata import Feature, NotWith, UsedWhen, settings_section

MAMBA, DELTA, ATTENTION, MLP, EXPERTS, PARALLEL = "M", "G", "*", "-", "E", "P"
SYMBOLS = MAMBA + DELTA + ATTENTION + MLP + EXPERTS + PARALLEL
_BRANCHES = {PARALLEL: ATTENTION + MAMBA}
STAGE_BOUNDARY, PREDICTION_DEPTH = "|", "/"
"""Of Megatron's newer patterns, where flags have them: where pipeline stages end, and where each depth of multi-token prediction begins."""


def branch_symbols(pattern: str | None) -> str:
    """Returns the symbols of all branches, in their order; none without a pattern.

    >>> branch_symbols("P-M")
    '*M-M'
    """
    return "".join(_BRANCHES.get(symbol, symbol) for symbol in pattern or "")


def allocate_layers(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Returns the pattern of `num_layers` layers with these shares of attention and MLP, as Megatron allocates them.

    Attention is spread so that the runs of other layers before, between and after are about equally long; MLPs are then spread
    over the remaining layers, each after its run of Mamba layers.

    >>> allocate_layers(9, 1 / 9, 4 / 9), allocate_layers(5, 0.0, 0.0)
    ('M-M-*M-M-', 'MMMMM')
    """
    num_attention, num_mlps = round(num_layers * attention_ratio), round(num_layers * mlp_ratio)
    others = num_layers - num_attention
    layers = [ATTENTION if chosen else MAMBA for chosen in _spread(num_layers, others / (num_attention + 1))]
    if num_mlps > 0:
        mamba_layers = [index for index, layer in enumerate(layers) if layer == MAMBA]
        for index, chosen in zip(mamba_layers, _spread(len(mamba_layers), (others - num_mlps) / num_mlps)):
            layers[index] = MLP if chosen else MAMBA
    return "".join(layers)


def _spread(length: int, run: float) -> Iterator[bool]:
    """Yields for each place whether it is chosen, where chosen ones follow runs of `run` others, on average."""
    remaining = run
    for _ in range(length):
        chosen = remaining < 0.5
        yield chosen
        remaining += run if chosen else -1.0


def all_symbols(model: Any) -> str:
    """Returns the symbols of a hybrid's layers and of one depth of its multi-token prediction; none of another model."""
    return with_depth_layers(model.hybrid_layer_pattern, model.mtp_hybrid_override_pattern, model.mtp_num_layers)


def with_depth_layers(pattern: str | None, depth_pattern: str | None, num_depths: int | None) -> str:
    """Returns a pattern with the layers of one depth of multi-token prediction, where there is any.

    >>> with_depth_layers("MM*", "*-", 2), with_depth_layers("MM*", "*-", None), with_depth_layers(None, None, 1)
    ('MM**-', 'MM*', '')
    """
    return "" if pattern is None else pattern + ((depth_pattern or "") if num_depths else "")


def has_attention(model: Any) -> bool:
    """Whether a model has attention layers."""
    return model.hybrid_layer_pattern is None or ATTENTION in branch_symbols(all_symbols(model))


HAS_ATTENTION = UsedWhen(lambda run: has_attention(run.model), "no layer is attention")


@settings_section
class HybridSettings:
    """Layers of several kinds, given one by one."""

    feature: ClassVar = Feature("hybrid models", (UsedWhen(lambda run: run.model.hybrid_layer_pattern is not None),))
    is_hybrid_model: Annotated[bool, "redundant"] = False
    """A model whose layers are given one by one, by a layer pattern or ratios of kinds. Derived: on with a pattern or a ratio of them."""
    hybrid_layer_pattern: (
        Annotated[str, "selects", "later", NotWith("is_hybrid_model", lambda hybrid: not hybrid)] | None
    ) = None
    """The layers of a hybrid model, one symbol each: M Mamba-2, G gated delta net, * attention, - MLP, E experts, P
    attention and Mamba-2 in parallel. Derived: from ratios."""
    hybrid_attention_ratio: Annotated[Fraction, "redundant"] = 0.0
    """Hybrid models without a pattern: the share of layers that are attention."""
    hybrid_mlp_ratio: Annotated[Fraction, "redundant"] = 0.0
    """Hybrid models without a pattern: the share of layers that are MLPs; what remains is Mamba-2."""
