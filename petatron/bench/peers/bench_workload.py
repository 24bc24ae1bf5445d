"""Builds the measured work from the flags of a run: model, device, tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from petatron.base.errors import ConfigError, Problem
from petatron.base.log import get_logger
from petatron.bench.measure.check_arguments import resolve_device
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.random_batches import random_batch
from petatron.config.read_config_sources import RawLoadedConfig
from petatron.config.schema.fields import fields_by_name, flatten_config
from petatron.config.schema.parallel import MESH_SIZES
from petatron.kernels.cpu_matmul import unsupported_reason
from petatron.models.batch import Batch
from petatron.optim.loss_scaler import compute_dtype
from petatron.validate import load_config, resolve_config

NUM_BATCHES = 4
"""The number of different batches, used in rotation."""
_TRAINING_FLAGS = (
    "--mock-data --lr {lr:g} --lr-decay-style constant --train-iters 1000000 --weight-decay 0.1 --adam-beta2 0.95"
)
_LARGEST_LR, _LR_TIMES_WIDTH = 1e-4, 0.04
_log = get_logger(__name__)


def bench_spec(flags: Sequence[str], *, silenced_flags: Collection[str] = ()) -> BenchSpec:
    """Returns the model and device that a run's flags name, for one rank; training settings have defaults that the flags override.

    Notices of `petatron train` about flags are logged here too, except for `silenced_flags` and flags that nobody typed.
    """
    asked = resolve_config(flags, require_training=False)[0]
    _check_one_process(asked)
    training = _TRAINING_FLAGS.format(lr=_learning_rate(asked.config.model.hidden_size)).split()
    precision = [] if {"--fp16", "--bf16", "--fp64", "--no-bf16"}.intersection(flags) else ["--bf16"]
    loaded = load_config([*precision, *training, *flags], world_size=1)
    run = loaded.config
    device = resolve_device(run.train.device)
    silent = {*training}.difference(flag.partition("=")[0] for flag in flags).union(silenced_flags)
    for notice in loaded.notices:
        if notice.partition(" ")[0] not in silent:
            _log.info("note: %s", notice)
    return BenchSpec(run=run, device=device, compile=device.type == "cuda", fp8_recipe=None)


def bench_precision_text(spec: BenchSpec) -> str:
    """Returns the precision for a table, with why it is a bad choice where the device emulates it."""
    dtype = compute_dtype(spec.run.precision)
    name, reason = str(dtype).removeprefix("torch."), unsupported_reason(spec.device.type, dtype)
    return name if reason is None else f"{name}, although {reason}, which slows a peer down: use --no-bf16"


def precision_problems(peer: str, spec: BenchSpec) -> list[Problem]:
    """Returns the problem of a peer that is not measured in the precision of the run."""
    if compute_dtype(spec.run.precision) in (torch.bfloat16, torch.float32):
        return []
    return [Problem("--against", peer, "is measured in bf16 and float32 alone", "Use --bf16 or --no-bf16.")]


def _learning_rate(hidden_size: int) -> float:
    """Returns a learning rate at which the first steps of two contenders can be compared.

    An Adam step changes every weight by the learning rate, and so an output by that times its input width. With a larger rate the loss
    of repeated random tokens falls from 11 to 4 in one step, and the order of float32 additions decides percents of the next loss.

    >>> _learning_rate(4096), _learning_rate(64)
    (9.765625e-06, 0.0001)
    """
    return min(_LARGEST_LR, _LR_TIMES_WIDTH / max(hidden_size, 1))


def _check_one_process(asked: RawLoadedConfig) -> None:
    """Raises for several processes before layout rules do, which would blame a world size that nobody gave."""
    values, given = flatten_config(asked.config), []
    for name in (*MESH_SIZES, "nproc_per_node", "nnodes"):
        info = fields_by_name()[name]
        origin, value = asked.origins[info.path], values[info.path]
        if origin.is_explicit and isinstance(value, int) and value > 1:
            typed = origin.detail if origin.kind == "flag" else f"{info.flag} ({origin})"
            given.append(f"{typed} {value}")
    if given:
        asks, fix = ("asks", "Leave it out.") if len(given) == 1 else ("ask", "Leave them out.")
        rule = f"{asks} for more than one process, and this bench measures one"
        raise ConfigError([Problem(" ".join(given), "", rule, fix)])


def make_batches(spec: BenchSpec) -> list[Batch]:
    """Returns the same random tokens for every contender, so few that the loss must fall."""
    generator = torch.Generator().manual_seed(spec.run.train.seed)
    return [random_batch(spec.run, generator, spec.device) for _ in range(NUM_BATCHES)]
