"""The kind `image-text`: images and text, for models that read both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import Problem, raise_problems
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.required_settings import required
from petatron.config.schema.data import DataConfig
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.objective_and_dataset_names import IMAGE_TEXT_DATASET
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import LoaderOptions, SampleDataset
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, register_dataset
from petatron.data.image_text.image_text_settings import FROM_MODEL, SETTINGS_FLAG, ImageTextSettings
from petatron.data.image_text.image_text_source import open_image_text
from petatron.data.image_text.mock_images import MockImages
from petatron.data.image_text.sample_builder import BEGINS, SampleSettings
from petatron.data.images.patch_grid import PatchGrid
from petatron.data.masked.packed_rows import packed_documents
from petatron.data.sample_index_folder import sample_index_folder
from petatron.models.batch import Batch
from petatron.models.image_text_batch import make_image_text_batch


@dataclass(frozen=True)
class ImageTextKind(ImageTextSettings, DatasetKind):
    """Its settings are those of `ImageTextSettings`; what images become follows from the model."""

    reads: ClassVar[str] = "JSON Lines files with images beside them, or tars of both"
    model: ModelConfig | None = field(default=None, metadata=NOT_A_SETTING)
    """The model that reads the images."""
    data: DataConfig | None = field(default=None, metadata=NOT_A_SETTING)
    """Where indices are kept."""

    def of_run(self, run: RunConfig) -> ImageTextKind:
        has_table = run.model.vision_position_embedding_type == "learned"
        images = self.images
        if images == FROM_MODEL:
            images = "crop" if has_table else "dynamic"
        kind = replace(self, images=images, model=run.model, data=run.data)
        problems = kind.setting_problems()
        if images == "dynamic" and has_table:
            rule = "shows images of any size, and the positions of patches are a table for one"
            fix = "Use --vision-position-embedding-type rope, or images=crop, squash, pad, tiles or ratio."
            problems.append(Problem(SETTINGS_FLAG, "images=dynamic", rule, fix))
        raise_problems(problems)
        return kind

    def open(self, source: str, request: DatasetRequest) -> DataSource:
        assert self.model is not None and self.data is not None, "of_run gives them"
        settings = ImageTextSettings(**{entry.name: getattr(self, entry.name) for entry in fields(ImageTextSettings)})
        options = SampleSettings(settings=settings, grid=patch_grid(self.model), mean=self.model.vision_pixel_mean)
        folder = sample_index_folder(self.data, source)
        return open_image_text(source, options, cache_folder=folder, log=request.index_log)

    def mock(self, request: DatasetRequest) -> SampleDataset:
        assert self.model is not None, "of_run gives it"
        return MockImages(self.model, request)

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        assert self.model is not None, "of_run gives it"
        batch = make_image_text_batch(samples, self.model)
        if BEGINS not in samples[0]:
            return batch
        documents, _ = packed_documents(np.stack([sample[BEGINS] for sample in samples]))
        return replace(batch, documents=documents)


def patch_grid(model: ModelConfig) -> PatchGrid:
    """Returns the patches that a model reads."""
    return PatchGrid(
        patch_size=model.vision_patch_size,
        image_size=model.vision_image_size,
        image_token_id=required("image_token_id", model.image_token_id),
        temporal_patch_size=model.vision_temporal_patch_size,
        merge_size=model.vision_merge_size,
        max_patches=model.max_patches,
        extra_patches=int(model.vision_class_token),
    )


register_dataset(IMAGE_TEXT_DATASET, ImageTextKind)
