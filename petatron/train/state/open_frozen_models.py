"""Opens the frozen models that an objective reads (a teacher, a reference), on the mesh of the model that is trained."""

from __future__ import annotations

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.config.schema.run import RunConfig
from petatron.models.objective import START
from petatron.pretrained.from_pretrained import from_pretrained
from petatron.pretrained.saveable_model import Model


def open_frozen_models(run: RunConfig, model: Model) -> None:
    """Opens every model that the objective of a model reads, in its layout and precision; every rank calls it."""
    for role, wanted in model.objective.models.items():
        if wanted.folder is None:  # the model itself
            continue
        folder = _start_of(run, role) if wanted.folder == START else wanted.folder
        frozen = from_pretrained(folder, model.mesh, dtype=model.dtype, gradients=False)
        ids, expected = frozen.spec.vocab_size, model.spec.vocab_size
        if ids != expected:
            raise CheckpointError(
                f"The {role} in {folder} has {ids} token ids, and the model that is trained has {expected}: a token means something "
                f"else to each. Choose a {role} with the same tokenizer."
            )
        if frozen.io.sequence_order != model.io.sequence_order:
            raise CheckpointError(
                f"The {role} in {folder} splits sequences for context parallelism in another way than the model that is "
                "trained. Use --context-parallel-size 1."
            )
        if frozen.computes_loss != model.computes_loss:
            raise CheckpointError(
                f"The {role} in {folder} has its last pipeline stage on another rank than the model that is trained, so its outputs "
                "are not where the loss is computed. Use another --pipeline-schedule than zb-v."
            )
        model.role_models[role] = frozen


def _start_of(run: RunConfig, role: str) -> str:
    """Returns the folder that a run started from, whatever it was resumed from since."""
    if run.checkpoint.pretrained_checkpoint is None:
        rule = f"is the model that the run starts from, and it starts from none: the {role} of --objective {run.train.objective}"
        raise ConfigError(
            [Problem("--objective-settings", f"{role}={START}", rule, f"Add --from FOLDER, or give {role}=FOLDER.")]
        )
    return run.checkpoint.pretrained_checkpoint
