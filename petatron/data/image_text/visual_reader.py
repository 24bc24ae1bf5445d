"""Reads the images and videos of records: an image is one frame; a video a list of frames, a folder of them, or an animated file."""

from __future__ import annotations

from dataclasses import dataclass

from petatron.data.image_text.image_text_record import Visual
from petatron.data.image_text.record_store import RecordStore
from petatron.data.images.decode_image import ImageLimits, Rgb, decode_frames, decode_image, even_frames
from petatron.data.images.image_error import ImageError
from petatron.data.images.image_policies import ImageLayout, ImagePolicy
from petatron.data.images.patch_grid import PatchGrid, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVisual:
    """The parts of a visual, each with its frames, and how they are arranged."""

    parts: list[list[Rgb]]
    layout: ImageLayout

    def features(self, grid: PatchGrid) -> list[int]:
        """Returns the features of each part."""
        return [grid.num_features(grid.of_size(_size(frames[0]), len(frames))) for frames in self.parts]

    def num_patches(self, grid: PatchGrid) -> int:
        return sum(grid.num_patches(grid.of_size(_size(frames[0]), len(frames))) for frames in self.parts)


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
            return ReadVisual(
                parts=[[part] for part in parts], layout=self.policy.layout(_size(frames[0]), name=visual.title)
            )
        scaled = self.policy.frames(frames, name=visual.title)
        return ReadVisual(parts=[scaled], layout=ImageLayout((_size(scaled[0]),)))

    def check(self, store: RecordStore, number: int, visual: Visual) -> None:
        """Reads headers alone; raises `ImageError` for a visual that is known to be of no use by them."""
        for name in self._names(store, visual):
            header = store.image_header(number, name, self.limits)
            if visual.kind == "image":
                self.policy.layout((header.height, header.width), name=name)
            else:
                self.policy.frame_size((header.height, header.width), 1, name=name)

    def _frames(self, store: RecordStore, number: int, visual: Visual) -> list[Rgb]:
        names = self._names(store, visual)
        if len(names) > 1 or (len(names) == 1 and names[0] != visual.names[0]):
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
