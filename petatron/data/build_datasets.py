"""Builds the training, validation and test datasets of a run, and reports every problem of the data before training starts.

A `DatasetKind` (`dataset_kinds.py`) opens the sources and makes their samples; nothing here depends on the kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from petatron.base.errors import ConfigError, DataError, Problem, raise_problems
from petatron.base.log import get_logger
from petatron.base.untrusted_files import reading_untrusted
from petatron.config.schema.data import DataConfig
from petatron.config.schema.data_blend import BlendError, named_sets, parse_split, read_blend_file
from petatron.config.schema.objective_and_dataset_names import GPT_DATASET
from petatron.config.schema.run import RunConfig
from petatron.data import best_fit_dataset, gpt_dataset  # noqa: F401  they register their kinds
from petatron.data.batch_loader import SampleDataset
from petatron.data.blended_dataset import (
    BlendedDataset,
    WeightedPrefixes,
    load_blend,
    normalize_once,
    parse_weighted_prefixes,
    samples_to_build,
)
from petatron.data.conversations import conversations_kind, preferences_kind  # noqa: F401  they register their kinds
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.data_file_error import data_file_error
from petatron.data.dataset_kinds import (
    DatasetKind,
    DatasetRequest,
    DataSource,
    SourceShare,
    Split,
    dataset_kind,
)
from petatron.data.fill_in_middle import FillInMiddleDataset, fill_in_middle_rule
from petatron.data.image_text import image_text_kind  # noqa: F401  it registers its kind
from petatron.data.index_cache import IndexLog
from petatron.data.labelled import labelled_text_dataset  # noqa: F401  so does this
from petatron.data.masked import masked_language_dataset, span_corruption_dataset  # noqa: F401  they register theirs
from petatron.data.object_storage.storage_cache import ObjectStorageCache
from petatron.data.recommendation import item_history_dataset  # noqa: F401  so does this
from petatron.data.recorded_tokenizer import check_recorded_tokenizer
from petatron.data.sample_index_folder import sample_index_folder
from petatron.data.tokenizer import Tokenizer
from petatron.data.train_valid_test_split import split_units
from petatron.models import (  # noqa: F401  they register their objectives
    distillation,
    policy_gradient,
    preference_objectives,
    value_regression,
)
from petatron.models.objective import build_objective

SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class SplitDatasets:
    """The datasets of the splits; validation sets by name (None: the only set). A split without samples has no dataset."""

    train: SampleDataset | None
    test: SampleDataset | None
    valid_sets: Mapping[str | None, SampleDataset] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Warnings that the data is too small for the run; they are logged already."""

    @property
    def valid(self) -> SampleDataset | None:
        """The first validation set."""
        return next(iter(self.valid_sets.values()), None)


@dataclass(frozen=True, slots=True)
class _WantedSet:
    """A training, validation or test set that the run needs: the request, and the blend of sources (None for mock data)."""

    request: DatasetRequest
    blend: WeightedPrefixes | None
    name: str | None = None

    @property
    def title(self) -> str:
        """The split as messages name it, with the name of a validation set."""
        return self.request.split if self.name is None else f"{self.request.split} ({self.name})"


@dataclass(frozen=True, slots=True)
class SplitUnits:
    """The units of one source that belong to one split, and the source's weight in the blend."""

    source: DataSource
    units: range
    weight: float | None
    cache_dir: Path | None = None

    @property
    def size(self) -> int:
        return self.source.size(self.units)


def chosen_kind(config: RunConfig) -> DatasetKind:
    """Returns the kind of a run's datasets: that of `--dataset-type`, else of its objective, else text."""
    return dataset_kind(chosen_kind_name(config), config.data.dataset_settings).of_run(config)


def chat_kind(name: str, settings: Sequence[str]) -> DatasetKind:
    """Returns a kind of conversations or of preferences outside of a run; raises `ConfigError` with every problem of its settings."""
    kind = dataset_kind(name, settings)
    if isinstance(kind, ConversationSettings):
        raise_problems(kind.setting_problems())
    return kind


def chosen_kind_name(config: RunConfig) -> str:
    """Returns the name that the kind of a run's datasets is registered by."""
    return config.data.dataset_type or build_objective(config).dataset_type or GPT_DATASET


