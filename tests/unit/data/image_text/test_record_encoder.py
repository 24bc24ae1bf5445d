"""Token ids of texts with images equal those of transformers' own processors; masks cover what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from petatron.base.errors import DataError
from petatron.data.image_text.chat_formats import CHAT_FORMATS
from petatron.data.image_text.image_text_record import ImageTextRecord, parse_record
from petatron.data.image_text.record_encoder import EncodedRecord, RecordEncoder
from petatron.data.image_text.record_error import RecordError
from petatron.data.images.image_policies import DynamicImages, FixedImages, ImageLayout, ImagePolicy, TiledImages
from petatron.data.images.patch_grid import PatchGrid
from petatron.data.multimodal.multimodal_tokenizer import IMAGE, MultimodalOptions, MultimodalTokenizer
from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer, vocabulary_json
from tests.unit.data.image_text.small_tokenizer import token_id, write_tokenizer
from tests.unit.data.images.image_files import noise

IMAGES = [noise(50, 30, seed=1), noise(21, 44, seed=2)]
QWEN_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
CONVERSATION: list[dict[str, str]] = [
    {"role": "user", "content": "<image>what is this?<image>"},
    {"role": "assistant", "content": "a red circle"},
    {"role": "user", "content": "and a  blue dog"},
    {"role": "assistant", "content": "it is"},
]


class QwenProcessor(Qwen2VLProcessor):
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Without torchvision there is no video processor to give."""
        if argument_name != "video_processor":
            return super().check_argument_for_proper_class(argument_name, argument)
        return None


@pytest.fixture(scope="module", params=[False, True], ids=["byte level", "metaspace"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), metaspace=request.param)


def encode(
    encoder: RecordEncoder, record: ImageTextRecord, policy: ImagePolicy | None = None, grid: PatchGrid | None = None
) -> EncodedRecord:
    """Encodes a record with the test images; of 2 features each where no policy is given."""
    images = IMAGES[: len(record.visuals)]
    if policy is None or grid is None:
        return encoder.encode(record, [[2]] * len(images), [ImageLayout(((4, 4),))] * len(images))
    layouts = [policy.layout(image.shape[:2], name="a") for image in images]
    features = [[grid.num_features(grid.of_size(size)) for size in layout.sizes] for layout in layouts]
    return encoder.encode(record, features, layouts)


def record_of(*, text: str | None = None, messages: list[dict[str, str]] | None = None) -> ImageTextRecord:
    content = {"text": text} if messages is None else {"messages": messages}
    count = sum(content.count(IMAGE) for content in [text or "", *(m["content"] for m in messages or [])])
    return parse_record({**content, "images": ["a"] * count})


def learned(tokenizer: Any, encoded: EncodedRecord) -> str:
    return tokenizer.decode(encoded.ids[encoded.is_target].tolist())


def test_llava(folder: Path):
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12}),
        PreTrainedTokenizerFast.from_pretrained(folder),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    tokenizer = HuggingFaceTokenizer(folder)
    grid = PatchGrid(patch_size=4, image_size=12, image_token_id=token_id(tokenizer, "<image>"))
    encoder = RecordEncoder(tokenizer, grid, markup="llava", chat_format="vicuna")
    encoded = encode(encoder, record_of(messages=CONVERSATION), FixedImages(image_size=12), grid)
    text = (
        "<s>A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite "
        "answers to the human's questions. USER: <image>what is this?<image> ASSISTANT: a red circle</s>USER: and a  blue dog ASSISTANT: "
        "it is</s>"
    )
    assert encoded.ids.tolist() == processor(images=IMAGES, text=text)["input_ids"][0]
    if tokenizer.decode(tokenizer.encode("a b")) == "a b":
        assert learned(tokenizer, encoded).replace(" ", "") == "aredcircle</s>itis</s>"
    caption = encode(encoder, record_of(text="<image> a dog"), FixedImages(image_size=12), grid)
    assert caption.ids.tolist() == processor(images=IMAGES[:1], text="<s><image> a dog</s>")["input_ids"][0]
    assert caption.is_target.sum() == len(tokenizer.encode("<image> a dog</s>")) - 1
    assert caption.visuals == [(1, 10)]


