"""The kind `image-text`: images and text, for models that read both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.objective_and_dataset_names import IMAGE_TEXT_DATASET
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import LoaderOptions, SampleDataset
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, register_dataset
from petatron.data.image_text.mock_images import MockImages
from petatron.models.batch import Batch
from petatron.models.image_text_batch import make_image_text_batch


@dataclass(frozen=True)
class ImageTextKind(DatasetKind):
    reads: ClassVar[str] = "files of images and texts"
    model: ModelConfig | None = field(default=None, metadata=NOT_A_SETTING)
    """The model that reads the images."""

    def of_run(self, run: RunConfig) -> ImageTextKind:
        return replace(self, model=run.model)

    def open(self, source: str, request: DatasetRequest) -> DataSource:
        raise DataError(f"{source}: no reader of images and texts is here yet. Use --mock-data.")

    def mock(self, request: DatasetRequest) -> SampleDataset:
        assert self.model is not None, "of_run gives it"
        return MockImages(self.model, request)

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        assert self.model is not None, "of_run gives it"
        return make_image_text_batch(samples, self.model)


register_dataset(IMAGE_TEXT_DATASET, ImageTextKind)