def build_datasets(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    num_samples: tuple[int, int, int],
    *,
    index_log: IndexLog | None = None,
) -> SplitDatasets:
    """Builds datasets with the given numbers of training, validation and test samples.

    Every rank calls this; on a shared file system one rank should call it first, so that the others find its cached indices.
    """
    kind = chosen_kind(config)
    index_log = IndexLog() if index_log is None else index_log
    requests = [
        DatasetRequest(
            split=split,
            num_samples=count,
            seq_length=config.model.seq_length,
            seed=config.train.seed,
            tokenizer=tokenizer,
            vocab_size=vocab_size(config, tokenizer),
            object_storage=_object_storage(config.data),
            index_log=index_log,
        )
        for split, count in zip(SPLITS, num_samples, strict=True)
    ]
    fill = fill_in_middle_rule(config.data, tokenizer) if config.data.fim_data else None
    warnings: list[str] = []
    built: dict[tuple[Split, str | None], SampleDataset | None]
    if config.data.mock_data:
        built = {(request.split, None): kind.mock(request) for request in requests if request.num_samples}
    else:
        wanted = _wanted_sets(config.data, requests)
        sources = _open_all(kind, wanted, force_tokenizer=config.tokenizer.force_tokenizer)
        split_sources = _split_sources(config, wanted, sources)
        built = {
            (wanted_set.request.split, wanted_set.name): _build_set(config, kind, wanted_set, of_set, warnings)
            for wanted_set, of_set in zip(wanted, split_sources, strict=True)
        }
    if used := str(index_log):
        get_logger(__name__).info("sample indices: %s", used)
    if fill is not None and tokenizer is not None:
        for (split, name), dataset in built.items():
            if dataset is not None:
                built[split, name] = FillInMiddleDataset(dataset, fill, tokenizer, seed=config.train.seed, split=split)
    valid = {name: dataset for (split, name), dataset in built.items() if split == "valid" and dataset is not None}
    return SplitDatasets(built.get(("train", None)), built.get(("test", None)), valid, tuple(warnings))


def open_split_units(config: RunConfig, tokenizer: Tokenizer | None) -> tuple[list[SplitUnits], list[SplitUnits]]:
    """Opens the sources of the training and the validation split, and returns their units, before anything says how
    many samples are wanted.
    """
    kind, data = chosen_kind(config), config.data
    evaluates = bool(data.valid_data_path) if _has_blend_per_split(data) else parse_split(data.split)[1] > 0
    splits: tuple[Split, ...] = ("train", "valid") if evaluates and config.train.eval_iters else ("train",)
    requests = [
        DatasetRequest(
            split=split,
            num_samples=1 if split in splits else 0,
            seq_length=config.model.seq_length,
            seed=config.train.seed,
            tokenizer=tokenizer,
            vocab_size=vocab_size(config, tokenizer),
            object_storage=_object_storage(data),
        )
        for split in SPLITS
    ]
    wanted = _wanted_sets(data, requests)
    sources = _open_all(kind, wanted, force_tokenizer=config.tokenizer.force_tokenizer)
    of_splits: dict[Split, list[SplitUnits]] = {"train": [], "valid": []}
    for wanted_set, units in zip(wanted, _split_sources(config, wanted, sources), strict=True):
        folder = sample_index_folder(data, units[0].source.name) if units else None
        of_splits[wanted_set.request.split] += [replace(part, cache_dir=folder) for part in units]
    return of_splits["train"], of_splits["valid"]


def vocab_size(config: RunConfig, tokenizer: Tokenizer | None) -> int | None:
    """Returns the number of valid token ids; None if neither the config nor a tokenizer says it."""
    if config.model.vocab_size is None and tokenizer is not None:
        return tokenizer.vocab_size
    return config.model.vocab_size


