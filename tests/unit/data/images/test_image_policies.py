"""The pixels of every policy equal those of transformers' own processors (with Pillow), bit by bit, at odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from petatron.data.images.image_error import ImageError
from petatron.data.images.image_policies import (
    DynamicImages,
    FixedImages,
    ImageLayout,
    ImagePolicy,
    PolicySettings,
    RatioTiles,
    TiledImages,
    image_policy,
)
from petatron.data.images.patch_grid import PatchGrid
from tests.unit.data.images.image_files import noise

SIZES = [(37, 53), (53, 37), (64, 64), (9, 210), (211, 10), (20, 20), (6, 7), (130, 97), (333, 334)]
RAW = {"do_rescale": False, "do_normalize": False}


def image_of(size: tuple[int, int]) -> np.ndarray:
    return noise(size[1], size[0], seed=sum(size))


def parts_of(policy: ImagePolicy, image: np.ndarray) -> list[np.ndarray]:
    """The parts of an image, which have the sizes of its layout."""
    parts = policy.parts(image, name="a")
    height, width = image.shape[:2]
    assert tuple(part.shape[:2] for part in parts) == policy.layout((height, width), name="a").sizes
    return parts


def assert_same(parts: list[np.ndarray], expected: Any) -> None:
    expected = np.asarray(expected)
    assert len(parts) == len(expected)
    assert np.array_equal(np.stack(parts).transpose(0, 3, 1, 2), expected)


@pytest.mark.parametrize("size", SIZES)
def test_clip(size: tuple[int, int]):
    processor = CLIPImageProcessorPil(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}, **RAW)
    image = image_of(size)
    assert_same(parts_of(FixedImages(image_size=30), image), processor(image)["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
def test_siglip(size: tuple[int, int]):
    processor = SiglipImageProcessorPil(size={"height": 30, "width": 30}, **RAW)
    image = image_of(size)
    assert_same(parts_of(FixedImages(image_size=30, how="squash"), image), processor(image)["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
def test_llava_pads(size: tuple[int, int]):
    processor = LlavaImageProcessorPil(
        size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}, do_pad=True, **RAW
    )
    grid = PatchGrid(patch_size=10, image_size=30, image_token_id=0)
    policy = image_policy(PolicySettings(policy="pad"), grid, processor.image_mean)
    image = image_of(size)
    assert_same(parts_of(policy, image), processor(image)["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
def test_qwen2_vl(size: tuple[int, int]):
    """Patches too: their order, and a frame that is repeated in time."""
    limits = {"min_pixels": 8 * 8 * 9, "max_pixels": 8 * 8 * 40}
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, **limits, **RAW)
    grid = PatchGrid(patch_size=4, merge_size=2, temporal_patch_size=2, image_size=0, image_token_id=0)
    policy = image_policy(PolicySettings(policy="dynamic", **limits), grid)
    image = image_of(size)
    (part,) = parts_of(policy, image)
    expected = processor(image, return_tensors="np")
    assert list(grid.of_size(part.shape[:2])) == expected["image_grid_thw"][0].tolist()
    assert np.array_equal(grid.patches_of([part]), expected["pixel_values"])


def test_qwen2_vl_normalized():
    """What the model makes of the pixels of 8 bits is what the processor gives."""
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=2560)
    grid = PatchGrid(patch_size=4, merge_size=2, temporal_patch_size=2, image_size=0, image_token_id=0)
    image = image_of((50, 70))
    policy = DynamicImages(block=8, min_pixels=64, max_pixels=2560)
    patches = grid.patches_of(policy.parts(image, name="a")).reshape(-1, 3, 2 * 4 * 4) / 255
    mean, std = (np.array(x)[:, None] for x in (processor.image_mean, processor.image_std))
    expected = processor(image, return_tensors="np")["pixel_values"]
    assert np.abs(((patches - mean) / std).reshape(expected.shape) - expected).max() < 1e-6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [True, False])
def test_smolvlm(size: tuple[int, int], splits: bool):
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 70}, max_image_size={"longest_edge": 20}, do_image_splitting=splits, **RAW
    )
    image = image_of(size)
    expected = processor([[image]], return_tensors="np", return_row_col_info=True)
    policy = TiledImages(tile_size=20, longest_side=70, splits=splits)
    assert_same(parts_of(policy, image), expected["pixel_values"][0])
    layout = policy.layout(size, name="a")
    assert [[layout.rows]] == expected["rows"] and [[layout.columns]] == expected["cols"]


def test_smolvlm_of_one_tile():
    policy = TiledImages(tile_size=70, longest_side=70)
    assert policy.layout((64, 64), name="a") == ImageLayout(((70, 70),))
    processor = SmolVLMImageProcessorPil(size={"longest_edge": 70}, max_image_size={"longest_edge": 70}, **RAW)
    image = image_of((64, 64))
    assert_same(parts_of(policy, image), processor([[image]], return_tensors="np")["pixel_values"][0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_tiles", [1, 2, 6, 12])
def test_ratio_tiles(size: tuple[int, int], max_tiles: int):
    processor = GotOcr2ImageProcessorPil(
        size={"height": 20, "width": 20}, crop_to_patches=True, max_patches=max_tiles, **RAW
    )
    image = image_of(size)
    expected = processor(image)["pixel_values"]
    assert_same(parts_of(RatioTiles(tile_size=20, max_tiles=max_tiles), image), expected)
    without = parts_of(RatioTiles(tile_size=20, max_tiles=max_tiles, has_thumbnail=False), image)
    assert_same(without, expected[: len(without)])
    assert len(without) == max(1, len(expected) - 1)


def test_frames_of_a_video():
    """Frames in pairs, the last one repeated; transformers' own video processor has the same order, of which this is the formula."""
    random = np.random.default_rng(1)
    frames = [random.integers(0, 256, (16, 24, 3), np.uint8) for _ in range(5)]
    grid = PatchGrid(patch_size=4, merge_size=2, temporal_patch_size=2, image_size=0, image_token_id=0)
    patches = grid.patches_of(frames)
    assert grid.of_size((16, 24), 5) == (3, 4, 6) and patches.shape == (3 * 4 * 6, 3 * 2 * 16)
    video = np.stack([*frames, frames[-1]])
    number = 0
    for time in range(3):
        for row, column in ((row, column) for row in range(2) for column in range(3)):
            for inner_row, inner_column in ((0, 0), (0, 1), (1, 0), (1, 1)):
                top, left = 8 * row + 4 * inner_row, 8 * column + 4 * inner_column
                expected = video[2 * time : 2 * time + 2, top : top + 4, left : left + 4].transpose(3, 0, 1, 2)
                assert np.array_equal(patches[number].reshape(3, 2, 4, 4), expected)
                number += 1


