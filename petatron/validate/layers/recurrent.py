"""Rules about layers with a convolution and a recurrent state: their sizes, and which layouts share them out evenly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from petatron.base.errors import Problem
from petatron.config.declared_rules import divisors, multiples_near, number_problems
from petatron.config.schema.fields import flag_name
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.linear_attention import DeltaNetSettings
from petatron.config.schema.sections.mamba2 import MAMBA_CONV_WIDTH, Mamba2Settings


@dataclass(frozen=True, slots=True)
class RecurrentKind:
    """A kind of layer: its settings, those that count its heads and the groups (or key heads) they share, and its convolution's width."""

    settings: type
    heads: str
    groups: str
    conv_width: Callable[[RawModelConfig], int]
    size_problems: Callable[[RawModelConfig], Iterator[Problem]]


def check_recurrent_layers(config: RawRunConfig) -> Iterator[Problem]:
    for kind in RECURRENT_KINDS:
        if vars(kind.settings)["feature"].unused_reason(config):
            continue
        wrong_sizes = list(kind.size_problems(config.model))
        yield from wrong_sizes
        if not wrong_sizes and not any(number_problems(config, kind.settings)):
            yield from _layout(config, kind)


def _mamba_sizes(model: RawModelConfig) -> Iterator[Problem]:
    heads, groups, head_dim = model.mamba_num_heads, model.mamba_num_groups, model.mamba_head_dim
    if heads is None:
        rule = f"does not divide 2 x --hidden-size {model.hidden_size}, and --mamba-num-heads is not set"
        yield Problem("--mamba-head-dim", str(head_dim), rule, "Use a divisor, or set --mamba-num-heads.")
    elif groups > 0 and heads % groups:
        rule = f"does not divide --mamba-num-heads {heads}"
        yield Problem("--mamba-num-groups", str(groups), rule, f"Use {divisors(heads)}.")
    if model.mamba_norm_groups not in (1, groups):
        rule = f"is neither 1 nor --mamba-num-groups {groups}"
        yield Problem("--mamba-norm-groups", str(model.mamba_norm_groups), rule, "Use one of them.")


def _delta_sizes(model: RawModelConfig) -> Iterator[Problem]:
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys > 0 and values % keys:
        rule = f"is not a multiple of --linear-num-key-heads {keys}"
        yield Problem("--linear-num-value-heads", str(values), rule, f"Nearest: {multiples_near(values, keys)}.")


def _layout(config: RawRunConfig, kind: RecurrentKind) -> Iterator[Problem]:
    """Yields layouts that do not share layers with a recurrent state evenly.

    Tensor-parallel ranks have equally many heads, and whole groups (or key heads) or equal parts of one. The convolution of a
    context-parallel rank takes its halo from one other rank only.
    """
    parallel, length, heads, groups = config.parallel, config.model.seq_length, kind.heads, kind.groups
    halo_tokens = kind.conv_width(config.model) - 1
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    num_heads, num_groups = getattr(config.model, heads) or 0, getattr(config.model, groups)
    if tp >= 1 and (num_heads % tp or (num_groups % tp and tp % num_groups)):
        sizes = (size for size in range(1, num_heads + 1) if num_heads % size == 0)
        usable = islice((size for size in sizes if not (num_groups % size and size % num_groups)), 12)
        rule = f"is neither a multiple nor a divisor of {flag_name(groups)} {num_groups}"
        if num_heads % tp:
            rule = f"does not divide {flag_name(heads)} {num_heads}"
        yield Problem("--tensor-model-parallel-size", str(tp), rule, f"Use {', '.join(map(str, usable))}.")
    if cp > 1 and length > 0 and length // cp < halo_tokens:
        rule = f"leaves a rank {length // cp} tokens, fewer than the {halo_tokens} that the convolution of the next one sees"
        fix = f"Use --seq-length {2 * cp * -(-halo_tokens // 2)} or more."
        yield Problem("--context-parallel-size", str(cp), rule, fix)


RECURRENT_KINDS = (
    RecurrentKind(Mamba2Settings, "mamba_num_heads", "mamba_num_groups", lambda _: MAMBA_CONV_WIDTH, _mamba_sizes),
    RecurrentKind(
        DeltaNetSettings,
        "linear_num_value_heads",
        "linear_num_key_heads",
        lambda model: model.linear_conv_kernel_dim,
        _delta_sizes,
    ),
)
