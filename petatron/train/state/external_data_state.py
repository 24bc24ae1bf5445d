"""The state of an external data loader (`--dataloader-type external`), which no number can stand for."""

from __future__ import annotations

from typing import Any

from petatron.base.errors import CheckpointError
from petatron.checkpoint.stateful_components import SavedState, Stateful
from petatron.config import RunConfig
from petatron.config.schema.objective_and_dataset_names import EXTERNAL
from petatron.data.external_loader import ExternalLoader
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import Axis
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel


class ExternalDataState(Stateful):
    """What the loader of each data-parallel rank says of itself, in the order of these ranks; nothing if the loaders have no state."""

    name, title = "external_data", "states of the external data loader"

    def __init__(self, dp: Axis) -> None:
        self._dp = dp
        self._loader: ExternalLoader | None = None
        self._states: list[Any] | None = None

    def attach(self, loader: ExternalLoader) -> None:
        """Names the loader whose state it is, which goes on with what was restored."""
        self._loader = loader
        if self._states is not None:
            loader.restore(self._states[self._dp.rank])

    def values(self) -> list[Any] | None:
        """Every rank calls it."""
        if self._loader is None:
            return self._states
        states = all_gather_json(self._loader.state(), self._dp)
        return None if all(state is None for state in states) else states

    def restore(self, saved: SavedState) -> None:
        states = saved.values
        if states is not None and not isinstance(states, list):
            raise ValueError("the states of its external data loader are no list")
        if states is not None and len(states) != self._dp.size:
            raise CheckpointError(
                f"The checkpoint has the state of an external data loader for each of {len(states)} data-parallel ranks, and this run has "
                f"{self._dp.size}. Resume with as many; or begin the data anew with --finetune. A loader that begins at consumed_samples "
                "and has no state_dict resumes with any number."
            )
        self._states = states


def build_external_data_state(
    run: RunConfig, model: ParallelModel, optimizer: MixedPrecisionOptimizer
) -> ExternalDataState | None:
    """Returns the component of a run with an external loader."""
    return ExternalDataState(model.mesh.dp) if run.data.dataloader_type == EXTERNAL else None