def test_qwen2_vl(folder: Path):
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    limits = {"min_pixels": 8 * 8 * 9, "max_pixels": 8 * 8 * 20}
    processor = QwenProcessor(Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, **limits), fast, None)
    tokenizer = HuggingFaceTokenizer(folder)
    pad = token_id(tokenizer, "<|image_pad|>")
    grid = PatchGrid(patch_size=4, merge_size=2, temporal_patch_size=2, image_size=0, image_token_id=pad)
    encoder = RecordEncoder(tokenizer, grid, markup="qwen2-vl", chat_format="qwen2p0")
    encoded = encode(encoder, record_of(messages=CONVERSATION), DynamicImages(block=8, **limits), grid)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    text = (
        f"{QWEN_SYSTEM}<|im_start|>user\n{image}what is this?{image}<|im_end|>\n<|im_start|>assistant\na red circle<|im_end|>\n"
        "<|im_start|>user\nand a  blue dog<|im_end|>\n<|im_start|>assistant\nit is<|im_end|>\n"
    )
    assert encoded.ids.tolist() == processor(images=IMAGES, text=text)["input_ids"][0]
    assert (encoded.ids == pad).sum() > 2 and not encoded.is_target[encoded.ids == pad].any()
    begin, stop = encoded.visuals[0]
    assert tokenizer.decode(encoded.ids[[begin, stop - 1]].tolist()) == "<|vision_start|><|vision_end|>"


@pytest.mark.parametrize("splits", [True, False])
def test_smolvlm(folder: Path, splits: bool):
    """Idefics3's processor, since SmolVLM's needs another library; their prompts are the same."""
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    sizes = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}
    images = Idefics3ImageProcessorPil(do_image_splitting=splits, **sizes)
    processor = Idefics3Processor(images, fast, image_seq_len=4)
    tokenizer = HuggingFaceTokenizer(folder)
    grid = PatchGrid(patch_size=4, merge_size=2, image_size=16, image_token_id=token_id(tokenizer, "<image>"))
    encoder = RecordEncoder(tokenizer, grid, markup="smolvlm", chat_format="smolvlm")
    policy = TiledImages(tile_size=16, longest_side=48, splits=splits)
    encoded = encode(encoder, record_of(messages=CONVERSATION), policy, grid)
    text = (
        "<|im_start|>User:<image>what is this?<image><end_of_utterance>\nAssistant: a red circle<end_of_utterance>\n"
        "User: and a  blue dog<end_of_utterance>\nAssistant: it is<end_of_utterance>\n"
    )
    assert encoded.ids.tolist() == processor(images=[IMAGES], text=[text])["input_ids"][0]


@pytest.mark.parametrize("tags", ["none", "nvlm", "internvl"])
def test_megatrons_tokenizer(folder: Path, tags: str):
    """The ids and the mask of a conversation are those of the tokenizer itself; its format and tags need no other setting."""
    base = HuggingFaceTokenizer(folder)
    special = (IMAGE, "<Image>", "</Image>", "<img>", "</img>")
    options = MultimodalOptions(prompt_format="qwen2p0", image_tag_type=tags, special_tokens=special)
    tokenizer = MultimodalTokenizer(base, options, vocabulary=vocabulary_json(base))
    grid = PatchGrid(patch_size=4, image_size=8, image_token_id=tokenizer.image_id)
    encoder = RecordEncoder(tokenizer, grid, markup="plain", chat_format=None)
    record = record_of(messages=CONVERSATION)
    encoded = encoder.encode(record, [[1], [1]], [ImageLayout(((4, 4),))] * 2)
    expected = tokenizer.encode_conversation(CONVERSATION)
    assert encoded.ids.tolist() == expected.ids
    assert encoded.is_target.tolist() == expected.is_target
    tiles = ImageLayout(((4, 4),) * 3, 1, 2)
    encoded = encoder.encode(record, [[4, 4, 4], [4]], [tiles, ImageLayout(((4, 4),))])
    assert (encoded.ids == tokenizer.image_id).sum() == 16


