"""Builds the parts of a run from its config. The parts are independent: a custom loop can use any of them.

run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "10"])
mesh = launch(run)
model = build_model(run, mesh)
optimizer = build_optimizer(run, model)
for batches in build_loader(run, mesh):
    loss = model.train_step(batches)
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from petatron.base.device import detect_device
from petatron.base.errors import ConfigError, Problem
from petatron.config import LoadedConfig, RunConfig, parse_split, with_vocab_size
from petatron.config.checks.cuda_graphs import uses_random_numbers
from petatron.config.nccl_communicators import communicator_options
from petatron.config.pipeline_stages import pipeline_stages
from petatron.config.required_settings import known_vocab_size, required
from petatron.data.batch_loader import BatchLoader, Collate, LoaderOptions
from petatron.data.build_datasets import SplitDatasets, build_datasets
from petatron.data.tokenizer import Tokenizer, build_tokenizer
from petatron.estimate.recompute_plan import plan_recompute
from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.process_group import start_process_group
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.mesh.rng import RandomStreams
from petatron.models.batch import Batch
from petatron.models.model_spec import ModelSpec
from petatron.models.optimizer_groups import OptimizerGroupRule, optimizer_group
from petatron.models.registry import model_spec
from petatron.optim.build_update_rules import OptimizerKernels
from petatron.optim.loss_scaler import compute_dtype
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.needed_process_groups import used_axes
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.parallelize import parallelize
from petatron.parallel.router_statistics import RouterStatistics
from petatron.schedule.pipeline_plan import num_micro_batches, pipeline_plan
from petatron.train.cuda_graphs import enable_requested_cuda_graphs
from petatron.train.global_batch_size import BatchSizeSchedule
from petatron.train.state.run_model import Model
from petatron.train.state.start_tokenizer import check_start_tokenizer, find_start_tokenizer, with_start_tokenizer


class HasConfig(Protocol):
    """A run that knows its config, such as `petatron.load` returns."""

    @property
    def config(self) -> RunConfig: ...


def config_of(run: RunConfig | HasConfig) -> RunConfig:
    """The functions of the public API take a run or its config."""
    return run if isinstance(run, RunConfig) else run.config


def open_tokenizer(loaded: LoadedConfig) -> tuple[LoadedConfig, Tokenizer | None]:
    """Opens the tokenizer of a run, if any, and returns the config with its vocabulary size; `ConfigError` if nothing says it.

    It is the configured one, or by default that of the model that the run starts from.
    """
    start = find_start_tokenizer(loaded.config.checkpoint)
    loaded = loaded if start is None else with_start_tokenizer(loaded, start)
    config = loaded.config
    if config.tokenizer.tokenizer_type is None:
        known_vocab_size(config.model)
        return loaded, None
    tokenizer = build_tokenizer(config.tokenizer, vocab_size=config.model.vocab_size)
    if start is not None:
        check_start_tokenizer(loaded, tokenizer, start)
    return with_vocab_size(loaded, tokenizer.vocab_size, f"{tokenizer.name} tokenizer"), tokenizer


def launch(run: RunConfig | HasConfig) -> ParallelMesh:
    """Joins the other ranks, if any, and builds the mesh of this run's layout.

    >>> import petatron
    >>> launch(petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])).describe()
    'one device (1 rank)'
    """
    run, environment = config_of(run), read_environment()
    facts = detect_device(run.train.device, local_rank=environment.local_rank // run.launch.ranks_per_device)
    backend = start_process_group(
        environment,
        backend=run.parallel.distributed_backend,
        timeout_minutes=run.parallel.distributed_timeout_minutes,
        device_type=facts.kind,
        deterministic=run.train.deterministic_mode,
        ranks_per_device=run.launch.ranks_per_device,
    )
    device = torch.device("cuda", torch.cuda.current_device()) if facts.kind == "cuda" else torch.device("cpu")
    return ParallelMesh(
        Layout.from_config(run.parallel),
        environment.rank,
        device=device,
        backend=backend,
        timeout_minutes=run.parallel.distributed_timeout_minutes,
        options=communicator_options(run.parallel),
    )


def build_model(
    run: RunConfig | HasConfig,
    mesh: ParallelMesh,
    *,
    init_weights: bool = True,
    gradients: bool = True,
    group_rule: OptimizerGroupRule | None = None,
) -> Model:
    """Builds this rank's part of the model with the same weights in every layout; zero without `init_weights`.

    Without `gradients` it has no memory for any: it generates and evaluates. `group_rule` returns the optimizer group of a
    parameter, by name, for update rules or multipliers that no flag sets.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = build_model(run, launch(run))
    >>> tuple(model.module.layers["0"].attention.out.weight.shape)
    (128, 128)
    """
    run = config_of(run)
    # CUDA graphs cannot read RNG states during capture, so only they rely on knowing whether the step draws.
    uses_rng = uses_random_numbers(run) or run.train.cuda_graphs != "on"
    streams = RandomStreams.seeded(run.train.seed, mesh, used_in_step=uses_rng)
    plan = pipeline_plan(run)
    dtype = compute_dtype(run.precision)
    spec, stages = model_spec(run), pipeline_stages(run)
    check_supported(run, spec)
    local_stages = [number for number in range(len(stages)) if plan.rank_of(number) == mesh.pp.rank]
    with torch.device("meta"):
        modules = {number: spec.build_stage(stages[number]) for number in local_stages}
    in_flight = plan.in_flight(num_micro_batches(run))
    shape = ActivationShape.from_config(run, device="cuda" if mesh.device.type == "cuda" else "cpu")
    plan_stage = partial(plan_recompute, run.memory, spec, shape, num_local_stages=len(local_stages))
    parts = parallelize(
        modules,
        spec,
        mesh,
        run,
        dtype=dtype,
        rng_streams=streams,
        recompute_plans={n: plan_stage(stages[n], in_flight=in_flight[n]) for n in local_stages},
        optimizer_group=group_rule or partial(optimizer_group, run.optim),
        tied_across_ranks=plan.rank_of(0) != plan.rank_of(len(stages) - 1),
        init_weights=init_weights,
        gradients=gradients,
    )
    mesh.create_groups(used_axes(run, parts.placements))
    routers = RouterStatistics(modules, spec.moe_layers, run.moe.num_experts or 0, mesh)
    model = Model(
        modules,
        parts,
        plan,
        routers,
        mesh,
        streams,
        io=spec.io(stages),
        spec=spec,
        dtype=dtype,
        sequence_parallel=run.parallel.sequence_parallel,
    )
    enable_requested_cuda_graphs(run, model)
    return model


def check_supported(run: RunConfig, spec: ModelSpec) -> None:
    """Raises `ConfigError` if the layers of a model cannot do what the run asks for."""
    problems: list[Problem] = []
    branches = {branch for layer in set(spec.layers) for branch in layer.branches}
    if run.parallel.context_parallel_size > 1 and spec.sequence_sharding == "whole":
        kinds = sorted(f"{branch.name} ({branch.sequence_sharding})" for branch in branches)
        rule = f"shards sequences, and no way of it suits all layers of this model: {', '.join(kinds)}"
        problems.append(Problem("--context-parallel-size", str(run.parallel.context_parallel_size), rule, "Use 1."))
    mixed = sorted({branch.name for branch in branches if not branch.separates_documents})
    if run.data.reset_attention_mask and mixed:
        rule = f"separates packed documents, but layers of this model see the whole sequence: {', '.join(mixed)}"
        problems.append(Problem("--reset-attention-mask", "", rule, "Leave it out."))
    if problems:
        raise ConfigError(problems)


def build_optimizer(run: RunConfig | HasConfig, model: ParallelModel) -> MixedPrecisionOptimizer:
    """Builds the optimizer over the model's flat buffers.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> optimizer = build_optimizer(run, build_model(run, launch(run)))
    >>> optimizer.scalar_state()
    {'updates': 0.0}
    """
    run = config_of(run)
    situation = KernelContext.of(model.mesh.device, model.dtype, allow_compile=run.train.compile)
    kernels = OptimizerKernels.from_choice(choose_kernel("adamw", situation))
    return MixedPrecisionOptimizer(run.optim, model.param_groups, model.mesh, memory=run.memory, kernels=kernels)


@dataclass(frozen=True, slots=True)
class DataLoaders:
    """A loader per split; None where the run needs none."""

    train: BatchLoader
    valid: BatchLoader | None
    test: BatchLoader | None
    warnings: tuple[str, ...] = ()
    """What makes the data too small for the run; it has been logged."""


@dataclass(frozen=True, slots=True)
class RunLength:
    """The length of a run from iteration 0, in iterations and samples, whichever was given."""

    iterations: int
    samples: int

    @classmethod
    def from_config(cls, run: RunConfig, *, iteration: int = 0, consumed_samples: int = 0) -> RunLength:
        """Computes the length from the current position: a resumed run may have another batch size than it began with."""
        batch = BatchSizeSchedule.from_config(run)
        if run.train.train_samples is not None:
            left = max(0, run.train.train_samples - consumed_samples)
            return cls(iteration + batch.iterations_for(left, consumed_samples), run.train.train_samples)
        iterations = required("train_iters", run.train.train_iters)
        left = max(0, iterations - iteration)
        return cls(iterations, batch.samples_after(left, consumed_samples))


def build_loaders(
    run: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer | None = None, *, train_samples: int | None = None
) -> DataLoaders:
    """Opens every dataset of the run and reports every problem of the data.

    `train_samples` is the number of training samples required, counted from the start of the run.
    """
    if tokenizer is None and run.tokenizer.tokenizer_type is not None:
        tokenizer = build_tokenizer(run.tokenizer, vocab_size=run.model.vocab_size)
    needed = RunLength.from_config(run).samples if train_samples is None else train_samples
    datasets = build_datasets(run, tokenizer, (needed, *_evaluation_samples(run)))
    assert datasets.train is not None
    options = LoaderOptions(
        micro_batch_size=run.train.micro_batch_size,
        dataloader_type=run.data.dataloader_type,
        seed=run.train.seed,
        num_workers=run.data.num_workers,
        eod=tokenizer.eod if tokenizer is not None else None,
        eod_mask_loss=run.data.eod_mask_loss,
        reset_position_ids=run.data.reset_position_ids,
        reset_attention_mask=run.data.reset_attention_mask,
        pin_memory=mesh.device.type == "cuda",
    )
    return _build_batch_loaders(datasets, options, model_spec(run).collate, mesh)


def _build_batch_loaders(
    datasets: SplitDatasets, options: LoaderOptions, collate: Collate | None, mesh: ParallelMesh
) -> DataLoaders:
    make = partial(BatchLoader, options=options, collate=collate, dp_rank=mesh.dp.rank, dp_size=mesh.dp.size)
    assert datasets.train is not None
    return DataLoaders(
        train=make(datasets.train),
        valid=make(datasets.valid) if datasets.valid is not None else None,
        test=make(datasets.test) if datasets.test is not None else None,
        warnings=datasets.warnings,
    )


def _evaluation_samples(run: RunConfig) -> tuple[int, int]:
    """Returns validation and test samples; zero for a split without data.

    As many validation samples as Megatron builds, enough for other ones in every evaluation of the run. Here all evaluate the first
    ones, but how many are shuffled together decides which those are.
    """
    each = run.train.eval_iters * run.train.global_batch_size
    interval = run.train.eval_interval
    evaluations = RunLength.from_config(run).iterations // interval + 1 if interval else 1
    shares = (1.0, 1.0, 1.0) if run.data.mock_data else parse_split(run.data.split)
    if run.data.train_data_path:
        shares = (1.0, float(bool(run.data.valid_data_path)), float(bool(run.data.test_data_path)))
    return evaluations * each if shares[1] else 0, each if shares[2] else 0


def build_loader(run: RunConfig | HasConfig, mesh: ParallelMesh, *, consumed_samples: int = 0) -> Iterator[list[Batch]]:
    """Yields this rank's training micro-batches on the device, step after step; for a custom loop.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "3", "--global-batch-size", "4"])
    >>> [len(batches) for batches in build_loader(run, launch(run))]
    [4, 4, 4]
    """
    run = config_of(run)
    loader = build_loaders(run, mesh).train
    batch_size = BatchSizeSchedule.from_config(run)
    for _ in range(RunLength.from_config(run).iterations):
        size = batch_size.at(consumed_samples)
        batches = loader.next_step(size, consumed_samples)
        if not batches:
            return
        consumed_samples += size
        yield [batch.to(mesh.device) for batch in batches]
