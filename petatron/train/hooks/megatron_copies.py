"""`--save-megatron`: Megatron's files of every checkpoint, in a folder of their own that a Megatron run loads.

A Megatron checkpoint has no place for a tokenizer, which Megatron's flags name: its files are beside the iterations, where both programs
find them.

Rank 0 converts a published checkpoint on a thread while training goes on. The next save waits for it, since pruning may remove what it
reads. A failed copy is a warning: the checkpoint itself is there, and `petatron checkpoint convert` writes the copy later.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from petatron.base.errors import CheckpointError, PetatronError, Problem
from petatron.base.log import get_logger
from petatron.base.model_companion_files import read_companion_file
from petatron.base.model_folder_file_names import TRACKER_FILE
from petatron.base.safe_files import remove_tree, write_atomic
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.megatron.arguments import unsupported_by_megatron
from petatron.checkpoint.megatron.open_checkpoint import iteration_folder
from petatron.checkpoint.save.async_save import AsyncSaveThread
from petatron.config.schema.run import RunConfig
from petatron.pretrained.stored_training_state import has_megatron_state
from petatron.train.hooks.step_hook import StepHook

_log = get_logger(__name__)


class MegatronCopies(StepHook):
    """Writes the copies, and removes those of checkpoints that were pruned; only rank 0 has one."""

    def __init__(self, source: Path, folder: Path, run: RunConfig, manager: CheckpointManager) -> None:
        """`source` has the checkpoints, `folder` gets the copies."""
        self._source, self._folder = source, folder
        self._why_weights_alone = _why_weights_alone(run)
        self._manager, self._thread = manager, AsyncSaveThread()

    def before_save(self, iteration: int) -> None:
        self._thread.wait()

    def after_save(self, iteration: int) -> None:
        self._thread.wait()
        pruned = self._manager.pruned
        self._thread.start(lambda: self._copy(iteration, pruned))

    def close(self) -> None:
        self._thread.wait()

    def _copy(self, iteration: int, pruned: tuple[int, ...]) -> None:
        try:
            self._convert(iteration)
            for step in pruned:
                remove_tree(self._folder / iteration_folder(step))
        except (PetatronError, OSError) as error:
            _log.warning(
                "Megatron's files of iteration %d were not written to %s: %s\nThe checkpoint is in %s: `petatron checkpoint convert` with "
                "--to megatron --step %d writes them.",
                *(iteration, self._folder, error, self._source, iteration),
            )
            return
        what = f" (weights alone: {self._why_weights_alone})" if self._why_weights_alone else ""
        _log.info("wrote Megatron's files of iteration %d to %s%s", iteration, self._folder, what)

    def _convert(self, iteration: int) -> None:
        """Converts beside the other copies, and renames: a folder of an iteration that exists is complete."""
        from petatron.pretrained.convert_model import GENERATION_CONFIG_FILE, ConversionOptions, convert
        from petatron.pretrained.model_reader import open_model_reader

        target, converted = self._folder / iteration_folder(iteration), self._folder / f"copy_of_{iteration}"
        self._folder.mkdir(parents=True, exist_ok=True)
        for stopped in (
            *self._folder.glob("copy_of_*"),
            target,
        ):  # by a kill, or from before the run went back to an earlier step
            remove_tree(stopped)
        source = open_model_reader(self._source, model_format="petatron", step=iteration)
        convert(source, converted, ConversionOptions(target_format="megatron", training=not self._why_weights_alone))
        (converted / target.name).rename(target)
        tokenizer = {name: path for name, path in source.companion_files.items() if name != GENERATION_CONFIG_FILE}
        for name, path in tokenizer.items():  # beside all iterations: one tokenizer is that of all
            write_atomic(self._folder / name, read_companion_file(path, CheckpointError))
        write_atomic(self._folder / TRACKER_FILE, str(iteration))
        remove_tree(converted)


def megatron_copy_problems(run: RunConfig) -> Iterator[Problem]:
    """Yields why a run's checkpoints have no form in Megatron."""
    folder = run.checkpoint.save_megatron
    for problem in unsupported_by_megatron(run.model) if folder is not None else ():
        setting = f"{problem.where} {problem.value}".strip()
        rule = f"asks for Megatron's files, and {setting} {problem.rule}"
        yield Problem("--save-megatron", str(folder), rule, "Leave it out.")


def _why_weights_alone(run: RunConfig) -> str | None:
    """Returns why the state of the optimizer has no place in Megatron's files, if so."""
    if run.checkpoint.no_save_optim:
        return "--no-save-optim"
    if not has_megatron_state(run.optim.optimizer):
        return f"Megatron's files have no place for the state of --optimizer {run.optim.optimizer}"
    if run.train.freeze or run.train.freeze_language_model or run.train.freeze_vision_encoder:
        return "frozen parameters have no optimizer state, and Megatron wants that of all"
    return None
