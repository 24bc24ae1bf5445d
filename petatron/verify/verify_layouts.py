"""Verifies a layout against one process: plans, records and compares two runs that differ only in their layout."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import ConfigError, Problem
from petatron.config import LoadedConfig, RawLoadedConfig, RunConfig
from petatron.config.schema.fields import fields_by_path, flatten_config
from petatron.estimate.flops import parameter_count
from petatron.mesh.launch.environment import read_environment
from petatron.models.registry import model_spec
from petatron.optim.loss_scaler import compute_dtype
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.train.build_run import launch
from petatron.validate import load_config, resolve_config
from petatron.verify.compare_traces import Tolerances, TraceComparison, compare_traces
from petatron.verify.record_trace import Injection, StoredTrace, record_steps, write_trace

SINGLE_PROCESS_FLAGS = (
    "--tp 1 --pp 1 --cp 1 --ep 1 --etp 1 --dp 1 --no-sequence-parallel --pipeline-schedule none "
    "--num-virtual-stages-per-pipeline-rank none --num-layers-per-virtual-pipeline-stage none "
    "--microbatch-group-size-per-virtual-pipeline-stage none --decoder-first-pipeline-num-layers none "
    "--decoder-last-pipeline-num-layers none --encoder-pipeline-model-parallel-size 0 "
    "--pipeline-model-parallel-layout none --no-use-distributed-optimizer "
    "--no-overlap-param-gather --data-parallel-sharding-strategy none --num-distributed-optimizer-instances 1 "
    "--no-fp8-param-gather --no-tp-comm-overlap --tp-comm-overlap-chunks none --no-overlap-moe-expert-parallel-comm"
)
# Dropout differs between layouts by design. A schedule made for thousands of steps is meaningless for a few, and warm-up
# from zero would make the first of them idle.
_FIXED_FLAGS = (
    "--hidden-dropout 0 --attention-dropout 0 --no-bf16 --no-fp16 --eval-iters 0 --save none --load none --save-interval none "
    "--train-samples none --lr-decay-style constant --min-lr 0 --decoupled-min-lr none --lr-warmup-iters 0 --lr-warmup-samples 0 "
    "--lr-warmup-fraction none --lr-decay-iters none --lr-decay-samples none"
)
_PRECISION_FIELDS = ("bf16", "fp16", "fp64")
# Gradients and weights of every step are written to disk; beyond this, only those of the first and last step.
_MAX_TRACE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """The two command lines, and the configs they load to."""

    candidate_argv: list[str]
    reference_argv: list[str]
    candidate: LoadedConfig
    reference: LoadedConfig
    ignored_settings: tuple[str, ...]
    """Requested settings that are not part of the comparison, as the user would write them."""

    @property
    def every_step(self) -> bool:
        """Whether tensors of every step are compared, or only of the first and the last."""
        config = self.candidate.config
        replicas = config.parallel.data_parallel_size
        parameters = parameter_count(model_spec(config))
        step_bytes = 2 * parameters * compute_dtype(config.precision).itemsize * replicas
        return step_bytes * (config.train.train_iters or 0) <= _MAX_TRACE_BYTES


def plan_verification(
    argv: Sequence[str], *, steps: int, dtype: str, reference: str = SINGLE_PROCESS_FLAGS
) -> VerifyPlan:
    """Plans both runs, without settings that are not part of the comparison (see `_FIXED_FLAGS`)."""
    asked = resolve_config(argv, require_training=False)[0]
    given = asked.config
    if dtype == "float64" and given.precision.fp8_format is not None:
        rule = f"leaves no room for --fp8-format {given.precision.fp8_format}, whose GEMMs accumulate in float32"
        fix = "Use --dtype float32, or leave FP8 out: a layout is the same with and without it."
        raise ConfigError([Problem("--dtype", dtype, rule, fix)])
    fixed = [f"--train-iters={steps}", *_FIXED_FLAGS.split(), "--fp64" if dtype == "float64" else "--no-fp64"]
    if not (given.data.data_path or given.data.train_data_path or given.data.data_args_path):
        fixed += ["--mock-data"]
    if given.optim.lr is None:
        fixed += ["--lr", "1e-3"]
    candidate_argv = [*argv, *fixed]
    candidate, _ = open_tokenizer(load_config(candidate_argv))
    size = candidate.config.train.global_batch_size
    reference_argv = [*candidate_argv, "--world-size", "none", "--nproc-per-node", "none", *reference.split()]
    reference_argv += ["--global-batch-size", str(size)]
    ignored = tuple(_ignored_settings(asked, candidate.config, dtype))
    return VerifyPlan(candidate_argv, reference_argv, candidate, load_config(reference_argv), ignored)


def _ignored_settings(requested: RawLoadedConfig, compared: RunConfig, dtype: str) -> Iterator[str]:
    """Yields requested settings that both runs ignore, as written, and for a dtype why."""
    compared_values = flatten_config(compared)
    for path, value in flatten_config(requested.config).items():
        if requested.origins[path].kind in ("flag", "file") and compared_values[path] != value:
            info = fields_by_path()[path]
            typed = f"{info.flag} {value}" if info.kind != "bool" else info.flag if value else f"--no-{info.flag[2:]}"
            why = f" (both runs are in {dtype}, since bounds for rounding are those of --dtype)"
            yield typed + (why if info.name in _PRECISION_FIELDS else "")


def record_run(argv: Sequence[str], folder: Path, *, every_step: bool, injection: Injection | None) -> None:
    """Runs on every rank of one of the two runs: trains, and writes each step into the folder."""
    environment = read_environment()
    loaded, _ = open_tokenizer(load_config(argv, world_size=environment.world_size))
    ends = (1, loaded.config.train.train_iters)
    mesh = launch(loaded.config)
    steps = record_steps(loaded.config, mesh, keep_tensors=lambda step: every_step or step in ends, injection=injection)
    write_trace(steps, folder / f"rank-{environment.rank:05d}")


def compare_recorded_runs(reference: Path, candidate: Path, tolerances: Tolerances) -> TraceComparison:
    """Compares the traces that two runs wrote."""
    ranks = [[StoredTrace(rank) for rank in sorted(folder.glob("rank-*"))] for folder in (reference, candidate)]
    return compare_traces(ranks[0], ranks[1], tolerances)


def parse_injection(text: str, run: RunConfig | None = None) -> Injection:
    """Parses `layers.0.attention.q.weight@3`, which corrupts that tensor's gradient at step 3; without a step, at step 1."""
    name, _, step = text.partition("@")
    if run is not None and name not in (known := model_spec(run).logical_shapes()):
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"One is {next(iter(known))}."
        raise ConfigError([Problem("--inject", name, "names no tensor of this model", hint)])
    if step and not step.isdecimal():
        rule = "is not a tensor name with an optional @STEP"
        raise ConfigError([Problem("--inject", text, rule, "Write for example layers.0.mlp.down.weight@2")])
    return Injection(name, int(step or 1))
