"""Resolves which parameters of a model are frozen: by patterns of their names, before anything is built.

`--freeze PATTERN ...` freezes what a pattern matches; `--train-only PATTERN ...` freezes everything else; `--freeze-language-model` and
`--freeze-vision-encoder` freeze parts of a model that reads images. A pattern is a glob on the
names of logical tensors (`layers.0.attention.q.weight`) or of parameters (`layers.0.attention.qkv.weight`). What is one tensor in memory
has one answer: fused matrices are frozen together, and so are the ends of a tied embedding. A spec may also declare a parameter that is
never trained (`ParamSpec.trainable`).

With adapters (`layers/adapters/`) all is frozen that a model without them has too, but for what `--adapter-also-train` names; a new head of
a task is trained.

A frozen parameter has no gradient, no master weights, no moments and no place in a reduction. Backward ends at the first trainable
parameter: layers below save nothing, and pipeline stages below get no gradient.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from petatron.base.errors import Problem, raise_problems
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.config.schema.run import RunConfig
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.transformer_layer import LayerSpec
from petatron.models.model_spec import ModelSpec
from petatron.models.optimizer_groups import optimizer_group
from petatron.models.registry import model_spec
from petatron.models.stage_inputs_outputs import ModelIO
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shape, TensorShard, compute_placement

_FREEZE, _TRAIN_ONLY, _ALSO_TRAIN = "--freeze", "--train-only", "--adapter-also-train"


@dataclass(frozen=True, slots=True)
class FrozenParams:
    """The frozen parameters of a model.

    names: of parameters, both ends of a tied one. layer_names: those of each layer, by their names in it.
    first_backward_layer: the index of the first layer that has a backward; the number of layers if none has.
    notices: what was frozen, or is trained, along with what a pattern names.
    """

    names: frozenset[str] = frozenset()
    layer_names: tuple[frozenset[str], ...] = ()
    first_backward_layer: int = 0
    notices: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """Hashes two numbers: estimates look this up thousands of times."""
        return hash((len(self.names), self.first_backward_layer))

    def __bool__(self) -> bool:
        return bool(self.names)

    def apply(self, params: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
        """Returns the parameters with those frozen that are."""
        return {
            name: replace(param, trainable=False) if name in self.names else param for name, param in params.items()
        }

    def trained(self, params: Mapping[str, ParamSpec]) -> Mapping[str, ParamSpec]:
        """Returns those of the parameters that are trained."""
        return without_names(params, self.names)

    def count_layers(
        self, spec: ModelSpec, stage: PipelineStage | None = None
    ) -> Counter[tuple[LayerSpec, frozenset[str], bool]]:
        """Returns the distinct layers of a stage, or of the model: with their frozen names, and whether they have a backward."""
        if not self.names:
            return Counter({(layer, frozenset(), True): count for layer, count in spec.count_layers(stage).items()})
        indices = spec.whole_model.layer_indices if stage is None else stage.layer_indices
        return Counter(
            (spec.layers[index], self.layer_names[index], index >= self.first_backward_layer) for index in indices
        )

    def num_without_backward(self, stage: PipelineStage) -> int:
        """Returns how many layers of a stage have no backward: its first ones, which save nothing."""
        return sum(index < self.first_backward_layer for index in stage.layer_indices)

    def with_boundaries(self, io: ModelIO, spec: ModelSpec, stages: Sequence[PipelineStage]) -> ModelIO:
        """Returns what the model takes and gives, without gradients into stages that have nothing trainable before them."""
        if not self.names:
            return io
        boundaries, trained = [], list[str]()
        for stage, boundary in zip(stages, io.boundaries, strict=True):
            boundaries.append(
                tuple(x if any(map(x.is_computed_by, trained)) else replace(x, requires_grad=False) for x in boundary)
            )
            trained += [name for name, param in self.apply(spec.params(stage)).items() if param.trainable]
        return replace(io, boundaries=tuple(boundaries))


NOTHING_FROZEN = FrozenParams()


def everything_frozen(spec: ModelSpec) -> FrozenParams:
    """Returns all parameters of a model that is only read: it generates, evaluates, or is a teacher or a reference."""
    return _assemble(spec, {*spec.params(), *spec.tied_params}, set(), ())


def without_names(params: Mapping[str, ParamSpec], names: Collection[str]) -> Mapping[str, ParamSpec]:
    """Returns the parameters that have other names."""
    return {name: param for name, param in params.items() if name not in names} if names else params


def frozen_params(run: RunConfig) -> FrozenParams:
    """Returns the frozen parameters of a run; `ConfigError` with everything that is wrong with its patterns.

    >>> from petatron.validate import load_config
    >>> flags = ["--vocab-size", "256", "--freeze", "layers.0.*", "embedding.*"]
    >>> run = load_config(flags, preset="tiny-llama", require_training=False).config
    >>> frozen = frozen_params(run)
    >>> "layers.0.mlp.down.weight" in frozen.names, frozen.first_backward_layer
    (True, 1)
    """
    spec, freeze = model_spec(run), run.train.freeze
    if run.train.freeze_language_model:
        freeze += spec.params_of_part("language model")
    if run.train.freeze_vision_encoder:
        freeze += spec.params_of_part("vision encoder")
    return _find_frozen(spec, freeze, run.train.train_only, run.optim)


def frozen_logical_names(spec: ModelSpec, frozen: FrozenParams) -> list[str]:
    """Returns the logical tensors that are frozen, in the order of the model."""
    return [shard.name for name, shards in _logical_names(spec).items() if name in frozen.names for shard in shards]


def name_params(spec: ModelSpec) -> dict[str, tuple[str, Shape]]:
    """Returns the logical tensors of a model, tied ends apart: each with the parameter that has it, and its shape."""
    shapes = spec.logical_shapes()
    return {
        name: (param, shapes[name])
        for param, names in _names_of_params(spec).items()
        for name in names
        if name in shapes
    }


def count_trained(spec: ModelSpec, frozen: FrozenParams) -> tuple[int, int]:
    """Returns the elements that are trained and those that are frozen, without vocabulary padding."""
    sizes = {name: param.num_elements for name, param in spec.params().items()}
    away = sum(size for name, size in sizes.items() if name in frozen.names)
    return sum(sizes.values()) - away, away


def describe_frozen(spec: ModelSpec, frozen: FrozenParams) -> str:
    """Returns the log line: how many parameters are trained and frozen, and what was frozen along with others."""
    trained, away = count_trained(spec, frozen)
    text = f"{trained:,} parameters are trained, {away:,} are frozen"
    if frozen.first_backward_layer:
        text += f"; backward ends above layer {frozen.first_backward_layer - 1}"
    return "; ".join([text, *frozen.notices])


@lru_cache(maxsize=64)
def _find_frozen(
    spec: ModelSpec, freeze: tuple[str, ...], train_only: tuple[str, ...], optim: OptimizerConfig
) -> FrozenParams:
    declared = any(not param.trainable for layer in spec.count_layers() for param in layer.params().values())
    declared = declared or any(not param.trainable for param in spec.outer_params(spec.whole_model).values())
    if not (freeze or train_only or declared or spec.config.adapter):
        return NOTHING_FROZEN
    params, tensors = spec.params(), _names_of_params(spec)
    also_train = spec.config.adapter_also_train
    problems = [*_unmatched(freeze, _FREEZE, tensors), *_unmatched(train_only, _TRAIN_ONLY, tensors)]
    raise_problems([*problems, *_unmatched(also_train, _ALSO_TRAIN, tensors)])
    names = {
        name
        for name, param in params.items()
        if not param.trainable
        or _matches((name, *tensors[name]), freeze)
        or (train_only and not _matches((name, *tensors[name]), train_only))
        or (spec.config.adapter and not param.fresh_if_missing and not _matches((name, *tensors[name]), also_train))
    }
    trained = {name: param for name, param in params.items() if name not in names}
    raise_problems(_optimizer_problems(params, trained, freeze, train_only, optim))
    notices = [*_partial_matches(freeze, "frozen", tensors), *_partial_matches(train_only, "trained", tensors)]
    names |= {end for end, original in spec.tied_params.items() if original in names}
    return _assemble(spec, names, set(trained), notices)


def _assemble(spec: ModelSpec, names: set[str], trained: set[str], notices: Sequence[str]) -> FrozenParams:
    prefixes = [f"layers.{index}." for index in range(len(spec.layers))]
    layer_names = tuple(
        frozenset(name for name in layer.params() if prefix + name in names)
        for prefix, layer in zip(prefixes, spec.layers)
    )
    first = next(
        (index for index, layer in enumerate(spec.layers) if len(layer_names[index]) < len(layer.params())),
        len(spec.layers),
    )
    outside = {name.partition(".")[0] for name in trained if not name.startswith("layers.")}
    first = min([first, *map(spec.layer_after, outside)])
    return FrozenParams(frozenset(names), layer_names, first, tuple(notices))


def _logical_names(spec: ModelSpec) -> dict[str, tuple[TensorShard, ...]]:
    coordinate = ModelParallelCoordinate()
    return {
        name: tuple(compute_placement(name, param.shape, param.shard, coordinate).tensor_shards)
        for name, param in spec.params().items()
    }


def _names_of_params(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Returns the logical tensors of each parameter, which a pattern may match besides its own name: tied ends too."""
    names = {name: tuple(shard.name for shard in shards) for name, shards in _logical_names(spec).items()}
    for end, original in spec.tied_params.items():
        if end not in names:
            names[original] += (end,)
    return names


