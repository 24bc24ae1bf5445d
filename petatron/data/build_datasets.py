"""Builds the three datasets of a run from its configuration, and reports every problem of the data before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.base.untrusted_files import reading_untrusted
from petatron.config.schema.data_blend import read_blend_file
from petatron.config.schema.run import RunConfig
from petatron.config.schema.training import DataConfig
from petatron.data.blended_dataset import (
    BlendedDataset,
    WeightedPrefixes,
    load_blend,
    normalize_once,
    parse_weighted_prefixes,
    samples_to_build,
)
from petatron.data.data_file_error import data_file_error
from petatron.data.dataset_kinds import DatasetRequest, dataset_kind
from petatron.data.document_sample_shuffle_index import plan_epochs
from petatron.data.gpt_dataset import GPTDataset, split_sequences
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.mock_dataset import MockDataset
from petatron.data.sample_dataset import SampleDataset
from petatron.data.size_warnings import SourceUse, size_warnings
from petatron.data.tokenizer import Tokenizer

SPLITS: tuple[Literal["train", "valid", "test"], ...] = ("train", "valid", "test")
# Token ids are checked on this many ranges of this many tokens, spread over each file.
CHECKED_SEQUENCES = 64
CHECKED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class SplitDatasets:
    """One dataset per split; None where no samples are required."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None
    warnings: tuple[str, ...] = ()
    """What makes the data too small for the run, a line each; they have been logged."""


@dataclass(frozen=True, slots=True)
class _SplitSource:
    """Sequences of one file that belong to one split, and their share of the blend."""

    indexed: IndexedDataset
    sequences: range
    weight: float | None

    @property
    def num_tokens(self) -> int:
        return int(self.indexed.lengths[self.sequences.start : self.sequences.stop].sum(dtype=np.int64))


def build_datasets(config: RunConfig, tokenizer: Tokenizer | None, num_samples: tuple[int, int, int]) -> SplitDatasets:
    """Builds datasets with the given numbers of training, validation and test samples.

    Every rank may call this; on a shared file system let one rank call it first, so that the others find its cache.
    """
    vocab_size = (
        tokenizer.vocab_size if config.model.vocab_size is None and tokenizer is not None else config.model.vocab_size
    )
    if config.data.mock_data:
        eod = tokenizer.eod if tokenizer is not None else None
        mock = [_mock_dataset(config, split, count, vocab_size, eod) for split, count in enumerate(num_samples)]
        return SplitDatasets(train=mock[0], valid=mock[1], test=mock[2])
    if config.data.dataset_kind is not None:
        train, valid, test = _own_datasets(config, config.data.dataset_kind, tokenizer, num_samples)
        return SplitDatasets(train=train, valid=valid, test=test)
    blends = _blends(config.data, num_samples)
    files = _open_all(blends, vocab_size)
    sources = _split_sources(config, blends, files, num_samples)
    warnings: list[str] = []
    built = [
        _build_split(config, split, found, count, warnings) for split, found, count in zip(SPLITS, sources, num_samples)
    ]
    return SplitDatasets(train=built[0], valid=built[1], test=built[2], warnings=tuple(warnings))


def _own_datasets(
    config: RunConfig, kind: str, tokenizer: Tokenizer | None, num_samples: tuple[int, int, int]
) -> Iterator[SampleDataset | None]:
    """Yields the datasets of a registered kind."""
    data = config.data
    sources = (data.train_data_path, data.valid_data_path, data.test_data_path)
    for split, paths, count in zip(SPLITS, sources, num_samples, strict=True):
        request = DatasetRequest(
            sources=paths or data.data_path,
            split=split,
            num_samples=count,
            seq_length=config.model.seq_length,
            seed=config.train.seed,
            tokenizer=tokenizer,
        )
        yield dataset_kind(kind)(request) if count else None


def _mock_dataset(
    config: RunConfig, split: int, count: int, vocab_size: int | None, eod: int | None
) -> MockDataset | None:
    if count == 0:
        return None
    if vocab_size is None:
        raise DataError("--mock-data needs --vocab-size or a tokenizer, to know which token ids to make up.")
    # Splits of mock data differ by their seed.
    return MockDataset(config.model.seq_length, vocab_size, count, seed=config.train.seed + split, eod=eod)


