"""Opens the frozen models that an objective reads (a teacher, a reference), on the mesh of the model that is trained."""

from __future__ import annotations

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.config.schema.run import RunConfig
from petatron.models.objective import START
from petatron.models.registry import without_adapters
from petatron.parallel.model_beneath_adapters import ModelBeneathAdapters, RoleModel
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.detect_model_format import detect_format
from petatron.pretrained.from_pretrained import from_pretrained
from petatron.pretrained.hub import local_model
from petatron.pretrained.merge_adapters import is_adapter_key
from petatron.pretrained.model_reader import open_model_reader
from petatron.pretrained.saveable_model import Model


def open_frozen_models(run: RunConfig, model: Model) -> None:
    """Opens every model that the objective of a model reads; every rank calls it."""
    for role, wanted in model.objective.models.items():
        if wanted.folder is not None:  # else the model itself
            model.role_models[role] = open_frozen_model(run, model, role, wanted.folder)


def open_frozen_model(run: RunConfig, model: ParallelModel, role: str, wanted: str) -> RoleModel:
    """Opens the frozen model of a role in the layout and precision of the trained one; every rank calls it.

    A model that starts a run in which adapters alone are trained is the trained one without them, and is not opened.
    """
    folder = role_folder(run, role, wanted)
    if wanted == START and not run.checkpoint.finetune and _is_beneath_adapters(folder, model, role):
        return ModelBeneathAdapters(model)
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
    return frozen


def role_folder(run: RunConfig, role: str, wanted: str) -> str:
    """Returns the folder of a role: of `START` the one that the run started from, whatever it was resumed from since."""
    if wanted != START:
        return wanted
    if run.checkpoint.pretrained_checkpoint is None:
        rule = f"is the model that the run starts from, and it starts from none: the {role} of --objective {run.train.objective}"
        raise ConfigError(
            [Problem("--objective-settings", f"{role}={START}", rule, f"Add --from FOLDER, or give {role}=FOLDER.")]
        )
    return run.checkpoint.pretrained_checkpoint


def _is_beneath_adapters(folder: str, model: ParallelModel, role: str) -> bool:
    """Whether the model that a run started from is the one that is trained, without adapters, which alone are trained."""
    trained = set(model.spec.logical_shapes()) - set(model.frozen_tensors)
    if model.spec.config.adapter is None or not all(is_adapter_key(name) for name in trained):
        return False
    path = local_model(folder, where=f"the {role}")
    vocab_size = model.spec.vocab_size if detect_format(path) == "megatron" else None
    start = open_model_reader(path, vocab_size=vocab_size)  # it may have adapters of its own
    return start.spec.logical_shapes() == without_adapters(model.spec).logical_shapes()
