"""The stateful components of a model and its optimizer: weights, moments, expert biases, random state, FP8 histories.

Weights are saved in the model's precision (as a Hugging Face folder), master weights and moments by logical tensor, for any layout. RNG
states and the amax histories of FP8 delayed scaling belong to a rank, so they are restored only in the layout that saved them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from petatron.checkpoint.inspect.check_model_folder import warn_of_damaged_model_folder
from petatron.checkpoint.stateful_components import FixedPlace, SavedState, Stateful
from petatron.checkpoint.tensor_chunk import MASTER_PREFIX, ROUTER_PREFIX, WEIGHT_PREFIX, Chunk
from petatron.mesh.rng import RandomStreams
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.sharding.flat_shard import group_tensor_shards

_WEIGHT, _MASTER, _ROUTER = (prefix.removesuffix("/") for prefix in (WEIGHT_PREFIX, MASTER_PREFIX, ROUTER_PREFIX))
_OTHER_LAYOUT = "the checkpoint has none for this layout"


def model_components(
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer | None = None,
    *,
    moments: bool = True,
    random_states: bool = True,
) -> list[Stateful]:
    """Returns the components of a model and its optimizer. Without `moments` a load fills only the optimizer's master weights."""
    trains = optimizer is not None and moments
    components: list[Stateful] = [WeightState(model, optimizer, save_master=trains)]
    if optimizer is not None and moments:
        components.append(MomentState(optimizer))
    components.append(ExpertBiasState(model))
    if random_states:
        components.append(RandomState(model.rng_streams))
    if trains:
        components.append(Fp8HistoryState(model))
    return components


def optimizer_of(components: Iterable[Stateful]) -> MixedPrecisionOptimizer | None:
    """Returns the optimizer whose master weights are among the components."""
    return next((component.optimizer for component in components if isinstance(component, WeightState)), None)


class WeightState(FixedPlace):
    """The weights. With an optimizer, its master weights are loaded and the model's weights cast from them, but for frozen ones."""

    name, title, required = "weights", "weights", True
    fixed_kinds = (_WEIGHT, _MASTER)

    def __init__(self, model: ParallelModel, optimizer: MixedPrecisionOptimizer | None, *, save_master: bool) -> None:
        self._model, self._optimizer, self._save_master = model, optimizer, save_master

    @property
    def optimizer(self) -> MixedPrecisionOptimizer | None:
        return self._optimizer

    def chunks(self) -> Iterator[Chunk]:
        yield from self._model_chunks()
        if self._optimizer is not None and self._save_master and self._optimizer.has_master_weights:
            yield from self._trained_chunks(self._optimizer)

    def chunks_to_load(self) -> Iterator[Chunk]:
        yield from self._model_chunks(frozen_only=self._optimizer is not None)
        if self._optimizer is not None:
            yield from self._trained_chunks(self._optimizer)

    def _model_chunks(self, *, frozen_only: bool = False) -> Iterator[Chunk]:
        for group in self._model.param_groups:
            if group.spec.trainable and frozen_only:
                continue
            for shard, view in group_tensor_shards(group, group.weights()):
                yield Chunk.of_shard(_WEIGHT, group, shard, view)

    @staticmethod
    def _trained_chunks(optimizer: MixedPrecisionOptimizer) -> Iterator[Chunk]:
        kind = _MASTER if optimizer.has_master_weights else _WEIGHT
        for group, shard, view in optimizer.master_weights():
            yield Chunk.of_shard(kind, group, shard, view)

    def restore(self, saved: SavedState) -> None:
        if self._optimizer is None:
            self._model.all_gather_params()
            return
        if saved.step_folder is not None:
            warn_of_damaged_model_folder(saved.step_folder, self._model.mesh.control)
        self._optimizer.copy_master_to_model_weights()


class MomentState(FixedPlace):
    """The moments of the optimizer, and its number of updates."""

    name, title, required, trained_only = "optimizer", "optimizer state", True, True
    path = ("optimizer",)

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind for kind, *_ in self._optimizer.moments()))

    def chunks(self) -> Iterator[Chunk]:
        for kind, group, shard, view in self._optimizer.moments():
            yield Chunk.of_shard(kind, group, shard, view)

    def values(self) -> dict[str, float]:
        return self._optimizer.scalar_state()

    def restore(self, saved: SavedState) -> None:
        self._optimizer.load_scalar_state(saved.values)
        self._optimizer.reset_moments(saved.unfrozen)

    def start_anew(self, reason: str) -> None:
        """Says nothing: the user typed the flag that leaves the moments out."""

    def refusal(self, folder: str) -> str:
        return (
            f"The checkpoint in {folder} was saved without optimizer state. Use --finetune to start a new run from its "
            "weights, or --no-load-optim to go on without moments."
        )


class ExpertBiasState(FixedPlace):
    """Router state that is not a parameter: the expert biases, equal on all ranks of a stage."""

    name, title, required = "router", "expert biases", True
    fixed_kinds = (_ROUTER,)

    def __init__(self, model: ParallelModel) -> None:
        self._model = model

    def chunks(self) -> Iterator[Chunk]:
        primary = self._model.mesh["stage"].rank == 0
        for name, state in self._model.router_statistics.expert_biases():
            yield Chunk(f"{_ROUTER}/{name}", tuple(state.shape), (0,) * state.dim(), state, primary)


class RandomState(FixedPlace):
    """The random states of a rank."""

    name, title, fixed_local_prefix = "random states", "random states (dropout)", ""

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams

    def local(self) -> Mapping[str, Tensor]:
        return self._streams.state()

    def restore(self, saved: SavedState) -> str | None:
        if not saved.local:
            reason = "the checkpoint has none" if saved.local is not None else _OTHER_LAYOUT
            return self.start_anew(reason)
        self._streams.restore(dict(saved.local))
        return None


class Fp8HistoryState(FixedPlace):
    """The amax histories of FP8 delayed scaling of a rank."""

    name, title, fixed_local_prefix = "fp8", "FP8 histories", "fp8/"

    def __init__(self, model: ParallelModel) -> None:
        self._model = model

    def local(self) -> Mapping[str, Tensor]:
        return self._model.fp8_gemms.state()

    def restore(self, saved: SavedState) -> str | None:
        if self._load(saved.local or {}):
            return None
        if saved.local is None:
            reason = f"{_OTHER_LAYOUT}, where a rank sees other parts of the tensors"
        elif not saved.local:
            reason = "the checkpoint has none"
        else:
            reason = "those in the checkpoint are of other products, another format or another --fp8-amax-history-len"
        return self._anew(reason)

    def start_anew(self, reason: str) -> str | None:
        return None if self._load({}) else self._anew(reason)

    def _load(self, histories: Mapping[str, Tensor]) -> bool:
        return self._model.fp8_gemms.load_state(histories, self._model.mesh.device)

    @staticmethod
    def _anew(reason: str) -> str:
        return f"FP8 histories start anew, and the next step scales by its own tensors: {reason}"