def _blends(data: DataConfig, num_samples: tuple[int, int, int]) -> list[WeightedPrefixes | None]:
    """Returns the blend of each split; None for a split that is not needed."""
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
    missing = [split for split, paths, count in zip(SPLITS, chosen, num_samples) if count and not paths]
    if missing:
        raise DataError(
            f"No data is given for {', '.join(missing)}. Use --data-path (cut by --split), "
            f"{', '.join(f'--{split}-data-path' for split in missing)}, or --mock-data."
        )
    flags = [f"--{split}-data-path" for split in SPLITS] if any(per_split) else ["--data-path"] * 3
    if data.data_args_path is not None:
        flags = [f"--data-args-path {data.data_args_path}"] * 3
    wanted = zip(flags, chosen, num_samples)
    return [parse_weighted_prefixes(paths, flag=flag) if count else None for flag, paths, count in wanted]


def _open_all(blends: Sequence[WeightedPrefixes | None], vocab_size: int | None) -> dict[str, IndexedDataset]:
    """Opens each file once, and reports all that are missing, damaged or made for another vocabulary together."""
    files: dict[str, IndexedDataset] = {}
    problems: dict[str, str] = {}
    for blend in blends:
        for prefix in blend[1] if blend else ():
            if prefix in files or prefix in problems:
                continue
            try:
                files[prefix] = IndexedDataset(prefix)
                files[prefix].check_token_ids()
                if vocab_size is not None:
                    _check_token_ids(files[prefix], vocab_size)
            except DataError as error:
                problems[prefix] = str(error)
    _raise_all(list(problems.values()))
    return files


def _check_token_ids(indexed: IndexedDataset, vocab_size: int) -> None:
    """Checks a sample of ids: a model fails far from the cause, or not at all, on an id it has no embedding for."""
    chosen = np.unique(np.linspace(0, indexed.num_sequences - 1, CHECKED_SEQUENCES).astype(np.int64))
    for sequence in chosen:
        tokens = indexed.get(int(sequence), 0, min(CHECKED_TOKENS, int(indexed.lengths[sequence])))
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise DataError(
                f"{indexed.prefix}: sequence {sequence} has token ids {tokens.min()}..{tokens.max()}, but the vocabulary has "
                f"{vocab_size} ids. Use the tokenizer the data was preprocessed with, or set --vocab-size."
            )


def _split_sources(
    config: RunConfig,
    blends: Sequence[WeightedPrefixes | None],
    files: dict[str, IndexedDataset],
    num_samples: tuple[int, int, int],
) -> list[list[_SplitSource]]:
    """Returns the sequences of each file for each split; a split with its own blend uses all of them.

    Training needs every source it names, and so does validation when --eval-interval requests it. The default split of a small
    dataset may leave nothing for the others; then there is a warning and no such evaluation.
    """
    data = config.data
    whole = _has_blend_per_split(data)
    needed = {"train", "valid"} if config.train.eval_interval else {"train"}
    problems: list[str] = []
    result: list[list[_SplitSource]] = []
    for number, (split, blend) in enumerate(zip(SPLITS, blends)):
        weights, prefixes = blend or (None, ())
        sources: list[_SplitSource] = []
        for place, prefix in enumerate(prefixes):
            indexed = files[prefix]
            every = range(indexed.num_sequences)
            sequences = every if whole else split_sequences(data.split, indexed.num_sequences)[number]
            source = _SplitSource(indexed, sequences, weights[place] if weights else None)
            if source.num_tokens:
                sources.append(source)
                continue
            text = (
                f"{prefix}: the {split} split is empty: --split {data.split} gives it {len(sequences)} of "
                f"{indexed.num_sequences:,} {indexed.unit}"
            )
            if split in needed:
                problems.append(
                    f"{text}, but {num_samples[number]:,} samples are needed. Give it a larger share, or turn its "
                    "evaluation off (--eval-iters 0)."
                )
            else:
                get_logger(__name__).warning("%s; it will not be evaluated", text)
        result.append(sources)
    _raise_all(problems)
    return result


def _has_blend_per_split(data: DataConfig) -> bool:
    return bool(data.train_data_path or data.valid_data_path or data.test_data_path)