def _wanted_sets(data: DataConfig, requests: Sequence[DatasetRequest]) -> list[_WantedSet]:
    """Returns the sets that are needed, with their blends."""
    shared = data.data_path
    if data.data_args_path is not None:
        with reading_untrusted(
            Path(data.data_args_path), lambda path, why: data_file_error(f"--data-args-path {path}", why)
        ):
            shared = tuple(read_blend_file(data.data_args_path))
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if shared and any(per_split):
        raise DataError(
            "Data is given both for all splits (--data-path or --data-args-path) and per split (--train-data-path, "
            "--valid-data-path, --test-data-path). Use one of the two."
        )
    chosen = per_split if any(per_split) else (shared,) * 3
    missing = [request.split for request, paths in zip(requests, chosen) if request.num_samples and not paths]
    if missing:
        raise DataError(
            f"No data is given for {', '.join(missing)}. Use --data-path (cut by --split), "
            f"{', '.join(f'--{split}-data-path' for split in missing)}, or --mock-data."
        )
    flags = [f"--{split}-data-path" for split in SPLITS] if any(per_split) else ["--data-path"] * 3
    if data.data_args_path is not None:
        flags = [f"--data-args-path {data.data_args_path}"] * 3
    return [
        _WantedSet(request, parse_weighted_prefixes(blend, flag=flag), name)
        for flag, paths, request in zip(flags, chosen, requests)
        if request.num_samples
        for name, blend in _named_sets(paths, flag).items()
    ]


def _named_sets(paths: Sequence[str], flag: str) -> Mapping[str | None, Sequence[str]]:
    """Returns the paths of each validation set by its name; other flags have one unnamed set."""
    if flag != "--valid-data-path":
        return {None: paths}
    try:
        return named_sets(paths)
    except BlendError as error:
        fix = "Begin each set with a name of its own, NAME=prefix; further words of the set follow without it."
        raise ConfigError([Problem(flag, " ".join(paths), str(error), fix)]) from error


def _open_all(kind: DatasetKind, wanted: Sequence[_WantedSet], *, force_tokenizer: bool) -> dict[str, DataSource]:
    """Opens each source once; raises one error for all sources that are missing, damaged or made with another tokenizer."""
    sources: dict[str, DataSource] = {}
    problems: dict[str, str] = {}
    for wanted_set in wanted:
        for prefix in wanted_set.blend[1] if wanted_set.blend else ():
            if prefix in sources or prefix in problems:
                continue
            try:
                check_recorded_tokenizer(prefix, wanted_set.request.tokenizer, force=force_tokenizer)
                sources[prefix] = kind.open(prefix, wanted_set.request)
            except DataError as error:
                problems[prefix] = str(error)
            except OSError as error:
                problems[prefix] = f"{prefix} cannot be read: {error.strerror or error}. Give {kind.reads}."
    _raise_all(list(problems.values()))
    return sources


def _split_sources(
    config: RunConfig, wanted: Sequence[_WantedSet], sources: Mapping[str, DataSource]
) -> list[list[SplitUnits]]:
    """Returns the units of each source for each set; a split with a blend of its own uses all units.

    A source without units for training, or for validation with --eval-interval, is an error. For other splits, which the default
    --split of a small dataset may leave empty, it is a warning, and the split is not evaluated.
    """
    data = config.data
    uses_all_units = _has_blend_per_split(data)
    needed = {"train", "valid"} if config.train.eval_interval else {"train"}
    problems: list[str] = []
    result: list[list[SplitUnits]] = []
    for wanted_set in wanted:
        weights, prefixes = wanted_set.blend or (None, ())
        of_set: list[SplitUnits] = []
        for place, prefix in enumerate(prefixes):
            source = sources[prefix]
            units = range(source.num_units)
            if not uses_all_units and source.splits_units:
                units = split_units(data.split, source.num_units)[SPLITS.index(wanted_set.request.split)]
            part = SplitUnits(source, units, weights[place] if weights else None)
            if part.size:
                of_set.append(part)
                continue
            text = f"{prefix}: the {wanted_set.title} split is empty: "
            fix = "Give a file that has some."
            if uses_all_units or not source.num_units:
                text += f"the file has no {source.size_unit}"
            else:
                text += f"--split {data.split} gives it {len(units)} of {source.num_units:,} {source.unit}"
                fix = "Give it a larger share, or turn its evaluation off (--eval-iters 0)."
            if wanted_set.request.split in needed:
                problems.append(f"{text}, but {wanted_set.request.num_samples:,} samples are needed. {fix}")
            else:
                get_logger(__name__).warning("%s; it will not be evaluated", text)
        result.append(of_set)
    _raise_all(problems)
    return result


def _has_blend_per_split(data: DataConfig) -> bool:
    return bool(data.train_data_path or data.valid_data_path or data.test_data_path)


