"""Random models of transformers that read images, with unusual values, and what they compute of texts with images of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from petatron.config.schema.model import ModelConfig
from petatron.models.batch import Batch
from petatron.models.hf import from_hf_config
from petatron.models.image_text_batch import make_image_text_batch

VOCABULARY, IMAGE_TOKEN, LENGTH = 131, 130, 40
_TEXT: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.1,
    "max_position_embeddings": 64,
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 2,
    "image_size": 6,
    "initializer_range": 0.1,
}


def _llava(vision: Any, text: Any, **config: Any) -> Any:
    config = {"image_token_index": IMAGE_TOKEN, **config}
    made = transformers.LlavaConfig(vision_config=vision, text_config=text, **config)
    return transformers.LlavaForConditionalGeneration(made)


def _smolvlm(**config: Any) -> Any:
    text = {"model_type": "llama", **_TEXT, **config.pop("text", {})}
    made = transformers.SmolVLMConfig(text_config=text, image_token_id=IMAGE_TOKEN, **config)
    return transformers.SmolVLMForConditionalGeneration(made)


def _qwen(vision: Mapping[str, Any], **text: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
    sizes = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 2, "window_size": 8}
    ids = {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 129,
        "vision_start_token_id": 128,
        "vision_end_token_id": 127,
    }
    made = transformers.Qwen2_5_VLConfig(
        vision_config={
            **sizes,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
            **vision,
        },
        text_config={**_TEXT, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None, **text},
        **ids,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(made)


def _clip(**config: Any) -> Any:
    return transformers.CLIPVisionConfig(**{**_VISION, **config})


def _siglip(**config: Any) -> Any:
    return transformers.SiglipVisionConfig(**{**_VISION, **config})


MODELS: Mapping[str, Callable[[], Any]] = {
    "llava": lambda: _llava(_clip(), transformers.LlamaConfig(**_TEXT)),
    "llava-odd": lambda: _llava(
        _clip(image_size=10, layer_norm_eps=1e-3, hidden_act="gelu"),
        transformers.Qwen2Config(**_TEXT, rms_norm_eps=1e-3, tie_word_embeddings=True),
        vision_feature_layer=1,
        multimodal_projector_bias=False,
        projector_hidden_act="silu",
    ),
    "llava-siglip": lambda: _llava(
        _siglip(vision_use_head=False),
        transformers.MistralConfig(**_TEXT, head_dim=12, sliding_window=9),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    ),
    "smolvlm": lambda: _smolvlm(vision_config={**_VISION, "image_size": 8}, scale_factor=2),
    "smolvlm-odd": lambda: _smolvlm(
        vision_config={**_VISION, "layer_norm_eps": 1e-3, "hidden_act": "relu"},
        scale_factor=3,
        text={"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        tie_word_embeddings=True,
    ),
    "qwen2.5-vl": lambda: _qwen({}),
    "qwen2.5-vl-odd": lambda: _qwen(
        {
            "window_size": 12,
            "spatial_merge_size": 3,
            "fullatt_block_indexes": [0, 2],
            "temporal_patch_size": 1,
            "hidden_act": "gelu",
        },
        rms_norm_eps=1e-3,
    ),
}


@dataclass(frozen=True, slots=True)
class ImageTextTruth:
    """A model of transformers, a batch, its logits, the mean loss of the tokens that count, and the gradients of that."""

    model: Any
    batch: Batch
    logits: Tensor
    loss: float
    grads: Mapping[str, Tensor]


def settings(model: Any) -> ModelConfig:
    """The settings of a model, as its config.json gives them."""
    values, _ = from_hf_config(model.config.to_dict() | {"model_type": model.config.model_type})
    return ModelConfig(**values)


def samples(config: ModelConfig, grids: Sequence[Sequence[tuple[int, int, int]]]) -> list[dict[str, NDArray[Any]]]:
    """Texts with images of these grids at some places."""
    random, made = np.random.default_rng(7), []
    width = 3 * config.vision_temporal_patch_size * config.vision_patch_size**2
    for images in grids:
        text = random.integers(0, 120, LENGTH + 1)
        at = 2
        for grid in images:
            count = int(np.prod(grid)) // config.vision_merge_size**2
            text[at : at + count] = IMAGE_TOKEN
            at += count + 1 + int(random.integers(0, 3))  # transformers takes neighbors for one image
        total = sum(int(np.prod(grid)) for grid in images)
        made.append(
            {
                "tokens": text,
                "loss_mask": (text != IMAGE_TOKEN).astype(np.float32),
                "patches": random.integers(0, 256, (total, width), dtype=np.uint8),
                "grids": np.array(images).reshape(-1, 3),
            }
        )
    return made


def grids_of(config: ModelConfig) -> list[list[tuple[int, int, int]]]:
    if config.vision_position_embedding_type == "learned":
        side = config.vision_image_size // config.vision_patch_size
        return [[(1, side, side)], [(1, side, side)]]
    merge = config.vision_merge_size
    return [[(1, 3 * merge, 5 * merge), (1, merge, 2 * merge)], [(1, 4 * merge, 2 * merge)]]


def inputs_of(model: Any, config: ModelConfig, made: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, Any]:
    """What transformers takes of the same samples: pixels as its processors make them."""
    mean, std = (torch.tensor(x).view(-1, 1) for x in (config.vision_pixel_mean, config.vision_pixel_std))
    pixels = torch.cat([torch.from_numpy(sample["patches"]) for sample in made]).float()
    normal = ((pixels.unflatten(-1, (3, -1)) / 255 - mean) / std).flatten(-2)
    ids = torch.from_numpy(np.stack([sample["tokens"][:-1] for sample in made]))
    if "qwen" in model.config.model_type:
        grids = torch.from_numpy(np.concatenate([sample["grids"] for sample in made]))
        kinds = (ids == IMAGE_TOKEN).int()
        return {"input_ids": ids, "pixel_values": normal, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    side, patch, merge = (
        config.vision_image_size // config.vision_patch_size,
        config.vision_patch_size,
        config.vision_merge_size,
    )
    blocks = normal.view(len(made), side // merge, side // merge, merge, merge, 3, patch, patch)
    images = blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(len(made), 3, side * patch, side * patch)
    return {"input_ids": ids, "pixel_values": images if model.config.model_type == "llava" else images.unsqueeze(1)}


def with_random_vectors(model: Any) -> Any:
    """transformers begins with zero biases and equal norms, which would hide some."""
    for parameter in model.parameters():
        if parameter.dim() == 1 and parameter.data.min() > 0.9:
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data, std=0.1)
    return model


@cache
def truth(name: str) -> ImageTextTruth:
    torch.manual_seed(3)
    model = with_random_vectors(MODELS[name]())
    model.eval()
    config = settings(model)
    made = samples(config, grids_of(config))
    logits = model(**inputs_of(model, config, made)).logits
    batch = make_image_text_batch(made, config)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    loss = (losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
    loss.backward()
    grads = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    return ImageTextTruth(model, batch, logits.detach(), loss.item(), grads)


def saved(name: str, path: Path) -> Path:
    truth(name).model.save_pretrained(path)
    return path
