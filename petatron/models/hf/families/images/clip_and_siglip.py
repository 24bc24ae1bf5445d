"""The vision encoders of CLIP and SigLIP, which LLaVA and SmolVLM have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from petatron.base.errors import Problem
from petatron.config.schema.model import ModelConfig
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, ConfigWriter, Keys, Table, Translation
from petatron.models.hf.families.images.vision_table import plain_activation, square_patches, vision_sizes
from petatron.models.hf.family import ModuleMapping
from petatron.sharding.shard_spec import Shape

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5,) * 3


def clip_or_siglip(config: Translation, kinds: Mapping[str, Callable[[Translation], None]], default: str) -> None:
    """Translates the vision encoder by the function of the kind that its table names."""
    chosen: list[str] = []

    def read(content: Keys) -> Keys:
        table = content.get("vision_config")
        table = table if isinstance(table, Mapping) else {}
        chosen.append(str(table.get("model_type", default)))
        return table

    def translate(inside: Translation) -> None:
        if isinstance(inside, ConfigWriter):
            is_clip = inside.spec.config.vision_class_token
            chosen[:] = [next((kind for kind in kinds if kind.startswith("clip") is is_clip), default)]
        function = kinds.get(chosen[0])
        if function is None:
            rule = f"is not one of {', '.join(kinds)}"
            inside.problems.append(Problem("model_type", chosen[0], rule, OTHER_MODEL_FIX))
        (function or kinds[default])(inside)

    config.within("vision_config", translate, Table(read, lambda keys, spec: {"model_type": chosen[0], **keys}))


def clip(config: Translation) -> None:
    square_patches(config, image_size=224, patch_size=32)
    _encoder(config, hidden=768, inner=3072, heads=12, layers=12, epsilon=1e-5)
    plain_activation(config, "vision_activation", "hidden_act", "quick_gelu")
    config.always(
        vision_class_token=True,
        vision_patch_bias=False,
        vision_input_norm=True,
        vision_pixel_mean=CLIP_MEAN,
        vision_pixel_std=CLIP_STD,
    )


def siglip(config: Translation) -> None:
    square_patches(config, image_size=224, patch_size=16)
    _encoder(config, hidden=768, inner=3072, heads=12, layers=12, epsilon=1e-6)
    plain_activation(config, "vision_activation", "hidden_act", "gelu_pytorch_tanh")
    config.always(
        vision_class_token=False,
        vision_patch_bias=True,
        vision_input_norm=False,
        vision_pixel_mean=HALF,
        vision_pixel_std=HALF,
    )


def headless_siglip(config: Translation) -> None:
    siglip(config)
    config.convert((), None, lambda spec: {"vision_use_head": False})


def smolvlm_vision(config: Translation) -> None:
    siglip(config)
    # Other numbers than SigLIP's where a file leaves them out.
    square_patches(config, image_size=224, patch_size=32)
    _encoder(config, hidden=1152, inner=3072, heads=16, layers=12, epsilon=1e-6)


def _encoder(config: Translation, *, hidden: int, inner: int, heads: int, layers: int, epsilon: float) -> None:
    vision_sizes(
        config,
        {
            "vision_hidden_size": ("hidden_size", hidden),
            "vision_ffn_hidden_size": ("intermediate_size", inner),
            "vision_num_attention_heads": ("num_attention_heads", heads),
            "vision_num_layers": ("num_hidden_layers", layers),
            "vision_norm_epsilon": ("layer_norm_eps", epsilon),
        },
    )
    config.only(attention_dropout=0.0)
    config.always(
        vision_normalization="LayerNorm",
        vision_position_embedding_type="learned",
        vision_temporal_patch_size=1,
        vision_window_size=None,
        vision_full_attention_layers=(),
        mrope_section=(),
    )


def patch_shape(config: ModelConfig) -> Shape:
    patch = config.vision_patch_size
    return (config.vision_hidden_size or 0, 3, patch, patch)


def _class_shape(config: ModelConfig) -> Shape:
    return (config.vision_hidden_size or 0,)


def siglip_mappings(tower: str) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of CLIP's and SigLIP's encoders."""
    layer = f"{tower}.encoder.layers.*"
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
    rows = {
        "layers.*.attention_norm": f"{layer}.layer_norm1",
        **{f"layers.*.attention.{ours}": f"{layer}.self_attn.{theirs}" for ours, theirs in names.items()},
        "layers.*.mlp_norm": f"{layer}.layer_norm2",
        "layers.*.mlp.up": f"{layer}.mlp.fc1",
        "layers.*.mlp.down": f"{layer}.mlp.fc2",
    }
    return (
        ModuleMapping(("vision.patch",), f"{tower}.embeddings.patch_embedding", shape_there=patch_shape),
        ModuleMapping(("vision.position",), f"{tower}.embeddings.position_embedding"),
        ModuleMapping(
            ("vision",),
            f"{tower}.embeddings.class_embedding",
            no_weight_suffix=True,
            leaf="class_token",
            shape_there=_class_shape,
        ),
        ModuleMapping(("vision.norm",), f"{tower}.pre_layrnorm"),
        *(ModuleMapping((ours,), theirs, stack="encoder") for ours, theirs in rows.items()),
        ModuleMapping(("vision_norm",), f"{tower}.post_layernorm"),
    )