def _build_set(
    config: RunConfig, kind: DatasetKind, wanted: _WantedSet, sources: list[SplitUnits], warnings: list[str]
) -> SampleDataset | None:
    """Builds one set from its sources, and appends to `warnings` if they are too small for the run."""
    if not sources:
        return None
    cache = sample_index_folder(config.data, sources[0].source.name)
    request, count = replace(wanted.request, cache_dir=cache), wanted.request.num_samples
    sizes = [part.size for part in sources]
    per_epoch = [part.source.samples_per_epoch(part.units, request) for part in sources]
    weights = [part.weight for part in sources if part.weight is not None]
    # Without weights: one epoch of every source if that is enough, else more epochs in proportion to size. One evaluation is enough for
    # validation: Megatron starts over here instead of a second epoch.
    fewest = config.train.eval_iters * config.train.global_batch_size if request.split == "valid" else count
    if request.split == "valid" and config.train.full_validation:  # one epoch of each source; weights have no effect
        weights, fewest, count = [], 0, sum(per_epoch)
    once = not weights and min(fewest, count) <= sum(per_epoch)
    shares = normalize_once(weights) if weights else [float(size) for size in sizes]
    if len(sources) == 1:
        taken: list[int] = [count]
    elif once:
        taken = per_epoch
    else:
        taken = np.bincount(
            load_blend(shares, count, cache_dir=cache, index_log=request.index_log)[0], minlength=len(sources)
        ).tolist()
    # Megatron adds nothing for the only dataset of a split, unless it has a weight in a blend for all splits.
    builds_more = weights and not (len(sources) == 1 and _has_blend_per_split(config.data))
    surplus = config.data.mid_level_dataset_surplus
    needed = samples_to_build(weights, count, taken, surplus=surplus) if builds_more else taken
    distinct: dict[tuple[str, range, int], SampleDataset] = {}  # a list may name one dataset a thousand times
    for part, num_samples in zip(sources, needed):
        key = (part.source.name, part.units, num_samples)
        if key not in distinct:
            distinct[key] = part.source.dataset(part.units, replace(request, num_samples=num_samples))
    built = [distinct[part.source.name, part.units, num_samples] for part, num_samples in zip(sources, needed)]
    _log_summary(wanted, request, sources, taken)
    warnings += _size_warnings(config, kind, request, sources, taken)
    if len(built) == 1:
        return built[0]
    return BlendedDataset(
        built, None if once else shares, None if once else count, cache_dir=cache, index_log=request.index_log
    )


def _size_warnings(
    config: RunConfig, kind: DatasetKind, request: DatasetRequest, sources: list[SplitUnits], taken: list[int]
) -> list[str]:
    train = config.train
    # Every evaluation reads the first samples of its split, however many are built.
    used = sum(taken) if request.split == "train" else min(sum(taken), train.eval_iters * train.global_batch_size)
    samples: dict[str, float] = {}
    for part, count in zip(sources, taken):  # a list may name one dataset a thousand times
        samples[part.source.name] = samples.get(part.source.name, 0.0) + count * used / sum(taken)
    by_name = {part.source.name: part for part in sources}
    shares = [
        SourceShare(part.source, part.units, part.size, samples[name])
        for name, part in by_name.items()
        if samples[name]
    ]
    return kind.size_warnings(shares, request, eval_iters=train.eval_iters)


def _object_storage(data: DataConfig) -> ObjectStorageCache | None:
    if data.object_storage_cache_path is None:
        return None
    return ObjectStorageCache(
        data.object_storage_cache_path, data.object_storage_chunk_bytes, data.object_storage_cache_bytes
    )


def _log_summary(wanted: _WantedSet, request: DatasetRequest, sources: list[SplitUnits], taken: list[int]) -> None:
    log, units = get_logger(__name__), {part.source.unit for part in sources}
    unit = units.pop() if len(units) == 1 else "sequences"
    size_unit = sources[0].source.size_unit
    log.info("%-6s %12s %16s %12s %8s  %s", wanted.title, unit, size_unit, "samples", "epochs", "dataset")
    for part, count in zip(sources, taken):
        epochs = part.source.epochs(part.units, replace(request, num_samples=count))
        log.info("%-6s %12d %16d %12d %8.2f  %s", "", len(part.units), part.size, count, epochs, part.source.name)


def _raise_all(problems: list[str]) -> None:
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        raise DataError(f"{len(problems)} problems in the data:\n" + "\n".join(f"  {problem}" for problem in problems))
