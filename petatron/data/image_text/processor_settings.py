"""Reads how images are shown from the files of an image processor of transformers, which a Hugging Face model has beside its weights.

    CLIPImageProcessor, LlavaImageProcessor    crop, or pad; squash where nothing is cropped
    SiglipImageProcessor                       squash
    Qwen2VLImageProcessor, Qwen2_5_VL...       dynamic, within a range of pixels
    Idefics3ImageProcessor, SmolVLM...         tiles

What the model does itself (patches, mean and standard deviation of pixels) must be what the processor does: else its images would be others
than the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.model_companion_files import read_companion_file
from petatron.config.schema.model import ModelConfig
from petatron.data.images.image_policies import PolicySettings, ResampleName

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PIL_FILTERS: Mapping[int, ResampleName] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
_CROPPING, _SQUASHING = ("CLIPImageProcessor", "LlavaImageProcessor"), ("SiglipImageProcessor", "ViTImageProcessor")
_DYNAMIC = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
_TILING = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
_MARKUPS: Mapping[str, str] = {**dict.fromkeys(_DYNAMIC, "qwen2-vl"), **dict.fromkeys(_TILING, "smolvlm")}
_TOLERANCE = 1e-4
_DEFAULT = PolicySettings()


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """How an image processor shows images, and the markup that its family writes them with."""

    policy: PolicySettings
    markup: str


def read_processor(folder: Path, model: ModelConfig) -> ImageProcessor | None:
    """Returns how a folder's image processor shows images; None without one. Raises `DataError` for one that is not read."""
    for name in PROCESSOR_FILES:
        path = folder / name
        if not path.is_file():
            continue
        content = json.loads(read_companion_file(path, DataError))
        inner = content.get("image_processor", content) if isinstance(content, Mapping) else None
        if isinstance(inner, Mapping) and "image_processor_type" in inner:
            try:
                kind = _kind_of(inner)
                return ImageProcessor(processor_policy(inner, model), _MARKUPS.get(kind, "llava"))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DataError(f"{path} cannot be read as an image processor ({error}). {_FIX}") from error
    return None


_FIX = "Say how images are shown with --dataset-settings images=POLICY."


def _kind_of(content: Mapping[str, Any]) -> str:
    return str(content["image_processor_type"]).removesuffix("Fast").removesuffix("Pil")


def processor_policy(content: Mapping[str, Any], model: ModelConfig) -> PolicySettings:
    """Returns the policy of an image processor.

    >>> content = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 224, "width": 224}, "resample": 3}
    >>> processor_policy(content, ModelConfig(model_type="vlm", vision_image_size=224)).policy
    'squash'
    """
    kind = _kind_of(content)
    _check_pixels(content, model)
    resample = _PIL_FILTERS.get(content.get("resample", -1))
    size = content.get("size")
    sizes: Mapping[str, int] = size if isinstance(size, Mapping) else {}
    if kind in _DYNAMIC:
        patches = {
            "patch_size": model.vision_patch_size,
            "merge_size": model.vision_merge_size,
            "temporal_patch_size": model.vision_temporal_patch_size,
        }
        for name, value in patches.items():
            _check(name, content.get(name, value), value)
        least = content.get("min_pixels") or sizes.get("shortest_edge") or _DEFAULT.min_pixels
        most = content.get("max_pixels") or sizes.get("longest_edge") or _DEFAULT.max_pixels
        return PolicySettings(policy="dynamic", resample=resample, min_pixels=int(least), max_pixels=int(most))
    if kind in _TILING:
        tile = content.get("max_image_size", {}).get("longest_edge", model.vision_image_size)
        _check("max_image_size", tile, model.vision_image_size)
        splits = bool(content.get("do_image_splitting", True))
        return PolicySettings(policy="tiles", resample=resample, longest_side=int(sizes["longest_edge"]), splits=splits)
    if kind in (*_CROPPING, *_SQUASHING):
        crops = kind in _CROPPING and content.get("do_center_crop", True)
        given = content.get("crop_size", size) if crops else size
        _check("size", _side(given), model.vision_image_size)
        policy = "pad" if content.get("do_pad") else "crop" if crops else "squash"
        return PolicySettings(policy=policy, resample=resample)
    raise DataError(f"The model's image processor is {kind:.60}, which is not known here. {_FIX}")


def _side(size: Any) -> int:
    if isinstance(size, Mapping):
        return int(size.get("height", size.get("shortest_edge", 0)))
    return int(size)


def _check_pixels(content: Mapping[str, Any], model: ModelConfig) -> None:
    pairs = (("image_mean", model.vision_pixel_mean), ("image_std", model.vision_pixel_std))
    for name, of_model in pairs if content.get("do_normalize", True) else ():
        given = content.get(name)
        if given is None:
            continue
        if len(given) != len(of_model) or any(abs(a - b) > _TOLERANCE for a, b in zip(given, of_model, strict=True)):
            flag = {"image_mean": "--vision-pixel-mean", "image_std": "--vision-pixel-std"}[name]
            values = " ".join(f"{value:g}" for value in given)
            raise DataError(
                f"The model's image processor has {name} {values}, and the model another. Add {flag} {values}."
            )


def _check(name: str, given: Any, of_model: int) -> None:
    if int(given) != of_model:
        raise DataError(f"The model's image processor has {name} {given}, and the model {of_model}. {_FIX}")