def test_a_tokenizer_without_the_placeholder():
    tokenizer = ByteTokenizer()
    encoder = RecordEncoder(
        tokenizer, PatchGrid(patch_size=4, image_size=8, image_token_id=300), markup="plain", chat_format=None
    )
    encoded = encode(encoder, record_of(text="a<image>é<image>"))
    assert encoded.ids.tolist() == [97, 300, 300, *"é".encode(), 300, 300, 256]
    assert encoded.is_target.tolist() == [True, False, False, True, True, False, False, True]
    assert encoded.visuals == [(1, 3), (5, 7)]


def test_image_tokens_in_a_text(tmp_path: Path):
    """They would take the places of others' features."""
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    pad = token_id(tokenizer, "<|image_pad|>")
    encoder = RecordEncoder(
        tokenizer, PatchGrid(patch_size=4, image_size=8, image_token_id=pad), markup="qwen2-vl", chat_format=None
    )
    with pytest.raises(RecordError, match="where no image is"):
        encode(encoder, record_of(text="<image> a <|image_pad|> dog"))
    assert encode(encoder, record_of(text="no image")).visuals == []


def test_another_image_token(tmp_path: Path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    wrong = PatchGrid(patch_size=4, image_size=8, image_token_id=5)
    with pytest.raises(DataError, match=r"<\|image_pad\|> has the id \d+ in .*--image-token-id is 5"):
        RecordEncoder(tokenizer, wrong, markup="qwen2-vl", chat_format=None)
    with pytest.raises(DataError, match=r"<\|image_pad\|> is 13 tokens"):
        RecordEncoder(ByteTokenizer(), wrong, markup="qwen2-vl", chat_format=None)


def test_conversations_need_a_format():
    grid = PatchGrid(patch_size=4, image_size=8, image_token_id=300)
    encoder = RecordEncoder(ByteTokenizer(), grid, markup="plain", chat_format=None)
    with pytest.raises(RecordError, match="chat_format"):
        encode(encoder, record_of(messages=CONVERSATION))
    late = [CONVERSATION[0], {"role": "system", "content": "x"}, CONVERSATION[1]]
    encoder = RecordEncoder(ByteTokenizer(), grid, markup="plain", chat_format="chatml")
    with pytest.raises(RecordError, match="system message after others"):
        encode(encoder, record_of(messages=late))
    with pytest.raises(DataError, match="names none"):
        RecordEncoder(NullTokenizer(400), grid, markup="plain", chat_format="mistral")


def test_every_format_learns_the_answers(tmp_path: Path):
    """And what ends them, so that they end."""
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    grid = PatchGrid(patch_size=4, image_size=8, image_token_id=token_id(tokenizer, "<image>"))
    for name in CHAT_FORMATS:
        encoder = RecordEncoder(tokenizer, grid, markup="plain", chat_format=name)
        text = learned(tokenizer, encode(encoder, record_of(messages=CONVERSATION)))
        assert "a red circle" in text and "it is" in text and "what" not in text and "dog" not in text, name
        assert not text.endswith("it is"), name


def test_cutting_keeps_images_together():
    grid = PatchGrid(patch_size=4, image_size=8, image_token_id=300)
    encoder = RecordEncoder(ByteTokenizer(), grid, markup="plain", chat_format=None)
    record = record_of(text="ab<image>cd<image>ef")
    encoded = encoder.encode(record, [[3], [3]], [ImageLayout(((4, 4),))] * 2)
    assert len(encoded.ids) == 13 and encoded.cut(12) is encoded
    for length in range(1, 12):
        cut = encoded.cut(length)
        assert len(cut.ids) <= length + 1
        assert np.array_equal(cut.ids, encoded.ids[: len(cut.ids)])
        assert (cut.ids == 300).sum() == 3 * len(cut.visuals) == (cut.ids[:length] == 300).sum()
    assert [len(encoded.cut(length).ids) for length in (3, 5, 9, 10, 11)] == [2, 6, 7, 11, 12]
    assert len(encoded.without_visuals_from(1).ids) == 7
