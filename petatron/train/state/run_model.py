"""A model on its mesh that can also be written down, for whoever trains it and for whoever only loads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from petatron.base.errors import CheckpointError
from petatron.base.safe_files import remove
from petatron.checkpoint.convert.formats import draft_folder, open_draft
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.disk import Disk
from petatron.checkpoint.manager import CheckpointManager
from petatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from petatron.mesh.collectives import gather_objects
from petatron.mesh.mesh import Axis
from petatron.models.batch import Architecture
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.state.checkpointing import save_into
from petatron.train.state.hf_folder import Companions


class Model(ParallelModel):
    """What `build_model` and `from_pretrained` return: this rank's part of a model.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> bool(model.train_step(next(petatron.build_loader(run, model.mesh))).isfinite())
    True
    """

    companions: Companions | None = None
    """What came with the weights that `from_pretrained` read."""

    def save_pretrained(self, path: str | Path, *, tokenizer: Tokenizer | str | Path | None = None) -> None:
        """Write the model as a Hugging Face folder, which transformers opens as it is; every rank calls it.

        The folder appears when it is complete, and must not exist before, or be empty. Beside the weights go the tokenizer's files,
        generation_config.json and token ids that came with the model, if `from_pretrained` made it; `tokenizer`, one of ours or
        the path of a tokenizer.json or its folder, takes their place. A model that no Hugging Face family can express is written
        with the `model_type` petatron, which `from_pretrained` opens and transformers does not.

        >>> import petatron, tempfile
        >>> from pathlib import Path
        >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
        >>> folder = Path(tempfile.mkdtemp()) / "mine"
        >>> petatron.build_model(run, petatron.launch(run)).save_pretrained(folder)
        >>> sorted(file.name for file in folder.iterdir())
        ['config.json', 'generation_config.json', 'model.safetensors']
        """
        target = Path(path).absolute()
        draft, control = draft_folder(target), self.mesh.control
        opened = HuggingFaceTokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        _on_first(control, target, lambda: _begin(target, self.architecture))
        try:
            save_into(
                CheckpointManager(draft, control, world=self.mesh.world, device=self.mesh.device),
                step=0,
                model=self,
                optimizer=None,
                moments=False,
                facts=None,
                random_states=False,
                tokenizer=opened if opened is not None else self.companions,
            )
            _on_first(control, target, lambda: _take_model(draft, target, Disk()))
        finally:
            if control.rank == 0:
                with contextlib.suppress(OSError):
                    remove(draft)


def _begin(target: Path, architecture: Architecture) -> None:
    if architecture.moe is not None and architecture.moe.moe_router_enable_expert_bias:
        raise CheckpointError(
            "This model chooses its experts with biases, and the folder of a model has no place for them. Use save_checkpoint."
        )
    open_draft(target)


def _take_model(draft: Path, target: Path, disk: Disk) -> None:
    disk.rename(draft / step_folder.step_name(0) / step_folder.MODEL, target)
    disk.sync_folder(target.parent)


def _on_first(control: Axis, target: Path, action: Callable[[], None]) -> None:
    """Have the first rank do something; its failure is everyone's."""
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
    failure = gather_objects(failure, control)[0]
    if failure is not None:
        raise CheckpointError(failure)
