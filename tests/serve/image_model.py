"""Tiny models that read images, as folders: weights, a tokenizer with a chat template, and the settings of an image processor."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from petatron.data.tokenizer import HuggingFaceTokenizer
from tests.unit.data.image_text.small_tokenizer import token_id, write_tokenizer
from tests.unit.data.images.image_files import encoded, noise

VOCABULARY = 400
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'image' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
}
CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 8},
    "crop_size": {"height": 8, "width": 8},
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 64,
    "max_pixels": 400,
    "patch_size": 2,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "resample": 3,
}


def write_llava(folder: Path, *, template: str | None = LLAVA_TEMPLATE) -> Path:
    tokenizer = _tokenizer(folder, template)
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, patch_size=2, image_size=8, initializer_range=0.3),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=token_id(tokenizer, "<image>"),
    )
    return _save(transformers.LlavaForConditionalGeneration, config, folder, CLIP_PROCESSOR)


def write_qwen(folder: Path) -> Path:
    tokenizer = _tokenizer(folder, QWEN_TEMPLATE)
    sizes = {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 2, "window_size": 8}
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 2, 1]}
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={**sizes, "out_hidden_size": 32, "fullatt_block_indexes": [1], "initializer_range": 0.3},
        text_config={**_TEXT, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None},
        **{f"{name}_token_id": token_id(tokenizer, token) for name, token in names.items()},
    )
    return _save(transformers.Qwen2_5_VLForConditionalGeneration, config, folder, QWEN_PROCESSOR)


def _tokenizer(folder: Path, template: str | None) -> HuggingFaceTokenizer:
    write_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return HuggingFaceTokenizer(folder)


def _save(kind: Any, config: Any, folder: Path, processor: dict[str, Any]) -> Path:
    torch.manual_seed(5)
    kind(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def png(seed: int, *, width: int = 20, height: int = 12) -> bytes:
    return encoded(Image.fromarray(noise(width, height, seed=seed)), "PNG")


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))
