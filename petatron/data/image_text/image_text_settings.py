"""The settings of images and texts (`--dataset-settings`): how images are shown and written, and what becomes of records that fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from petatron.base.errors import Problem
from petatron.data.image_text.chat_formats import CHAT_FORMATS
from petatron.data.image_text.image_markup import IMAGE_MARKUPS
from petatron.data.images.decode_image import HIGHEST_MAX_PIXELS, ImageLimits
from petatron.data.images.image_policies import POLICY_NAMES, RESAMPLE_NAMES, PolicySettings

SETTINGS_FLAG = "--dataset-settings"
OnError = Literal["fail", "skip"]
ImageCheck = Literal["none", "header", "decode"]
LongSamples = Literal["truncate", "skip", "fail"]
FROM_POLICY, FROM_MODEL, NO_CHAT = "policy", "model", "none"


@dataclass(frozen=True, kw_only=True)
class ImageTextSettings:
    """What a user may choose.

    image_folder      in which a JSON Lines file's images are; empty for its own folder
    on_error          whether a record without a usable image or text ends the run, or is counted and left out
    check_images      what is read of each image before training
    long_samples      what becomes of a record of more tokens, or patches, than a sample has; an image is never cut
    packed            a sample has as many records as fit, which do not see one another
    images            a policy, or `model` for the one that its positions allow
    resample          a filter, or `policy` for the policy's own
    min_pixels, max_pixels     of an image that is shown in its own size
    longest_side, max_tiles, use_thumbnail     of images that are cut into tiles
    image_markup      how an image is written
    chat_format       how a conversation is; `none` where records are texts
    max_frames        of a video
    animations_are_videos      an animated file is shown as frames where an image is named too
    max_image_pixels, max_image_bytes          beyond which an image is refused
    """

    image_folder: str = ""
    on_error: OnError = "fail"
    check_images: ImageCheck = "header"
    long_samples: LongSamples = "truncate"
    packed: bool = False
    images: str = FROM_MODEL
    resample: str = FROM_POLICY
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    longest_side: int = 1456
    max_tiles: int = 12
    use_thumbnail: bool = True
    image_markup: str = "plain"
    chat_format: str = NO_CHAT
    max_frames: int = 16
    animations_are_videos: bool = False
    max_image_pixels: int = 1 << 26
    max_image_bytes: int = 1 << 26

    @property
    def limits(self) -> ImageLimits:
        return ImageLimits(max_pixels=self.max_image_pixels, max_bytes=self.max_image_bytes)

    @property
    def policy(self) -> PolicySettings:
        chosen: dict[str, Any] = {} if self.images == FROM_MODEL else {"policy": self.images}
        if self.resample != FROM_POLICY:
            chosen["resample"] = self.resample
        return PolicySettings(
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            longest_side=self.longest_side,
            max_tiles=self.max_tiles,
            has_thumbnail=self.use_thumbnail,
            **chosen,
        )

    def setting_problems(self) -> list[Problem]:
        """Returns every problem of the settings."""
        choices: dict[str, Iterable[str]] = {
            "on_error": get_args(OnError),
            "check_images": get_args(ImageCheck),
            "long_samples": get_args(LongSamples),
            "images": (FROM_MODEL, *POLICY_NAMES),
            "resample": (FROM_POLICY, *RESAMPLE_NAMES),
            "image_markup": IMAGE_MARKUPS,
            "chat_format": (NO_CHAT, *CHAT_FORMATS),
        }
        return [*self._wrong_choices(choices), *self._wrong_numbers()]

    def _wrong_choices(self, choices: dict[str, Iterable[str]]) -> Iterator[Problem]:
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                known = ", ".join(allowed)
                yield Problem(SETTINGS_FLAG, f"{name}={value}", "is no choice", f"Use one of {known}.")

    def _wrong_numbers(self) -> Iterator[Problem]:
        for name in ("min_pixels", "longest_side", "max_tiles", "max_frames", "max_image_bytes"):
            if getattr(self, name) < 1:
                yield Problem(SETTINGS_FLAG, f"{name}={getattr(self, name)}", "is below 1", "Give a count.")
        if self.max_pixels < self.min_pixels:
            rule = f"is below min_pixels={self.min_pixels}"
            yield Problem(SETTINGS_FLAG, f"max_pixels={self.max_pixels}", rule, "Give as many or more.")
        if not 1 <= self.max_image_pixels <= HIGHEST_MAX_PIXELS:
            rule = f"is not between 1 and {HIGHEST_MAX_PIXELS}, beyond which Pillow decodes nothing"
            yield Problem(SETTINGS_FLAG, f"max_image_pixels={self.max_image_pixels}", rule, f"Use {1 << 26}.")