def test_frames_have_one_size():
    """That of the first frame; many frames share the pixels of a video."""
    images = [image_of((40, 60)), image_of((30, 30))]
    for policy in (
        FixedImages(image_size=20),
        TiledImages(tile_size=20, longest_side=60),
        RatioTiles(tile_size=20, max_tiles=4),
    ):
        assert {frame.shape for frame in policy.frames(images, name="a")} == {(20, 20, 3)}
        assert policy.frame_size((40, 60), 2, name="a") == (20, 20)
    policy = DynamicImages(block=10, min_pixels=400, max_pixels=2400, max_video_pixels=2400)
    assert {frame.shape for frame in policy.frames(images[:1], name="a")} == {(40, 60, 3)}
    assert {frame.shape for frame in policy.frames(images, name="a")} == {
        (*policy.frame_size((40, 60), 2, name="a"), 3)
    }
    assert policy.frame_size((40, 60), 2, name="a") == (20, 40)
    assert policy.frame_size((40, 60), 9, name="a") == (10, 20)


def test_pixels_that_fill_no_patch_are_left_out():
    """As SigLIP of 384 pixels with patches of 14 does."""
    grid = PatchGrid(patch_size=4, image_size=15, image_token_id=0)
    image = image_of((15, 15))
    assert grid.of_size((15, 15)) == (1, 3, 3)
    assert np.array_equal(grid.patches_of([image]), grid.patches_of([image[:12, :12]]))


def test_too_narrow():
    policy = DynamicImages(block=8)
    with pytest.raises(ImageError, match="more than 200 times"):
        policy.layout((1, 201), name="a")
    assert policy.layout((1, 200), name="a").sizes[0][0] >= 8
