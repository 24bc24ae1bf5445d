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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import numpy as np

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.base.safe_files import write_atomic
from petatron.data.batch_loader import SampleDataset
from petatron.data.dataset_kinds import DatasetRequest, DataSource
from petatron.data.document_provenance import DocumentProvenance
from petatron.data.image_text.image_text_dataset import ImageTextDataset, RecordRows
from petatron.data.image_text.image_text_settings import SETTINGS_FLAG
from petatron.data.image_text.jsonl_records import JsonlRecords
from petatron.data.image_text.record_error import RecordError
from petatron.data.image_text.record_report import LeftOutRecord, RecordReport, reason_of, summary
from petatron.data.image_text.record_store import RecordStore
from petatron.data.image_text.sample_builder import SampleBuilder, SampleSettings
from petatron.data.image_text.tar_records import TarRecords, tar_paths
from petatron.data.images.image_error import ImageError
from petatron.data.index_cache import Arrays, IndexLog, fingerprint, load_or_build

_CHECKING_THREADS = 16
_CHECKED_AT_ONCE = 4096
_TAR = ".tar"
Result = TypeVar("Result")
_USABLE, _USABLE_WITH_ADDED_TAGS, _LEFT_OUT = range(3)
_OF_LENGTH = ("too long", "too many patches")
_TO_SKIP = f"Repair or remove such records, or count and leave them out with {SETTINGS_FLAG} on_error=skip"


class ImageTextSource(DataSource):
    """Records that can be used, as far as that is known before their images are decoded."""

    def __init__(
        self, name: str, store: RecordStore, options: SampleSettings, *, cache_folder: Path | None, log: IndexLog | None
    ) -> None:
        self._store, self._options, self._cache_folder = store, options, cache_folder
        self.report = RecordReport(name)
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
        builder = self._builder(request)
        rows = self._rows(builder, units, request)
        return ImageTextDataset(self, builder, rows, request)

    def samples_per_epoch(self, units: range, request: DatasetRequest) -> int:
        return len(self._rows(self._builder(request), units, request)) if self._options.settings.packed else len(units)

    def _builder(self, request: DatasetRequest) -> SampleBuilder:
        return SampleBuilder(self._store, self._options, request)

    def _rows(self, builder: SampleBuilder, units: range, request: DatasetRequest) -> RecordRows:
        numbers = self._usable[units.start : units.stop]
        if not self._options.settings.packed:
            return RecordRows.single(numbers)
        key = {"kind": "image-text sizes", "source": self.fingerprint, "samples": builder.fingerprint}
        key |= {"units": [units.start, units.stop]}

        def build() -> Arrays:
            costs = self._in_threads(lambda number: self._cost(builder, number), numbers.tolist())
            return {"costs": np.array(list(costs), np.int32)}

        log = request.index_log
        arrays = load_or_build(self._cache_folder, key, ("costs",), build=build, log=log, is_slow=True)
        rows = RecordRows.packed(numbers, arrays["costs"], request.seq_length)
        if not len(rows):
            raise DataError(
                f"{self.name}: no record of these makes a sample ({summary(self.report.left_out, named=1)})."
            )
        return rows

    def _cost(self, builder: SampleBuilder, number: int) -> int:
        """Returns the tokens of a record, or what its patches take of a sample if that is more; 0 for one that makes no sample."""
        try:
            return builder.measure(number, self.report)
        except (ImageError, RecordError) as error:
            self.leave_out(number, error)
            return 0

    def provenance(self, number: int) -> DocumentProvenance:
        """Returns where a record is from."""
        return self._store.provenance(number)

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
        """Yields the state of each record, and why where it cannot be used."""
        return self._in_threads(self._checked, numbers)

    def _in_threads(self, function: Callable[[int], Result], numbers: Sequence[int]) -> Iterator[Result]:
        """Yields the results for records in their order; a bounded number waits at a time."""
        with ThreadPoolExecutor(_CHECKING_THREADS, "petatron-images") as pool:
            for begin in range(0, len(numbers), _CHECKED_AT_ONCE):
                yield from pool.map(function, numbers[begin : begin + _CHECKED_AT_ONCE])

    def _checked(self, number: int) -> tuple[int, LeftOutRecord | None]:
        check = self._options.settings.check_images
        try:
            record = self._store.read(number)
            for visual in record.visuals if check != "none" else ():
                if check == "decode":
                    self._options.reader.read(self._store, number, visual)
                else:
                    self._options.reader.measure(self._store, number, visual)
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
