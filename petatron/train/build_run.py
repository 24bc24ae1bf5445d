"""Builds the parts of a run from its config. The parts are independent: a loop of your own (`custom_loop.py`) can use any of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from petatron.base.log import get_logger
from petatron.config import RunConfig, parse_split
from petatron.config.required_settings import required
from petatron.config.schema.objective_and_dataset_names import EXTERNAL, GPT_DATASET
from petatron.data.batch_loader import BatchLoader, LoaderOptions, StepLoader
from petatron.data.build_datasets import build_datasets, chosen_kind, chosen_kind_name, vocab_size
from petatron.data.dataset_kinds import Split
from petatron.data.external_loader import DataloaderRequest, ExternalLoader, registered_dataloader
from petatron.data.fill_in_middle import padding_id
from petatron.data.index_cache import IndexLog
from petatron.data.prompt.built_in_templates import with_chat_template
from petatron.data.tokenizer import Tokenizer, build_tokenizer
from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.frozen_params import describe_frozen, frozen_params
from petatron.models.optimizer_groups import OptimizerGroupRule
from petatron.models.registry import model_spec
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.optim.update_rules import OptimizerKernels
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.launch_and_build_model import HasConfig, build_initial_model, config_of
from petatron.pretrained.launch_and_build_model import launch as launch
from petatron.pretrained.saveable_model import Model
from petatron.train.global_batch_size import BatchSizeSchedule
from petatron.train.state.open_frozen_models import open_frozen_models
from petatron.train.state.run_metadata import TrainProgress
from petatron.train.state.start_weights import (
    find_start_folder,
    load_master_weights,
    load_start_weights,
    saved_position,
    unrestored_notice,
)

_log = get_logger(__name__)


def build_model(
    run: RunConfig | HasConfig,
    mesh: ParallelMesh,
    *,
    init_weights: bool = True,
    gradients: bool = True,
    group_rule: OptimizerGroupRule | None = None,
) -> Model:
    """Builds this rank's part of the model with the same weights in every layout; zero without `init_weights`.

    They are the weights of the checkpoint in `--load` (`--ckpt-step`, `--finetune` and `--load-fallback` count too), else those of
    `--from` or `--pretrained-checkpoint`, else drawn with the run's seed. `petatron.restore` restores what else a checkpoint has.
    Without `gradients` the model has no memory for any: it generates and evaluates. `group_rule` returns the optimizer group of a
    parameter, by name, for update rules or multipliers that no flag sets.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = build_model(run, launch(run))
    >>> tuple(model.module.layers["0"].attention.out.weight.shape)
    (128, 128)
    """
    config = config_of(run)
    start = find_start_folder(config.checkpoint, mesh) if init_weights else None
    model = build_initial_model(
        config, mesh, init_weights=init_weights and start is None, gradients=gradients, group_rule=group_rule
    )
    model.run, model.start_folder = config, start
    model.run_tokenizer = None if isinstance(run, RunConfig) else run.tokenizer
    open_frozen_models(config, model)
    if (frozen := frozen_params(config)) and mesh.rank == 0 and gradients:
        _log.info("%s", describe_frozen(model.spec, frozen))
    if start is not None:
        model.unrestored_notice = unrestored_notice(config, load_start_weights(config, model, start), start)
    return model


def build_optimizer(run: RunConfig | HasConfig, model: ParallelModel) -> MixedPrecisionOptimizer:
    """Builds the optimizer over the model's flat buffers; master weights have the precision of the folder that the weights are from.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> optimizer = build_optimizer(run, build_model(run, launch(run)))
    >>> optimizer.scalar_state()
    {'updates': 0.0}
    """
    run = config_of(run)
    situation = KernelContext.of(model.mesh.device, model.dtype, allow_compile=run.train.compile)
    kernels = OptimizerKernels.from_choice(choose_kernel("adamw", situation))
    optimizer = MixedPrecisionOptimizer(run.optim, model.param_groups, model.mesh, memory=run.memory, kernels=kernels)
    start = model.start_folder if isinstance(model, Model) and model.unrestored_notice is None else None
    if start is not None and optimizer.has_master_weights:
        load_master_weights(run, model, optimizer, start)
    return optimizer


@dataclass(frozen=True, slots=True)
class DataLoaders:
    """A loader per split, and per validation set by its name (None: it has none); empty or None where the run needs none."""

    train: StepLoader
    valid: Mapping[str | None, StepLoader]
    test: StepLoader | None
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
    run: RunConfig,
    mesh: ParallelMesh,
    tokenizer: Tokenizer | None = None,
    *,
    train_samples: int | None = None,
    evaluates: bool = True,
    index_log: IndexLog | None = None,
) -> DataLoaders:
    """Opens every dataset of the run and reports every problem of the data.

    `train_samples` is the number of training samples required, counted from the start of the run. `evaluates`: whether validation and
    test data are opened too. `index_log` is told which cached indices were found.
    """
    if tokenizer is None and run.tokenizer.tokenizer_type is not None:
        tokenizer = build_tokenizer(run.tokenizer, vocab_size=run.model.vocab_size)
        tokenizer = with_chat_template(tokenizer, run.data.chat_template)
    if run.data.dataloader_type == EXTERNAL:
        return _external_loaders(run, mesh, tokenizer, evaluates=evaluates)
    needed = RunLength.from_config(run).samples if train_samples is None else train_samples
    validation, test = evaluation_samples(run) if evaluates else (0, 0)
    datasets = build_datasets(run, tokenizer, (needed, validation, test), index_log=index_log)
    assert datasets.train is not None
    if mesh.rank == 0:
        for text in datasets.warnings:
            _log.warning("WARNING: %s", text)
    options = LoaderOptions(
        micro_batch_size=run.train.micro_batch_size,
        dataloader_type=run.data.dataloader_type,
        seed=run.train.seed,
        num_workers=run.data.num_workers,
        eod=tokenizer.eod if tokenizer is not None else None,
        eod_mask_loss=run.data.eod_mask_loss,
        pad=padding_id(run.data, tokenizer),
        reset_position_ids=run.data.reset_position_ids,
        reset_attention_mask=run.data.reset_attention_mask,
        pin_memory=mesh.device.type == "cuda",
        seq_length=run.model.seq_length,
        vocab_size=vocab_size(run, tokenizer),
    )
    # What a model takes that is not text it makes of samples itself; else the kind of dataset knows what they are.
    collate = model_spec(run).collate or chosen_kind(run).collate
    make = partial(BatchLoader, collate=collate, dp_rank=mesh.dp.rank, dp_size=mesh.dp.size)
    micro_batch_size = run.train.eval_micro_batch_size or run.train.micro_batch_size
    make_evaluated = partial(make, options=replace(options, micro_batch_size=micro_batch_size))
    return DataLoaders(
        train=make(datasets.train, options=options),
        valid={name: make_evaluated(dataset) for name, dataset in datasets.valid_sets.items()},
        test=make_evaluated(datasets.test) if datasets.test is not None else None,
        warnings=datasets.warnings,
    )


def _external_loaders(
    run: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer | None, *, evaluates: bool
) -> DataLoaders:
    """Returns the loaders of the function that an imported module registered, which is called when a step needs data."""
    registered = registered_dataloader()
    needs_text = model_spec(run).collate is None and chosen_kind_name(run) == GPT_DATASET

    def loader(split: Split, micro_batch_size: int) -> ExternalLoader:
        request = DataloaderRequest(
            split=split,
            dp_rank=mesh.dp.rank,
            dp_size=mesh.dp.size,
            micro_batch_size=micro_batch_size,
            seq_length=run.model.seq_length,
            consumed_samples=0,
            seed=run.train.seed,
            vocab_size=vocab_size(run, tokenizer),
            tokenizer=tokenizer,
        )
        options = LoaderOptions(
            micro_batch_size=micro_batch_size, seed=run.train.seed, pin_memory=mesh.device.type == "cuda"
        )
        return ExternalLoader(registered, request, options, needs_text=needs_text)

    evaluated = registered.splits if evaluates and run.train.eval_iters else frozenset()
    micro_batch_size = run.train.eval_micro_batch_size or run.train.micro_batch_size
    return DataLoaders(
        train=loader("train", run.train.micro_batch_size),
        valid={None: loader("valid", micro_batch_size)} if "valid" in evaluated else {},
        test=loader("test", micro_batch_size) if "test" in evaluated else None,
    )


def evaluation_batch_size(run: RunConfig) -> int:
    """Returns the samples of one batch of an evaluation, over all ranks."""
    return run.train.eval_global_batch_size or run.train.global_batch_size


def evaluation_samples(run: RunConfig) -> tuple[int, int]:
    """Returns validation and test samples; zero for a split without data.

    As many validation samples as Megatron builds, enough for other ones in every evaluation of the run. Here all evaluate the first
    ones, but how many are shuffled together decides which those are.
    """
    samples = run.train.eval_iters * evaluation_batch_size(run)
    interval = run.train.eval_interval
    evaluations = RunLength.from_config(run).iterations // interval + 1 if interval else 1
    if interval and run.train.start_eval_at_iter is not None:
        evaluations = max(0, evaluations - run.train.start_eval_at_iter // interval)
    shares = (1.0, 1.0, 1.0) if run.data.mock_data else parse_split(run.data.split)
    if run.data.train_data_path:
        shares = (1.0, float(bool(run.data.valid_data_path)), float(bool(run.data.test_data_path)))
    validation = max(1, evaluations * samples) if run.train.full_validation else evaluations * samples
    return validation if shares[1] else 0, samples if shares[2] else 0


class HasPosition(Protocol):
    """The state of a run that knows how far it is, such as `petatron.restore` returns."""

    progress: TrainProgress

    def run_length(self) -> RunLength: ...
    def attach_loader(self, loader: StepLoader) -> list[str]: ...


def build_loader(
    run: RunConfig | HasConfig,
    mesh: ParallelMesh,
    *,
    state: HasPosition | None = None,
    consumed_samples: int | None = None,
) -> Iterator[list[Batch]]:
    """Yields this rank's training micro-batches on the device, step after step, to the end of the run.

    It begins at the position of `state`, which `petatron.restore` returned, else after `consumed_samples`, else at the first sample.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "3", "--global-batch-size", "4"])
    >>> [len(batches) for batches in build_loader(run, petatron.launch(run))]
    [4, 4, 4]
    """
    config = config_of(run)
    tokenizer = None if isinstance(run, RunConfig) else run.tokenizer
    if (
        state is None
        and consumed_samples is None
        and (position := saved_position(config.checkpoint, mesh))
        and mesh.rank == 0
    ):
        _log.warning(
            "the data begins at the first sample again, and the run in --load %s has consumed %s. Give build_loader "
            "state=petatron.restore(run, model, optimizer), or consumed_samples=0 if that is meant.",
            config.checkpoint.load,
            f"{position:,}",
        )
    consumed, iterations = consumed_samples or 0, RunLength.from_config(config).iterations
    if state is not None:
        consumed = state.progress.consumed_samples if consumed_samples is None else consumed_samples
        iterations = state.run_length().iterations - state.progress.iteration
    needed = None if state is None else state.run_length().samples
    loader = build_loaders(config, mesh, tokenizer, train_samples=needed, evaluates=False).train
    if state is not None:
        for line in state.attach_loader(loader):
            _log.warning("%s", line.removeprefix("WARNING: "))
    batch_size = BatchSizeSchedule.from_config(config)
    for _ in range(iterations):
        size = batch_size.at(consumed)
        batches = loader.next_step(size, consumed)
        if not batches:
            return
        consumed += size
        yield [batch.to(mesh.device) for batch in batches]
