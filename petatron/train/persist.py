"""Saving and loading the state of a model and its optimizer, for the loop here and for loops of your own.

A checkpoint holds, by logical tensor, the model's weights, the master weights where they differ, and the moments: the same
for every layout. Random states belong to a rank, so they come back only in the layout that saved them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.state import Chunk
from petatron.mesh.spec import Piece
from petatron.optim.master import MasterOptimizer
from petatron.parallel.model import ParallelModel

_UPDATES = "optimizer"


def save_checkpoint(
    folder: str,
    *,
    step: int,
    model: ParallelModel,
    optimizer: MasterOptimizer | None = None,
    facts: Mapping[str, Any] | None = None,
    random_states: bool = True,
) -> None:
    """Publish a checkpoint; every rank calls it. Without an optimizer only weights are saved. `facts` are JSON values.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> folder = tempfile.mkdtemp()
    >>> petatron.save_checkpoint(folder, step=7, model=model, facts={"note": "first"})
    >>> petatron.load_checkpoint(folder, model=model)
    {'note': 'first'}
    """
    own = {_UPDATES: optimizer.facts() if optimizer is not None else None, "facts": dict(facts or {})}
    CheckpointManager(folder, model.mesh.world).save(
        step,
        list(chunks(model, optimizer)),
        facts=own,
        same_layout_key=_layout_key(model),
        local=model.streams.state() if random_states else {},
    )


def load_checkpoint(
    folder: str,
    *,
    model: ParallelModel,
    optimizer: MasterOptimizer | None = None,
    step: int | None = None,
    random_states: bool = True,
) -> dict[str, Any] | None:
    """Fill the model (and the optimizer) from a folder's checkpoint, whatever layout saved it, and return its facts.

    None when the folder holds no checkpoint. `step` None means the newest.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> petatron.load_checkpoint(tempfile.mkdtemp(), model=petatron.build_model(run, petatron.launch(run))) is None
    True
    """
    manager = CheckpointManager(folder, model.mesh.world)
    if step is None and manager.latest() is None:
        return None
    found = manager.load(step, list(chunks(model, optimizer)), same_layout_key=_layout_key(model))
    if optimizer is not None:
        if found.facts[_UPDATES] is None:
            raise CheckpointError(
                f"The checkpoint in {folder} was saved without optimizer state. Use --finetune to start a new run from its "
                "weights, or --no-load-optim to go on without moments."
            )
        optimizer.restore_facts(found.facts[_UPDATES])
    if random_states and found.local:
        model.streams.restore(found.local)
    return found.facts["facts"]


def chunks(model: ParallelModel, optimizer: MasterOptimizer | None) -> Iterator[Chunk]:
    """Every box of every logical tensor this rank holds."""
    for group in model.groups:
        for piece, view in group.pieces(group.weights):
            yield _chunk(model, "model", piece, view)
    if optimizer is not None:
        for kind, piece, view in optimizer.tensors():
            yield _chunk(model, kind, piece, view)


def _chunk(model: ParallelModel, kind: str, piece: Piece, view: Tensor) -> Chunk:
    primary = piece.primary and model.mesh.dp_cp.rank == 0
    return Chunk(f"{kind}/{piece.name}", piece.logical_shape, piece.start, view, primary)


def _layout_key(model: ParallelModel) -> str:
    return f"{model.mesh.layout} sequence_parallel={model.sequence_parallel}"
