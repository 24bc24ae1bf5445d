"""The layers of a hybrid model, one letter each: the value of `--hybrid-layer-pattern`, or what ratios of kinds give.

    M  Mamba-2      G  gated delta net      *  attention      -  MLP      E  experts

Each letter is a layer with this one residual branch.
"""

from __future__ import annotations

from collections.abc import Iterator

MAMBA, DELTA, ATTENTION, MLP, EXPERTS = "M", "G", "*", "-", "E"
SYMBOLS = MAMBA + DELTA + ATTENTION + MLP + EXPERTS
STAGE_BOUNDARY, PREDICTION_DEPTH = "|", "/"
"""Of Megatron's newer patterns, and not of ours: where pipeline stages end, and where the layers of multi-token prediction begin."""


def allocate_layers(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Returns the pattern of so many layers with these shares of attention and MLP, as Megatron allocates them.

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