def _build_split(
    config: RunConfig, split: str, sources: list[_SplitSource], count: int, warnings: list[str]
) -> SampleDataset | None:
    """Builds one split from its sources, and appends what makes them too small for the run."""
    if not sources:
        return None
    seq_length = config.model.seq_length
    tokens = [source.num_tokens for source in sources]
    per_epoch = [plan_epochs(total, seq_length, None).num_samples for total in tokens]
    weights = [source.weight for source in sources if source.weight is not None]
    # Without weights, one epoch of everything if that is enough; if not, further epochs in proportion to size. Enough for validation is one
    # evaluation: Megatron has no second epoch here, and starts over.
    fewest = config.train.eval_iters * config.train.global_batch_size if split == "valid" else count
    once = not weights and min(fewest, count) <= sum(per_epoch)
    shares = normalize_once(weights) if weights else [float(total) for total in tokens]
    cache = _cache_folder(config.data, sources[0].indexed.prefix)
    if len(sources) == 1:
        taken: list[int] = [count]
    elif once:
        taken = per_epoch
    else:
        taken = np.bincount(load_blend(shares, count, cache_dir=cache)[0], minlength=len(sources)).tolist()
    # Megatron adds nothing for the only dataset of a split, unless it has a weight in a blend for all splits.
    surplus = weights and not (len(sources) == 1 and _has_blend_per_split(config.data))
    needed = samples_to_build(weights, count, taken) if surplus else taken
    distinct: dict[tuple[str, range, int], GPTDataset] = {}  # a list may name one dataset a thousand times
    for source, num_samples in zip(sources, needed):
        key = (source.indexed.prefix, source.sequences, num_samples)
        if key not in distinct:
            distinct[key] = GPTDataset(
                source.indexed,
                source.sequences,
                num_samples=max(1, num_samples),
                seq_length=seq_length,
                seed=config.train.seed,
                cache_dir=cache,
            )
    built = [distinct[s.indexed.prefix, s.sequences, num_samples] for s, num_samples in zip(sources, needed)]
    _log_summary(split, sources, built, taken)
    warnings += _size_warnings(config, split, sources, taken)
    if len(built) == 1:
        return built[0]
    return BlendedDataset(built, None if once else shares, None if once else count, cache_dir=cache)


def _size_warnings(config: RunConfig, split: str, sources: list[_SplitSource], taken: list[int]) -> list[str]:
    train = config.train
    # Every evaluation reads the first samples of its split, however many are built.
    used = sum(taken) if split == "train" else min(sum(taken), train.eval_iters * train.global_batch_size)
    samples: dict[str, float] = {}
    for source, count in zip(sources, taken):  # a list may name one dataset a thousand times
        samples[source.indexed.prefix] = samples.get(source.indexed.prefix, 0.0) + count * used / sum(taken)
    by_prefix = {source.indexed.prefix: source for source in sources}
    uses = [
        SourceUse(prefix, source.indexed.unit, len(source.sequences), source.num_tokens, samples[prefix])
        for prefix, source in by_prefix.items()
        if samples[prefix]
    ]
    return size_warnings(split, uses, seq_length=config.model.seq_length, eval_iters=train.eval_iters)


def _cache_folder(data: DataConfig, prefix: str) -> Path | None:
    """Returns the cache folder of sample indices: the user's, else (also when the config derives it) one next to the data.

    The data may have come from others, and a link in place of the latter would make files appear where they choose.
    """
    default_folder = Path(prefix).parent / "cache"
    folder = Path(data.data_cache_path) if data.data_cache_path else default_folder
    if folder != default_folder or not default_folder.is_symlink():
        return folder
    get_logger(__name__).warning(
        "%s is a symbolic link, and may have come with the data: sample indices stay in memory and are built again on the next start. "
        "Give --data-cache-path the folder itself if you want them there.",
        default_folder,
    )
    return None


def _log_summary(split: str, sources: list[_SplitSource], built: list[GPTDataset], taken: list[int]) -> None:
    log = get_logger(__name__)
    unit = "documents" if all(source.indexed.unit == "documents" for source in sources) else "sequences"
    log.info("%-6s %12s %16s %12s %8s  %s", split, unit, "tokens", "samples", "epochs", "dataset")
    for source, dataset, take in zip(sources, built, taken):
        epochs = take * dataset.seq_length / dataset.num_tokens
        row = (len(source.sequences), dataset.num_tokens, take, epochs, source.indexed.prefix)
        log.info("%-6s %12d %16d %12d %8.2f  %s", "", *row)


def _raise_all(problems: list[str]) -> None:
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        raise DataError(f"{len(problems)} problems in the data:\n" + "\n".join(f"  {problem}" for problem in problems))
