"""Rules about models that read images: their sizes, and what goes with image tokens and coordinates."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.objective_and_dataset_names import IMAGE_TEXT_DATASET
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.vision_language import PATCH_BLOCKS, VISION_LANGUAGE_MODEL, reads_images
from petatron.config.setting_bounds_and_conflicts import divisors, multiples_near

_MODEL = "--model-type"
_TP = "--tensor-model-parallel-size"
_HEADS, _SIZE = "--vision-num-attention-heads", "--vision-hidden-size"


def check_vision_language(config: RawRunConfig) -> Iterator[Problem]:
    model = config.model
    if model.mrope_section:
        yield from _coordinates(model)
    if not reads_images(config):
        if config.data.dataset_type == IMAGE_TEXT_DATASET:
            rule = f"has images, which {_MODEL} {model.model_type} does not read"
            yield Problem("--dataset-type", IMAGE_TEXT_DATASET, rule, f"Use {_MODEL} {VISION_LANGUAGE_MODEL}.")
        return
    missing = [flag for flag, value in _required(model).items() if value is None]
    for flag in missing:
        yield Problem(flag, "", f"is not set, and {_MODEL} is {VISION_LANGUAGE_MODEL}", "Give it.")
    yield from _patches(model)
    yield from _shares(config)
    for flag, is_set in _not_beside_images(model).items():
        if is_set:
            rule = f"reads images, and there is no {flag} beside them"
            yield Problem(_MODEL, VISION_LANGUAGE_MODEL, rule, "Leave one of them out.")


def _required(model: RawModelConfig) -> dict[str, int | None]:
    return {
        "--vision-num-layers": model.vision_num_layers,
        _SIZE: model.vision_hidden_size,
        _HEADS: model.vision_num_attention_heads,
        "--image-token-id": model.image_token_id,
    }


def _patches(model: RawModelConfig) -> Iterator[Problem]:
    patch, merge = model.vision_patch_size, model.vision_merge_size
    if min(patch, merge) < 1:
        return
    block, image = patch * merge, model.vision_image_size
    if model.vision_position_embedding_type == "learned" and image % block:
        rule = f"is not a multiple of --vision-patch-size {patch} x --vision-merge-size {merge} = {block}"
        yield Problem("--vision-image-size", str(image), rule, f"Nearest: {multiples_near(image, block)}.")
    window = model.vision_window_size
    if window is not None and window > 0 and window % block:
        rule = f"is not a multiple of --vision-patch-size {patch} x --vision-merge-size {merge} = {block}"
        yield Problem("--vision-window-size", str(window), rule, f"Nearest: {multiples_near(window, block)}.")
    if model.vision_class_token and merge > 1:
        rule = "is one patch before those of an image, which are merged in blocks"
        yield Problem("--vision-class-token", "", rule, "Use --vision-merge-size 1, or leave it out.")
    layers = model.vision_num_layers or 0
    beyond = [index for index in model.vision_full_attention_layers if index >= layers]
    if beyond and layers:
        rule = f"names a layer beyond the {layers} of --vision-num-layers, which count from 0"
        yield Problem("--vision-full-attention-layers", str(beyond[0]), rule, f"The last is {layers - 1}.")
    for flag, numbers in (
        ("--vision-pixel-mean", model.vision_pixel_mean),
        ("--vision-pixel-std", model.vision_pixel_std),
    ):
        if len(numbers) != 3:
            text = " ".join(f"{number:g}" for number in numbers)
            yield Problem(flag, text, "is not a number for each of red, green and blue", "Give three.")
    if len(model.vision_pixel_std) == 3 and min(model.vision_pixel_std) <= 0:
        text = " ".join(f"{number:g}" for number in model.vision_pixel_std)
        yield Problem("--vision-pixel-std", text, "is not above 0, and pixels are divided by it", "Correct it.")
    if model.vision_position_embedding_type == "learned" and model.max_patches is not None:
        count = (image // patch) ** 2 + model.vision_class_token
        if 0 < model.max_patches < count:
            rule = f"is below {count}, the patches of one image of --vision-image-size {image}"
            yield Problem("--max-patches", str(model.max_patches), rule, f"Use {count} or more.")
    if model.projector_num_layers > 2:
        rule = "is above 2, the most that a projector has"
        yield Problem("--projector-num-layers", str(model.projector_num_layers), rule, "Use 1 or 2.")
    vocabulary, token = model.vocab_size, model.image_token_id
    if vocabulary is not None and token is not None and token >= vocabulary:
        rule = f"is not among the {vocabulary} ids of --vocab-size"
        yield Problem("--image-token-id", str(token), rule, f"The last is {vocabulary - 1}.")


def _shares(config: RawRunConfig) -> Iterator[Problem]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    width, heads, inner = model.vision_hidden_size, model.vision_num_attention_heads, model.vision_ffn_hidden_size
    if width is None or heads is None or min(width, heads) < 1:
        return
    if width % heads:
        yield Problem(_SIZE, str(width), f"is not a multiple of {_HEADS} {heads}", f"Use {divisors(width)} heads.")
        return
    if model.vision_position_embedding_type == "rope" and width // heads % 4:
        rule = f"gives heads of {width // heads} channels, of which rows and columns cannot rotate as many pairs each"
        yield Problem(_HEADS, str(heads), rule, "Use heads of a multiple of 4 channels.")
    if tp > 1 and heads % tp:
        yield Problem(_TP, str(tp), f"does not divide {_HEADS} {heads}", f"Use {divisors(heads)}.")
    for flag, size in (
        ("--vision-ffn-hidden-size", inner),
        ("--projector-hidden-size", model.projector_hidden_size if model.projector_num_layers == 2 else None),
    ):
        if tp > 1 and size is not None and size % tp:
            yield Problem(flag, str(size), f"is not a multiple of {_TP} {tp}", f"Nearest: {multiples_near(size, tp)}.")
    if config.parallel.sequence_parallel and PATCH_BLOCKS % tp:
        rule = f"does not divide {PATCH_BLOCKS}, and --sequence-parallel shares blocks of patches among the ranks"
        yield Problem(_TP, str(tp), rule, f"Use {divisors(PATCH_BLOCKS)}.")


def _coordinates(model: RawModelConfig) -> Iterator[Problem]:
    flag, text = "--mrope-section", " ".join(map(str, model.mrope_section))
    if model.model_type != VISION_LANGUAGE_MODEL:
        rule = f"is about the rows and columns of images, and {_MODEL} is {model.model_type}"
        yield Problem(flag, text, rule, f"Use {_MODEL} {VISION_LANGUAGE_MODEL}, or leave it out.")
    if len(model.mrope_section) != 3:
        yield Problem(flag, text, "is not a number of pairs for each of time, row and column", "Give three.")
        return
    channels = model.kv_channels or 0
    pairs = int(channels * model.rotary_percent) // 2
    if channels and sum(model.mrope_section) != pairs:
        rule = f"adds up to {sum(model.mrope_section)} pairs, and rotary positions rotate {pairs} of a head"
        yield Problem(flag, text, rule, f"Give three numbers that add up to {pairs}.")


def _not_beside_images(model: RawModelConfig) -> dict[str, bool]:
    """Returns whether what images have not been built for is set, by flag."""
    return {
        "--mtp-num-layers": bool(model.mtp_num_layers),
        "--hybrid-layer-pattern": model.hybrid_layer_pattern is not None,
        "--experimental-attention-variant lightning_attention": model.experimental_attention_variant
        == "lightning_attention",
        "--longrope-short-factor": model.longrope_short_factor is not None,
        "--position-embedding-type learned_absolute": model.position_embedding_type == "learned_absolute",
        "--position-embedding-type alibi": model.position_embedding_type == "alibi",
        "--use-mup": model.use_mup,
    }
