"""`Run`: a training run that Python code or a notebook advances step by step, without output of its own.

    run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "20"])
    for metrics in run.train(steps=10):
        print(metrics["iteration"], metrics["lm_loss"])

It is the run that `petatron train` would start, in this process: the same checks, loop, schedules and checkpoints, and with
`--save` or `--log-dir` the same `metrics.jsonl`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.config import LoadedConfig, RunConfig
from petatron.config.import_user_modules import IMPORT_FLAG
from petatron.config.read_config_sources import ConfigSources
from petatron.infer.generate import generate
from petatron.mesh.launch.environment import imports_from_env, read_environment
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.pretrained.read_checkpoint_args import read_checkpoint_args
from petatron.pretrained.saveable_model import Model
from petatron.train.build_run import launch
from petatron.train.check_and_open_run import OpenedRun, RunStart, check_start, open_run
from petatron.train.evaluate_loss import EvaluatedLosses, InterruptedEvaluation, evaluate
from petatron.train.report.log_records import MetricRecord, MetricWriter
from petatron.train.report.memory_capacity_and_oom import report_out_of_memory
from petatron.train.run_training import close_writers, log_directory, open_writers
from petatron.train.settings_from_data import needs_data_settings, settings_from_data
from petatron.train.state.check_run_dirs import lock_save_dir
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainLoop
from petatron.validate import load_config, resolve_config, without_problems


def load(preset: str | None = None, flags: Sequence[str] = (), *, world_size: int | None = None) -> Run:
    """Returns a validated run of a preset, or of a run's config.yaml, and flags; nothing is built yet.

    It is for the ranks that the launcher started. What `--sft` and `--train-epochs` leave open is derived from the data.

    >>> load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"]).config.model.hidden_size
    128
    """
    world_size = world_size if world_size is not None else read_environment().world_size
    is_file = preset is not None and preset.endswith((".yaml", ".yml"))
    source = ["--config", preset] if preset is not None and is_file else []
    arguments = [*source, *flags, *(f"{IMPORT_FLAG}={name}" for name in imports_from_env())]
    sources = ConfigSources(
        preset=None if is_file else preset, world_size=world_size, read_checkpoint=read_checkpoint_args
    )
    planned, problems = resolve_config(arguments, require_training=False, **sources)
    if problems or not needs_data_settings(planned.config):
        return Run(load_config(arguments, **sources))
    derived = settings_from_data(without_problems(planned, problems)).settings
    derived = [setting for setting in derived if setting.path != "log.sample_interval"]
    loaded = load_config([*arguments, *(setting.word for setting in derived)], **sources)
    return Run(
        replace(loaded, notices=(*loaded.notices, *(f"derived from the data: {setting}" for setting in derived)))
    )


class Run:
    """A run in this process: its config, and its state once it is needed.

    >>> run = load("tiny-llama", "--mock-data --lr 1e-3 --train-iters 4 --eval-iters 1 --log-interval 2".split())
    >>> [metrics["iteration"] for metrics in run.train(steps=3)]
    [1, 2, 3]
    >>> [metrics["iteration"] for metrics in run.train()], run.evaluate().loss < 8
    ([4], True)
    """

    def __init__(self, loaded: LoadedConfig) -> None:
        self._loaded, self.tokenizer = open_tokenizer(loaded)
        self.records: list[MetricRecord] = []
        """Every record of training, validation and events so far."""
        self.notices = loaded.notices
        """What the command line would print before it starts: settings that have no effect, and the like."""
        self._close: Callable[[], object] | None = None

    def close(self) -> None:
        """Closes the run's log, TensorBoard and W&B; deleting the run or leaving Python does it too."""
        if self._close is not None:
            self._close()

    @property
    def config(self) -> RunConfig:
        return self._loaded.config

    @property
    def state(self) -> TrainState:
        """Model, optimizer, schedules and progress; built, and loaded where the flags say so, when first asked for."""
        return self._opened.state

    @cached_property
    def _start(self) -> RunStart:
        return check_start(self._loaded)

    @cached_property
    def _opened(self) -> OpenedRun:
        return open_run(self._start, launch(self.config))

    @cached_property
    def _loop(self) -> TrainLoop:
        writers: list[MetricWriter] = [_RecordList(self.records)]
        log = self.config.log
        if log.log_dir or self.config.checkpoint.save or log.tensorboard_dir or log.wandb_project:
            writers += open_writers(self._start, self._opened, log_directory(self.config), console=False)
        self._close = weakref.finalize(self, close_writers, writers)  # also when the process ends
        loop = self._opened.build_loop(writers)
        weakref.finalize(self, loop.close)
        return loop

    def train(self, steps: int | None = None) -> Iterator[MetricRecord]:
        """Trains this number of steps, or to the end of the run, and yields the metrics of each log interval as it ends.

        The interval is `--log-interval`; what is left when the steps are over is an interval too. Evaluation and saving
        happen where the flags say so. Training stops where the caller stops iterating, and goes on with the next call.
        """
        if steps is not None and steps < 1:
            raise ConfigError(
                [Problem("steps", str(steps), "is not a positive number", "Leave it out to train to the end.")]
            )
        loop, progress = self._loop, self.state.progress
        end = loop.train_iters if steps is None else min(loop.train_iters, progress.iteration + steps)

        def phase() -> str:
            return f"iteration {progress.iteration + 1}"

        with lock_save_dir(self.config.checkpoint.save, rank=self.state.mesh.rank):
            while progress.iteration < end:
                seen = len(self.records)
                with report_out_of_memory(self.config, self.state.mesh.device, phase=phase):
                    stopped = loop.train_interval(end)
                yield from (record for record in self.records[seen:] if record["kind"] == "train")
                if stopped:
                    return

    def evaluate(self, split: Literal["valid", "test"] = "valid", *, dataset: str | None = None) -> EvaluatedLosses:
        """Returns the mean losses over `--eval-iters` batches of a split; of the validation set `dataset`, or of the first."""
        loaders = self._opened.loaders
        first = next(iter(loaders.valid.values()), None)
        loader = loaders.test if split == "test" else first if dataset is None else loaders.valid.get(dataset)
        if loader is None:
            named = f"{split} data" if dataset is None else f"validation set {dataset!r}"
            raise DataError(f"This run has no {named}. Give --eval-iters, and data that has such a split (--split).")
        losses = evaluate(self.state, loader)
        assert not isinstance(losses, InterruptedEvaluation), "nothing can stop it here"
        return losses

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = 40,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """Returns the model's continuation of a text or of token ids, as text."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            rule = "is not set, so this run knows token ids only, no text"
            raise ConfigError([Problem("--tokenizer-type", "", rule, "Give a tokenizer, or use petatron.generate.")])
        new_ids = generate(
            self.state.model,
            tokenizer.encode(prompt) if isinstance(prompt, str) else prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            eod=tokenizer.eod,
        )
        return tokenizer.decode(new_ids)

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes the model, with its tokenizer, as a Hugging Face folder; with `overwrite` in place of the model there."""
        model = self.state.model
        assert isinstance(model, Model)
        model.save_pretrained(folder, tokenizer=self.tokenizer, overwrite=overwrite)


class _RecordList(MetricWriter):
    """A writer that keeps records in memory."""

    def __init__(self, records: list[MetricRecord]) -> None:
        self._records = records

    def write(self, record: MetricRecord) -> None:
        self._records.append(record)

    def close(self) -> None:
        pass
