"""One opened source of images and texts, and its samples.

Failures come at two times. When a source is opened, every record is parsed and the header of each image is read, by several threads, once:
the result is cached under the fingerprint of the files, and records that cannot be used are no units of the source. With `on_error=fail`
they are an error before training starts. What only shows when a sample is made (an image whose header is right and whose pixels are not,
a file that has gone, a text that is too long for its images) is an error then, or, with `on_error=skip`, the next usable record of the
same split takes its place in the epoch: sample i stays a function of the files, the seed and i, and every rank finds the same. Both are
counted by kind and named in the log; those of the first kind are listed in a file beside the cached indices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.base.safe_files import write_atomic
from petatron.data.batch_loader import SampleDataset, epoch_permutation
from petatron.data.check_token_ids import TokenPlace
from petatron.data.dataset_kinds import DatasetRequest, DataSource
from petatron.data.documents_of_sample import SampleTrace, TracedDocument
from petatron.data.image_text.image_text_record import ImageTextRecord
from petatron.data.image_text.image_text_settings import NO_CHAT, SETTINGS_FLAG, ImageTextSettings
from petatron.data.image_text.jsonl_records import JsonlRecords
from petatron.data.image_text.record_encoder import EncodedRecord, RecordEncoder
from petatron.data.image_text.record_error import RecordError
from petatron.data.image_text.record_report import LeftOutRecord, RecordReport, reason_of, summary
from petatron.data.image_text.record_store import RecordStore
from petatron.data.image_text.tar_records import TarRecords, tar_paths
from petatron.data.image_text.visual_reader import ReadVisual, VisualReader
from petatron.data.images.image_error import ImageError
from petatron.data.images.image_policies import ImagePolicy, image_policy
from petatron.data.images.patch_grid import PatchGrid
from petatron.data.index_cache import Arrays, IndexLog, fingerprint, load_or_build

_CHECKING_THREADS = 16
_CHECKED_AT_ONCE = 4096
_MAX_TRIES = 1000
_TAR = ".tar"
_USABLE, _USABLE_WITH_ADDED_TAGS, _LEFT_OUT = range(3)
_NOT_OF_SAMPLES = ("image_folder", "on_error", "check_images")
_OF_LENGTH = ("too long", "too many patches")
_TO_SKIP = f"Repair or remove such records, or count and leave them out with {SETTINGS_FLAG} on_error=skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """What samples are made with, beside the records: the user's settings, the model's patches, and the mean of its pixels."""

    settings: ImageTextSettings
    grid: PatchGrid
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def policy(self) -> ImagePolicy:
        return image_policy(self.settings.policy, self.grid, self.mean)

    @property
    def reader(self) -> VisualReader:
        settings = self.settings
        return VisualReader(
            policy=self.policy,
            limits=settings.limits,
            max_frames=settings.max_frames,
            animations_are_videos=settings.animations_are_videos,
        )


class SampleBuilder:
    """Makes the sample of a record."""

    def __init__(self, store: RecordStore, options: SampleSettings, request: DatasetRequest) -> None:
        if request.tokenizer is None:
            raise DataError("Images and texts need a tokenizer. Give --tokenizer-model.")
        settings, grid = options.settings, options.grid
        if request.vocab_size is not None and not 0 <= grid.image_token_id < request.vocab_size:
            raise DataError(
                f"--image-token-id {grid.image_token_id} is no id of the vocabulary, which has {request.vocab_size}. Use one of them, or "
                "a larger --vocab-size."
            )
        tokenizer = request.tokenizer
        self._store, self._reader, self._settings, self._grid = store, options.reader, settings, grid
        chat_format = None if settings.chat_format == NO_CHAT else settings.chat_format
        self._encoder = RecordEncoder(tokenizer, grid, markup=settings.image_markup, chat_format=chat_format)
        self._length = request.seq_length
        pad = tokenizer.special_ids.get("pad", tokenizer.eod)
        self._pad = 0 if pad is None or pad == grid.image_token_id else pad
        shown = {name: value for name, value in asdict(settings).items() if name not in _NOT_OF_SAMPLES}
        key: dict[str, Any] = {"settings": shown, "grid": asdict(grid), "mean": list(options.mean)}
        self.fingerprint = fingerprint(
            {**key, "tokenizer": asdict(tokenizer.fingerprint), "seq_length": request.seq_length}
        )

    def build(self, number: int, report: RecordReport) -> dict[str, NDArray[Any]]:
        """Returns tokens and loss_mask [S + 1], patches and grids; raises `ImageError` or `RecordError`."""
        record = self._store.read(number)
        visuals = [self._reader.read(self._store, number, visual) for visual in record.visuals]
        encoded = self._fitting(record, visuals, report)
        grid, length = self._grid, self._length + 1
        tokens, mask = np.full(length, self._pad, np.int64), np.zeros(length, np.float32)
        tokens[: len(encoded.ids)] = encoded.ids
        mask[: len(encoded.ids)] = encoded.is_target
        parts = [part for visual in visuals[: len(encoded.visuals)] for part in visual.parts]
        patches = [grid.patches_of(part) for part in parts]
        grids = [grid.of_size((part[0].shape[0], part[0].shape[1]), len(part)) for part in parts]
        return {
            "tokens": tokens,
            "loss_mask": mask,
            "patches": np.concatenate([np.empty((0, grid.pixels_per_patch), np.uint8), *patches]),
            "grids": np.array(grids, np.int64).reshape(-1, 3),
        }

    def _fitting(self, record: ImageTextRecord, visuals: Sequence[ReadVisual], report: RecordReport) -> EncodedRecord:
        """Returns the ids of a record as far as they, and its patches, fit a sample."""
        grid = self._grid
        encoded = self._encoder.encode(
            record, [visual.features(grid) for visual in visuals], [visual.layout for visual in visuals]
        )
        if not encoded.is_target[1:].any():
            raise RecordError("no text", "has no text to learn")
        total = np.cumsum([visual.num_patches(grid) for visual in visuals])
        kept = len(visuals) if grid.max_patches is None else int((total <= grid.max_patches).sum())
        cut = (encoded if kept == len(visuals) else encoded.without_visuals_from(kept)).cut(self._length)
        if cut is encoded:
            return encoded
        if kept < len(visuals):
            problem = RecordError(
                "too many patches", f"has images of {total[-1]:,} patches, and a sample at most {grid.max_patches:,}"
            )
        else:
            problem = RecordError("too long", f"has {len(encoded.ids):,} tokens, and a sample {self._length:,}")
        if self._settings.long_samples != "truncate" or not cut.is_target[1:].any():
            raise problem
        report.count_truncated()
        return cut


class ImageTextDataset:
    """The samples of some usable records, in another order in every epoch."""

    def __init__(
        self, source: ImageTextSource, builder: SampleBuilder, numbers: NDArray[np.int64], request: DatasetRequest
    ) -> None:
        self._source, self._builder, self._numbers, self._request = source, builder, numbers, request
        key = {"kind": "image-text", "source": source.fingerprint, "samples": builder.fingerprint, "seed": request.seed}
        self.fingerprint = fingerprint({**key, "records": [int(numbers[0]), int(numbers[-1]), len(numbers)]})
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, len(numbers)))

    @property
    def report(self) -> RecordReport:
        """What was left out while samples were made."""
        return self._source.report

    def __len__(self) -> int:
        return self._request.num_samples

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        return self._sample(index)[1]

    def trace(self, index: int) -> SampleTrace:
        """Returns the record of a sample: that which took its place, where it had failed."""
        number, sample = self._sample(index)
        length = int(np.flatnonzero(sample["loss_mask"])[-1]) + 1
        document = TracedDocument(TokenPlace(number, None, 0), length, None)
        return SampleTrace(self._source.name, index, (document,), "the tokens of images stand for their patches")

    def _sample(self, index: int) -> tuple[int, dict[str, NDArray[Any]]]:
        """Returns the record of a sample, and the sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, place = divmod(index, len(self._numbers))
        tries = min(len(self._numbers), _MAX_TRIES)
        for step in range(tries):
            number = int(self._numbers[self._order(epoch)[(place + step) % len(self._numbers)]])
            try:
                return number, self._builder.build(number, self.report)
            except (ImageError, RecordError) as error:
                self._source.leave_out(number, error)
        raise DataError(
            f"{self._source.name}: {tries:,} records one after the other make no samples ({summary(self.report.left_out, named=1)}). "
            "Check the files and the settings."
        )


