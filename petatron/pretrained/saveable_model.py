"""`Model`: this rank's part of a model on its mesh, which can be saved as a Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.base.safe_files import remove_tree
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.manager import CheckpointManager
from petatron.config import CheckpointConfig, RunConfig
from petatron.data.prompt.built_in_templates import with_chat_template
from petatron.data.tokenizer import Tokenizer, build_tokenizer, open_tokenizer_files
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import Axis
from petatron.models.batch import Batch
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.atomic_model_folder import create_tmp_folder, tmp_folder
from petatron.pretrained.checkpoint_components import model_components
from petatron.pretrained.hf_folder_contents import CompanionFiles
from petatron.pretrained.publish_checkpoint import publish_checkpoint
from petatron.schedule.actions import TimedAction

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StartFolder:
    """The folder with the first weights of a run, and the flag that names it."""

    flag: Literal["--load", "--pretrained-checkpoint"]
    folder: str

    def resumes(self, config: CheckpointConfig) -> bool:
        """Whether the run resumes with all state of the run that saved the weights."""
        return self.flag == "--load" and not config.finetune


class Model(ParallelModel):
    """What `build_model` and `from_pretrained` return: this rank's part of a model.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> bool(model.train_step(next(petatron.build_loader(run, model.mesh))).isfinite())
    True
    """

    companion_files: CompanionFiles | None = None
    """Files that came with the weights that `from_pretrained` read."""
    run: RunConfig | None = None
    """The run that `build_model` built it for."""
    run_tokenizer: Tokenizer | None = None
    """The tokenizer of that run, if it is open already."""
    start_folder: StartFolder | None = None
    """Where `build_model` loaded its weights from."""
    unrestored_notice: str | None = None
    """A warning for a loop that trains without restoring the checkpoint's other state; None once it is restored or warned."""

    def train_step(
        self,
        batches: Sequence[Batch],
        *,
        loss_scale: float = 1.0,
        timeline: Callable[[list[TimedAction]], None] | None = None,
    ) -> Tensor:
        """Like `ParallelModel.train_step`; warns once if `petatron.restore` was forgotten."""
        if self.unrestored_notice is not None:
            _log.warning("%s", self.unrestored_notice)
            self.unrestored_notice = None
        return super().train_step(batches, loss_scale=loss_scale, timeline=timeline)

    def saved_companions(self) -> Tokenizer | CompanionFiles | None:
        """Returns the tokenizer, or its files, that a checkpoint stores next to the weights."""
        if self.run_tokenizer is None and self.run is not None and self.run.tokenizer.tokenizer_type is not None:
            tokenizer = build_tokenizer(self.run.tokenizer, vocab_size=self.run.model.vocab_size)
            self.run_tokenizer = with_chat_template(tokenizer, self.run.data.chat_template)
        return self.run_tokenizer if self.run_tokenizer is not None else self.companion_files

    def save_pretrained(
        self, path: str | Path, *, tokenizer: Tokenizer | str | Path | None = None, overwrite: bool = False
    ) -> None:
        """Writes the model as a Hugging Face folder, which transformers opens directly; every rank calls it.

        The folder appears when it is complete, and must not exist before, or be empty; with `overwrite` the folder of a model that is
        there is replaced then. It also gets the run's tokenizer, or the tokenizer's files, generation_config.json and token ids that
        `from_pretrained` found beside the weights; `tokenizer`, one of ours or the path of a tokenizer.json, a .model or their folder,
        replaces them.
        A model that no family can express is written with the `model_type` petatron, which `from_pretrained` opens, and transformers
        after `import petatron.integrations.transformers`.

        >>> import petatron, tempfile
        >>> from pathlib import Path
        >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
        >>> folder = Path(tempfile.mkdtemp()) / "mine"
        >>> petatron.build_model(run, petatron.launch(run)).save_pretrained(folder)
        >>> sorted(file.name for file in folder.iterdir())
        ['config.json', 'generation_config.json', 'model.safetensors']
        """
        target = Path(path).absolute()
        tmp, control = tmp_folder(target), self.mesh.control
        opened = open_tokenizer_files(Path(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
        _on_first_rank(control, target, lambda: create_tmp_folder(target, overwrite=overwrite))
        try:
            publish_checkpoint(
                CheckpointManager(tmp, control, world_axis=self.mesh.world, device=self.mesh.device),
                model_components(self, random_states=False),
                step=0,
                model=self,
                metadata=None,
                tokenizer=opened if opened is not None else self.saved_companions(),
            )
            _on_first_rank(control, target, lambda: _publish_tmp_folder(tmp, target, Disk()))
        finally:
            if control.rank == 0:
                with contextlib.suppress(OSError):
                    remove_tree(tmp)


def _publish_tmp_folder(tmp: Path, target: Path, disk: Disk) -> None:
    replaced = tmp / "replaced"  # removed with the temporary folder
    if target.exists() and any(target.iterdir()):
        target.rename(replaced)
    try:
        disk.rename(tmp / step_folder.step_name(0) / step_folder.MODEL_FOLDER, target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    disk.sync_folder(target.parent)


def _on_first_rank(control: Axis, target: Path, action: Callable[[], object]) -> None:
    """Runs an action on rank 0; its failure is raised on all ranks."""
    failure = None
    if control.rank == 0:
        try:
            action()
        except CheckpointError as error:
            failure = str(error)
        except OSError as error:
            failure = (
                f"{target} cannot be written: {error.strerror or error}. Make it writable, or choose another place."
            )
    failure = all_gather_json(failure, control)[0]
    if failure is not None:
        raise CheckpointError(failure)
