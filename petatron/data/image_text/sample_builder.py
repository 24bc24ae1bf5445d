"""Makes samples of records: their tokens, which of them are learned, and the patches of their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.image_text.image_text_record import ImageTextRecord
from petatron.data.image_text.image_text_settings import NO_CHAT, ImageTextSettings
from petatron.data.image_text.record_encoder import EncodedRecord, RecordEncoder
from petatron.data.image_text.record_error import RecordError
from petatron.data.image_text.record_report import RecordReport
from petatron.data.image_text.record_store import RecordStore
from petatron.data.image_text.visual_reader import VisualReader, VisualSize
from petatron.data.images.decode_image import Rgb
from petatron.data.images.image_policies import ImagePolicy, image_policy
from petatron.data.images.patch_grid import PatchGrid
from petatron.data.index_cache import fingerprint

BEGINS = "begins"
"""The array of a packed sample with the place where the record of each input token begins, -1 for padding."""
_NOT_OF_SAMPLES = ("image_folder", "on_error", "check_images")


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


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """A record that fits a sample: its number, its ids, and the frames of each part of its images."""

    number: int
    encoded: EncodedRecord
    parts: list[list[Rgb]]


class SampleBuilder:
    """Reads records, and makes samples of one or several."""

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

    def read(self, number: int, report: RecordReport) -> ReadRecord:
        """Reads a record and decodes its images; raises `ImageError` or `RecordError`."""
        record = self._store.read(number)
        visuals = [self._reader.read(self._store, number, visual) for visual in record.visuals]
        encoded = self._fitting(record, [visual.size for visual in visuals], report)
        parts = [part for visual in visuals[: len(encoded.visuals)] for part in visual.parts]
        return ReadRecord(number, encoded, parts)

    def measure(self, number: int, report: RecordReport) -> int:
        """Returns the tokens of a record, or the share of a sample's tokens that its patches are of a sample's patches, if that is more.

        Then records whose measures add up to the tokens of a sample fit it in both.
        """
        record, grid = self._store.read(number), self._grid
        sizes = [self._reader.measure(self._store, number, visual) for visual in record.visuals]
        encoded = self._fitting(record, sizes, report)
        patches = sum(size.num_patches(grid) for size in sizes[: len(encoded.visuals)])
        share = 0 if grid.max_patches is None else -(-patches * self._length // grid.max_patches)
        return min(self._length, max(len(encoded.ids), share))

    def sample(self, records: Sequence[ReadRecord]) -> dict[str, NDArray[Any]]:
        """Returns tokens and loss_mask [S + 1], patches, grids, and with `packed` begins [S]."""
        grid, length = self._grid, self._length + 1
        tokens, mask = np.full(length, self._pad, np.int64), np.zeros(length, np.float32)
        begins, filled = np.full(length, -1, np.int64), 0
        for record in records:
            end = filled + len(record.encoded.ids)
            tokens[filled:end] = record.encoded.ids
            mask[filled + 1 : end] = record.encoded.is_target[1:]  # the first token follows from nothing
            begins[filled:end] = filled
            filled = end
        parts = [part for record in records for part in record.parts]
        patches = [grid.patches_of(part) for part in parts]
        grids = [grid.of_size((part[0].shape[0], part[0].shape[1]), len(part)) for part in parts]
        sample = {
            "tokens": tokens,
            "loss_mask": mask,
            "patches": np.concatenate([np.empty((0, grid.pixels_per_patch), np.uint8), *patches]),
            "grids": np.array(grids, np.int64).reshape(-1, 3),
        }
        return sample | ({BEGINS: begins[:-1]} if self._settings.packed else {})

    def _fitting(self, record: ImageTextRecord, sizes: Sequence[VisualSize], report: RecordReport) -> EncodedRecord:
        """Returns the ids of a record as far as they, and its patches, fit a sample."""
        grid = self._grid
        encoded = self._encoder.encode(record, [size.features(grid) for size in sizes], [size.layout for size in sizes])
        if not encoded.is_target[1:].any():
            raise RecordError("no text", "has no text to learn")
        total = np.cumsum([size.num_patches(grid) for size in sizes])
        kept = len(sizes) if grid.max_patches is None else int((total <= grid.max_patches).sum())
        cut = (encoded if kept == len(sizes) else encoded.without_visuals_from(kept)).cut(self._length)
        if self._settings.packed:  # the last token of a row is predicted only, and a packed record has all of its own
            cut = cut.first(self._length)
        if cut is encoded:
            return encoded
        if kept < len(sizes):
            problem = RecordError(
                "too many patches", f"has images of {total[-1]:,} patches, and a sample at most {grid.max_patches:,}"
            )
        else:
            problem = RecordError("too long", f"has {len(encoded.ids):,} tokens, and a sample {self._length:,}")
        if self._settings.long_samples != "truncate" or not cut.is_target[1:].any():
            raise problem
        report.count_truncated()
        return cut
