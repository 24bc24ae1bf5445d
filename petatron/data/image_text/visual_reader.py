"""Reads the images and videos of records: an image is one frame; a video a list of frames, a folder of them, or an animated file."""

from __future__ import annotations

from dataclasses import dataclass

from petatron.data.image_text.image_text_record import Visual
from petatron.data.image_text.record_store import RecordStore
from petatron.data.images.decode_image import ImageLimits, Rgb, decode_frames, decode_image, even_frames
from petatron.data.images.image_error import ImageError
from petatron.data.images.image_policies import ImageLayout, ImagePolicy
from petatron.data.images.patch_grid import Grid, PatchGrid, Size


@dataclass(frozen=True, slots=True)
class VisualSize:
    """How an image is arranged in parts, and the size and number of frames of each: what its tokens follow from."""

    layout: ImageLayout
    num_frames: int = 1

    def features(self, grid: PatchGrid) -> list[int]:
        """Returns the features of each part."""
        return [grid.num_features(part) for part in self.grids(grid)]

    def num_patches(self, grid: PatchGrid) -> int:
        """Returns the patches that it counts for."""
        return sum(grid.num_patches(part) for part in self.grids(grid))

    def grids(self, grid: PatchGrid) -> list[Grid]:
        return [grid.of_size(size, self.num_frames) for size in self.layout.sizes]


@dataclass(frozen=True, slots=True)
class ReadVisual:
    """The parts of a visual, each with its frames, and their size."""

    parts: list[list[Rgb]]
    size: VisualSize


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualReader:
    """animations_are_videos: an animated file is shown as frames where an image is named too; else its first frame is."""

    policy: ImagePolicy
    limits: ImageLimits
    max_frames: int = 16
    animations_are_videos: bool = False

    def read(self, store: RecordStore, number: int, visual: Visual) -> ReadVisual:
        """Decodes a visual and scales it; raises `ImageError`."""
        frames = self._frames(store, number, visual)
        if len(frames) == 1 and visual.kind == "image":
            parts = self.policy.parts(frames[0], name=visual.title)
            return ReadVisual([[part] for part in parts], self._size_of_image(_size(frames[0]), visual))
        scaled = self.policy.frames(frames, name=visual.title)
        return ReadVisual([scaled], VisualSize(ImageLayout((_size(scaled[0]),)), len(scaled)))

    def measure(self, store: RecordStore, number: int, visual: Visual) -> VisualSize:
        """Returns the size that a visual is read with, by its headers; raises `ImageError` where they show that it is of no use."""
        names = self._names(store, visual)
        is_animation = self._is_file(visual, names) and (visual.kind == "video" or self.animations_are_videos)
        headers = [store.image_header(number, name, self.limits, counts_frames=is_animation) for name in names]
        size, num_frames = (headers[0].height, headers[0].width), len(headers)
        if is_animation:
            num_frames = len(even_frames(headers[0].num_frames, self.max_frames))
        if num_frames == 1 and visual.kind == "image":
            return self._size_of_image(size, visual)
        return VisualSize(ImageLayout((self.policy.frame_size(size, num_frames, name=visual.title),)), num_frames)

    def _size_of_image(self, size: Size, visual: Visual) -> VisualSize:
        return VisualSize(self.policy.layout(size, name=visual.title))

    @staticmethod
    def _is_file(visual: Visual, names: list[str]) -> bool:
        """Whether a visual is one file, and not a list or a folder of frames."""
        return len(names) == 1 and names[0] == visual.names[0]

    def _frames(self, store: RecordStore, number: int, visual: Visual) -> list[Rgb]:
        names = self._names(store, visual)
        if not self._is_file(visual, names):
            return [
                decode_image(store.image_bytes(number, name, self.limits), self.limits, name=name) for name in names
            ]
        content = store.image_bytes(number, names[0], self.limits)
        if visual.kind == "video" or self.animations_are_videos:
            return decode_frames(content, self.limits, name=names[0], max_frames=self.max_frames)
        return [decode_image(content, self.limits, name=names[0])]

    def _names(self, store: RecordStore, visual: Visual) -> list[str]:
        """Returns the files of a visual, at most as many as a video has frames."""
        names = list(visual.names)
        if visual.kind == "video" and len(names) == 1:
            listed = store.frame_names(names[0])
            if listed is not None and not listed:
                raise ImageError(names[0], "empty", "is a folder without images")
            names = names if listed is None else listed
        return [names[place] for place in even_frames(len(names), self.max_frames)] if visual.kind == "video" else names


def _size(image: Rgb) -> Size:
    height, width = image.shape[:2]
    return height, width