def _matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _unmatched(patterns: Sequence[str], flag: str, tensors: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    names = [*dict.fromkeys(name for param, logical in tensors.items() for name in (param, *logical))]
    for pattern in patterns:
        if _matches(names, [pattern]):
            continue
        inside = f"{pattern.rstrip('.')}.*"
        if _matches(names, [inside]):
            fix = f'Give "{inside}" for all parameters inside of it.'
        else:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            fix = f"{'Close' if close else 'Some'} names: {', '.join(close or (names[0], names[-1]))}. `petatron config params` lists them."
        yield Problem(flag, pattern, "matches no parameter of this model", fix)


def _partial_matches(patterns: Sequence[str], done: str, tensors: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields what is frozen, or trained, along with what patterns match: the rest of fused and tied parameters."""
    along: dict[str, list[str]] = {}
    for param, logical in tensors.items():
        matched = [name for name in logical if _matches((name,), patterns)]
        if matched and len(matched) < len(logical) and (param in logical or not _matches((param,), patterns)):
            along[matched[0]] = [name for name in logical if name not in matched]
    if along:
        example, rest = next(iter(along.items()))
        more = f", and so in {len(along) - 1} other parameters" if len(along) > 1 else ""
        yield f"{' and '.join(rest)} {'is' if len(rest) == 1 else 'are'} {done} too, as one tensor with {example}{more}"


def _optimizer_problems(
    params: Mapping[str, ParamSpec],
    trained: Mapping[str, ParamSpec],
    freeze: Sequence[str],
    train_only: Sequence[str],
    optim: OptimizerConfig,
) -> Iterator[Problem]:
    flag, patterns = (_FREEZE, freeze) if freeze else (_TRAIN_ONLY, train_only)
    if not trained:
        rule = f"leaves none of the model's {len(params)} parameters to train"
        yield Problem(flag, " ".join(patterns), rule, "Leave out a pattern.")
        return
    rules = {optimizer_group(optim, name, param).rule for name, param in trained.items()}
    if optim.optimizer not in rules:
        rule = f"would update nothing: {flag} leaves only parameters that {' and '.join(sorted(rules))} updates"
        yield Problem("--optimizer", optim.optimizer, rule, f"Use --optimizer {min(rules)}.")
    if optim.decoupled_lr is not None and not any(param.role == "vocabulary" for param in trained.values()):
        rule = f"is the learning rate of the embedding and the output head, and {flag} freezes both"
        yield Problem("--decoupled-lr", f"{optim.decoupled_lr:g}", rule, "Leave it out.")