class ImageTextSource(DataSource):
    """Records that can be used, as far as that is known before their images are decoded."""

    def __init__(
        self, name: str, store: RecordStore, options: SampleSettings, *, cache_folder: Path | None, log: IndexLog | None
    ) -> None:
        self._store, self._options, self.report = store, options, RecordReport(name)
        settings = options.settings
        checked = {"limits": asdict(settings.limits), "policy": asdict(settings.policy), "grid": asdict(options.grid)}
        checked |= {"frames": settings.max_frames, "check": settings.check_images}
        key = {"kind": "image-text records", "records": store.fingerprint, **checked}
        if not store.num_records:
            raise DataError(f"{name} has no records. Give files of images and texts.")
        arrays = load_or_build(cache_folder, key, ("states",), build=self._check_all, log=log, is_slow=True)
        states = np.array(arrays["states"])
        self.left_out = list[LeftOutRecord]()
        """Records that were known to be of no use when the source was opened."""
        unusable = np.flatnonzero(states == _LEFT_OUT)
        # Read again, for the reasons, and since images may have been repaired.
        for number, (state, left_out) in zip(unusable, self._check(unusable.tolist()), strict=True):
            states[number] = state
            self.left_out += [] if left_out is None else [left_out]
        self._usable = np.flatnonzero(states != _LEFT_OUT)
        self.fingerprint = fingerprint({**key, "left out": [record.number for record in self.left_out]})
        super().__init__(name, num_units=len(self._usable))
        added = int((states == _USABLE_WITH_ADDED_TAGS).sum())
        if added:
            get_logger(__name__).info(
                "%s: %s records have images and no tag for them: the images are shown first", name, f"{added:,}"
            )
        if self.left_out:
            self._report_left_out(cache_folder)

    def dataset(self, units: range, request: DatasetRequest) -> SampleDataset:
        numbers = self._usable[units.start : units.stop]
        return ImageTextDataset(self, SampleBuilder(self._store, self._options, request), numbers, request)

    def leave_out(self, number: int, error: ImageError | RecordError) -> None:
        """Counts a record that has made no sample; raises `DataError` where such a record ends the run."""
        record = LeftOutRecord(number, self._store.title(number), error.kind, reason_of(error))
        settings = self._options.settings
        if error.kind in _OF_LENGTH:
            fails = settings.long_samples == "fail"
            fix = f"Use a larger --seq-length or --max-patches, or leave such records out with {SETTINGS_FLAG} long_samples=skip"
        else:
            fails, fix = settings.on_error == "fail", _TO_SKIP
        if fails:
            raise DataError(f"{self.name}: {record}. {fix}.") from error
        self.report.add(record)

    def _check_all(self) -> Arrays:
        return {"states": np.array([state for state, _ in self._check(range(self._store.num_records))], np.uint8)}

    def _check(self, numbers: Sequence[int]) -> Iterator[tuple[int, LeftOutRecord | None]]:
        """Yields the state of each record, and why where it cannot be used; a bounded number waits at a time."""
        with ThreadPoolExecutor(_CHECKING_THREADS, "petatron-images") as pool:
            for begin in range(0, len(numbers), _CHECKED_AT_ONCE):
                yield from pool.map(self._checked, numbers[begin : begin + _CHECKED_AT_ONCE])

    def _checked(self, number: int) -> tuple[int, LeftOutRecord | None]:
        check = self._options.settings.check_images
        try:
            record = self._store.read(number)
            for visual in record.visuals if check != "none" else ():
                if check == "decode":
                    self._options.reader.read(self._store, number, visual)
                else:
                    self._options.reader.check(self._store, number, visual)
        except (ImageError, RecordError) as error:
            return _LEFT_OUT, LeftOutRecord(number, self._store.title(number), error.kind, reason_of(error))
        return (_USABLE_WITH_ADDED_TAGS if record.tags_added else _USABLE), None

    def _report_left_out(self, cache_folder: Path | None) -> None:
        total = self._store.num_records
        text = f"{self.name}: {len(self.left_out):,} of {total:,} records cannot be used: {summary(self.left_out)}"
        if self._options.settings.on_error == "fail":
            raise DataError(f"{text}. {_TO_SKIP}.")
        if cache_folder is not None:
            path = cache_folder / f"{self.fingerprint}-left-out.jsonl"
            lines = [json.dumps({"record": record.number + 1, **asdict(record)}) for record in self.left_out]
            try:
                cache_folder.mkdir(parents=True, exist_ok=True)
                write_atomic(path, "".join(f"{line}\n" for line in lines))
                text += f"; all are listed in {path}"
            except OSError as error:
                text += f"; the list cannot be written to {path} ({error})"
        get_logger(__name__).warning("%s", text)


def open_image_text(
    source: str, options: SampleSettings, *, cache_folder: Path | None, log: IndexLog | None = None
) -> ImageTextSource:
    """Opens a JSON Lines file or tars (a path, a glob, or braces)."""
    if source.endswith(_TAR):
        store: RecordStore = TarRecords(source, tar_paths(source), cache_folder=cache_folder, log=log)
    else:
        path = Path(source)
        folder = Path(options.settings.image_folder or path.parent)
        store = JsonlRecords(path, folder, cache_folder=cache_folder)
    return ImageTextSource(source, store, options, cache_folder=cache_folder, log=log)
