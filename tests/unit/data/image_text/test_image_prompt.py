"""Prompts with images are shown and written as a model's files, its training or the user say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petatron.base.errors import ConfigError, DataError
from petatron.config.schema.model import ModelConfig
from petatron.data.image_text.chat_formats import CHAT_FORMATS
from petatron.data.image_text.image_prompt import MARK_BEGINS, ImagePrompts
from petatron.data.image_text.image_prompt_settings import ImagePromptSettings, image_prompt_settings
from petatron.data.image_text.processor_settings import processor_policy, read_processor
from petatron.data.images.decode_image import ImageLimits
from petatron.data.images.image_policies import PolicySettings
from petatron.data.prompt.chat_template import ChatTemplate
from petatron.data.tokenizer import HuggingFaceTokenizer
from tests.unit.data.image_text.small_tokenizer import token_id, write_tokenizer
from tests.unit.data.images.image_files import noise, png_header

MODEL = ModelConfig(
    model_type="vlm",
    vision_image_size=32,
    vision_patch_size=8,
    vision_merge_size=2,
    vision_temporal_patch_size=2,
    max_patches=200,
    image_token_id=7,
)
TILES = {"image_processor_type": "SmolVLMImageProcessorFast", "size": {"longest_edge": 96}, "resample": 1}
SQUASH = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}, "resample": 2}
DYNAMIC = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
CROP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 40}, "crop_size": 32, "resample": 3}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (CROP, PolicySettings(policy="crop", resample="bicubic")),
        (CROP | {"do_pad": True}, PolicySettings(policy="pad", resample="bicubic")),
        (CROP | {"do_center_crop": False, "size": {"height": 32}}, PolicySettings(policy="squash", resample="bicubic")),
        (SQUASH, PolicySettings(policy="squash", resample="bilinear")),
        (TILES, PolicySettings(policy="tiles", resample="lanczos", longest_side=96)),
        (TILES | {"do_image_splitting": False}, PolicySettings(policy="tiles", resample="lanczos", longest_side=96, splits=False)),
        (DYNAMIC, PolicySettings(policy="dynamic")),
        (DYNAMIC | {"min_pixels": 256, "max_pixels": 512}, PolicySettings(policy="dynamic", min_pixels=256, max_pixels=512)),
        (
            DYNAMIC | {"size": {"shortest_edge": 300, "longest_edge": 900}},
            PolicySettings(policy="dynamic", min_pixels=300, max_pixels=900),
        ),
    ],
)  # fmt: skip
def test_image_processors_are_policies(content: dict[str, Any], expected: PolicySettings):
    assert processor_policy(content, MODEL) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"image_processor_type": "OtherImageProcessor"}, "is OtherImageProcessor, which is not known here"),
        (SQUASH | {"size": {"height": 64, "width": 64}}, "has size 64, and the model 32"),
        (TILES | {"max_image_size": {"longest_edge": 64}}, "has max_image_size 64"),
        (DYNAMIC | {"patch_size": 14}, "has patch_size 14, and the model 8"),
        (SQUASH | {"image_mean": [0.5, 0.5, 0.5]}, "Add --vision-pixel-mean 0.5 0.5 0.5"),
        (SQUASH | {"image_std": [1, 1, 1]}, "Add --vision-pixel-std 1 1 1"),
    ],
)
def test_a_processor_that_shows_other_images_than_the_model_reads_is_refused(content: dict[str, Any], said: str):
    with pytest.raises(DataError, match=said):
        processor_policy(content, MODEL)


def test_a_processor_is_read_from_its_files(tmp_path: Path):
    assert read_processor(tmp_path, MODEL) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": SQUASH, "processor_class": "X"}))
    processor = read_processor(tmp_path, MODEL)
    assert processor is not None and (processor.policy.policy, processor.markup) == ("squash", "llava")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(TILES | {"size": 3}))
    with pytest.raises(DataError, match="cannot be read as an image processor"):
        read_processor(tmp_path, MODEL)


def test_what_the_user_says_comes_before_the_processor_and_the_training(tmp_path: Path):
    def settings(given: tuple[str, ...] = (), trained: tuple[str, ...] = ()) -> ImagePromptSettings:
        return image_prompt_settings(tmp_path, MODEL, given=given, trained=trained)

    assert settings().policy.policy == "crop" and settings().markup is None
    rotary = replace(MODEL, vision_position_embedding_type="rope")
    assert image_prompt_settings(tmp_path, rotary).policy.policy == "dynamic"
    trained = settings(("image_markup=llava",), ("images=pad", "image_markup=nvlm", "chat_format=vicuna"))
    assert (trained.policy.policy, trained.markup, trained.chat_format) == ("pad", "llava", "vicuna")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SQUASH))
    assert settings(("image_markup=llava",)).policy.policy == "squash"
    assert settings(("images=crop",)).policy.policy == "crop"
    with pytest.raises(ConfigError, match="images=round is no choice"):
        settings(("images=round",))


def prompts(tmp_path: Path, token: str, **settings: Any) -> ImagePrompts:
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "tokenizer"))
    model = replace(MODEL, image_token_id=token_id(tokenizer, token))
    return ImagePrompts(model, tokenizer, ImagePromptSettings(**{"policy": PolicySettings(), **settings}))


def test_tiles_are_written_where_the_template_has_one_placeholder(tmp_path: Path):
    writer = prompts(tmp_path, "<image>", policy=PolicySettings(policy="tiles", longest_side=64))
    assert writer.markup == "smolvlm"
    from PIL import Image

    from tests.unit.data.images.image_files import encoded

    content = encoded(Image.fromarray(noise(60, 30)), "PNG")
    size = writer.measure(content, ImageLimits(), name="a")
    patches, grids = writer.read(content, ImageLimits(), name="a")
    assert len(grids) == 3 and len(patches) == 48 and writer.num_tokens([size]) == 12
    ids = writer.encode(writer.split("User:<image>what?"), [size])
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer")
    four, around = "<image>" * 4, "<fake_token_around_image>"
    tiles = f"{around}<row_1_col_1>{four}{around}<row_1_col_2>{four}\n\n{around}<global-img>{four}{around}"
    assert ids == tokenizer.encode(f"User:{tiles}what?")
    with pytest.raises(DataError, match=r"have 240 patches, and the model reads 200 of a prompt \(--max-patches\)"):
        writer.check_patches([size] * 5)


def test_tags_are_as_many_as_images(tmp_path: Path):
    writer = prompts(tmp_path, "<|image_pad|>")
    assert writer.markup == "qwen2-vl"
    assert writer.split("a<|vision_start|><|image_pad|><|vision_end|>b") == ["a", "b"]
    assert writer.texts_around("what?", 2) == ["", "", "what?"]
    assert writer.texts_around("a <image> b", 1) == ["a ", " b"]
    with pytest.raises(DataError, match="has 1 tags <image>, and 2 images are given"):
        writer.texts_around("a <image> b", 2)
    with pytest.raises(DataError, match="bomb has more than"):
        writer.measure(png_header(30_000, 30_000), ImageLimits(), name="bomb")


@pytest.mark.parametrize("name", ["vicuna", "smolvlm"])
def test_a_chat_format_as_a_template_writes_what_was_learned(name: str):
    chat = CHAT_FORMATS[name]
    named = {"bos": "<s>", "eos": "</s>"}
    template = ChatTemplate(
        chat.chat_template(image_begins=MARK_BEGINS), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )
    mark = f"{MARK_BEGINS}1"
    texts = ["<image>what?", "a dog", "and <image>?", "a cat"]
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts)]
    learned = "".join(segment.text for segment in chat.segments(messages, named, force_system=False))
    marked = [message | {"content": message["content"].replace("<image>", mark)} for message in messages]
    assert template.render(marked, add_generation_prompt=False).replace(mark, "<image>") == learned
    assert np.all([template.render(marked).startswith(template.render(marked, add_generation_prompt=False))])
