"""Saving and loading the state of a model and its optimizer, for the loop here and for loops of your own.

A checkpoint holds, by logical tensor, the weights in the widest precision the run has (the optimizer's master weights) and
the moments: the same for every layout and every precision. Random states belong to a rank, so they come back only in the
layout that saved them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.state import Chunk
from petatron.mesh.rng import stable_seed
from petatron.mesh.spec import Piece
from petatron.mesh.stretch import ParameterGroup, group_pieces
from petatron.optim.master import MasterOptimizer
from petatron.parallel.model import ParallelModel

_UPDATES = "optimizer"


def save_checkpoint(
    folder: str,
    *,
    step: int,
    model: ParallelModel,
    optimizer: MasterOptimizer | None = None,
    moments: bool = True,
    facts: Mapping[str, Any] | None = None,
    random_states: bool = True,
) -> None:
    """Publish a checkpoint; every rank calls it. Without an optimizer or `moments` it can only be finetuned from.

    `facts` are JSON values.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> folder = tempfile.mkdtemp()
    >>> petatron.save_checkpoint(folder, step=7, model=model, facts={"note": "first"})
    >>> petatron.load_checkpoint(folder, model=model)
    {'note': 'first'}
    """
    updates = optimizer.facts() if optimizer is not None and moments else None
    own = {_UPDATES: updates, "facts": dict(facts or {})}
    CheckpointManager(folder, model.mesh.control).save(
        step,
        list(chunks(model, optimizer, moments=moments)),
        facts=own,
        same_layout_key=model.layout_key,
        local=model.streams.state() if random_states else {},
    )


def load_checkpoint(
    folder: str,
    *,
    model: ParallelModel,
    optimizer: MasterOptimizer | None = None,
    moments: bool = True,
    step: int | None = None,
    random_states: bool = True,
) -> dict[str, Any] | None:
    """Fill the model (and the optimizer) from a folder's checkpoint, whatever layout saved it, and return its facts.

    None when the folder holds no checkpoint. `step` None means the newest. Without `moments` the optimizer takes the
    weights alone.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> petatron.load_checkpoint(tempfile.mkdtemp(), model=petatron.build_model(run, petatron.launch(run))) is None
    True
    """
    manager = CheckpointManager(folder, model.mesh.control)
    if step is None and manager.latest() is None:
        return None
    wanted = list(chunks(model, optimizer, moments=moments))
    found = manager.load(step, wanted, same_layout_key=model.layout_key)
    if optimizer is not None:
        optimizer.write_back()
    else:
        model.publish()
    if optimizer is not None and moments:
        if found.facts[_UPDATES] is None:
            raise CheckpointError(
                f"The checkpoint in {folder} was saved without optimizer state. Use --finetune to start a new run from its "
                "weights, or --no-load-optim to go on without moments."
            )
        optimizer.restore_facts(found.facts[_UPDATES])
    if random_states and found.local:
        model.streams.restore(found.local)
    return found.facts["facts"]


def chunks(model: ParallelModel, optimizer: MasterOptimizer | None, *, moments: bool = True) -> Iterator[Chunk]:
    """Every box of every logical tensor this rank holds."""
    weights = optimizer.weights() if optimizer is not None else _model_weights(model)
    for group, piece, view in weights:
        yield _chunk("model", group, piece, view)
    if optimizer is not None and moments:
        for kind, group, piece, view in optimizer.moments():
            yield _chunk(kind, group, piece, view)
    for name, state in model.routers.state():
        yield Chunk(f"model/{name}", tuple(state.shape), (0,) * state.dim(), state, model.mesh["stage"].rank == 0)


def _model_weights(model: ParallelModel) -> Iterator[tuple[ParameterGroup, Piece, Tensor]]:
    for group in model.groups:
        for piece, view in group_pieces(group, group.weights()):
            yield group, piece, view


def _chunk(kind: str, group: ParameterGroup, piece: Piece, view: Tensor) -> Chunk:
    """Copies share the writing: which of them saves a box follows from its name."""
    copies = group.copies
    primary = piece.primary and copies.rank == stable_seed(kind, piece.name, piece.start) % copies.size
    return Chunk(f"{kind}/{piece.name}", piece.logical_shape, piece.start, view, primary)
