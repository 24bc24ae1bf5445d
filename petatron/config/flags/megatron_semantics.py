"""Megatron's semantics of flags that mean something else in Petatron's own command lines: rules for `--megatron-defaults`.

Everything here was found by comparing what both programs derive from the same flags (`tests/megatron_parser`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from petatron.base.errors import Problem
from petatron.config.flags.megatron_flags import LATENT_ORIGINAL_CONTEXT, NO_GELU_FUSION
from petatron.config.flags.parsed_flags import ImpliedFlag, ParsedFlags
from petatron.config.schema.fields import FieldValue, fields_by_name
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.sparse_attention import SPARSE_ATTENTION
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.config.value_origins import Setting

_FLAGS_IGNORED_BY_MLA = (
    "--rope-scaling-factor",
    "--rotary-seq-len-interpolation-factor",
    "--use-rope-scaling",
    "--yarn-beta-fast",
    "--yarn-beta-slow",
    "--yarn-correction-range-round-to-int",
    "--no-yarn-correction-range-round-to-int",
    "--yarn-original-max-position-embeddings",
)
_LAYERS_OF_IMAGE_MODELS = {"encoder_num_layers": "vision_num_layers", "decoder_num_layers": "num_layers"}
_ENCODER_LIKE_DECODER = {
    "vision_hidden_size": "hidden_size",
    "vision_num_attention_heads": "num_attention_heads",
    "vision_ffn_hidden_size": "ffn_hidden_size",
    "vision_activation": "activation",
    "vision_normalization": "normalization",
    "vision_norm_epsilon": "norm_epsilon",
}
_CLIP: Mapping[str, FieldValue] = {
    "vision_patch_size": 16,
    "vision_class_token": True,
    "vision_input_norm": True,
    "vision_final_norm": False,
    "vision_patch_bias": False,
}
_FLAGS_IGNORED_BY_YARN = ("--rope-scaling-factor", "--rotary-percent", "--use-rope-scaling")


def apply_megatron_semantics(parsed: ParsedFlags) -> None:
    """Applies the rules that depend on the given flags alone."""
    if not parsed.megatron_defaults:
        if parsed.exact_gelu:
            parsed.implied.append(
                ImpliedFlag(NO_GELU_FUSION, "gelu is the exact one, and --activation gelu_tanh the approximation")
            )
        return
    given = {setting.path.partition(".")[2]: setting for setting in parsed.settings}
    latent, positions = given.get("multi_latent_attention"), given.get("position_embedding_type")
    _name_layers_of_image_models(parsed, given)
    if parsed.preset is None and parsed.from_folder is None and not parsed.files:
        _ignore_query_groups_without_gqa(parsed, given)
    variant, dropout = given.get("experimental_attention_variant"), given.get("attention_dropout")
    if variant is not None and variant.value == SPARSE_ATTENTION and dropout is not None and dropout.value:
        _drop(parsed, dropout, "sparse attention drops no weights, as in Megatron")
    if latent is not None and latent.value:
        _drop_flags(parsed, _FLAGS_IGNORED_BY_MLA, "latent attention does not read it, as in Megatron")
        _mla_always_uses_rope(parsed, latent, given)
    elif positions is not None and positions.value == "yarn":
        _drop_flags(parsed, _FLAGS_IGNORED_BY_YARN, "YaRN does not read it, as in Megatron")
    else:
        _drop_flags(parsed, ("--rotary-scaling-factor",), "YaRN and latent attention alone read it, as in Megatron")


def dependent_defaults(values: Mapping[str, FieldValue], *, exact_gelu: bool) -> Iterator[tuple[str, FieldValue]]:
    """Yields (path, value) of Megatron's derived defaults for unset settings: those that depend on other settings.

    Megatron's fused bias-gelu kernel computes the tanh approximation, so a model with biases has `gelu_tanh` by default. YaRN's default
    scaling factor is 1 and its original context 4,096; those of Llama-3 scaling are 8 and 8,192. Its sparse
    attention has no dropout. BERT's output head has the exact GELU before it, whatever its MLPs have, and lower-case WordPieces.
    A model of images whose encoder's layers are given has CLIP's encoder, with the sizes of its decoder.
    """
    paths = {name: info.path for name, info in fields_by_name().items()}
    activation = values[paths["activation"]]
    if values[paths["add_bias_linear"]] and not exact_gelu:
        yield paths["activation"], "gelu_tanh"
    if values[paths["experimental_attention_variant"]] == SPARSE_ATTENTION:
        yield paths["attention_dropout"], 0.0
    if values[paths["model_type"]] == MASKED_LANGUAGE_MODEL:
        if activation != "gelu_tanh" and not exact_gelu:
            yield paths["prediction_activation"], "gelu"
        if values[paths["vocab_file"]] and not values[paths["merge_file"]]:
            yield paths["tokenizer_type"], "BertWordPieceLowerCase"
    if values[paths["model_type"]] == VISION_LANGUAGE_MODEL and values[paths["vision_num_layers"]] is not None:
        for name, value in _CLIP.items():
            yield paths[name], value
        for name, of_decoder in _ENCODER_LIKE_DECODER.items():
            if values[paths[of_decoder]] is not None:
                yield paths[name], values[paths[of_decoder]]
    if values[paths["position_embedding_type"]] == "yarn":
        yield paths["rope_scaling_factor"], 1.0
        yield paths["original_max_position_embeddings"], LATENT_ORIGINAL_CONTEXT


def _name_layers_of_image_models(parsed: ParsedFlags, given: Mapping[str, Setting]) -> None:
    """Translates `--encoder-num-layers` and `--decoder-num-layers` of a model of images."""
    model_type = given.get("model_type")
    if model_type is None or model_type.value != VISION_LANGUAGE_MODEL:
        return
    for name, of_image_model in _LAYERS_OF_IMAGE_MODELS.items():
        if (layers := given.get(name)) is not None:
            parsed.settings.remove(layers)
            parsed.settings[:] = [item for item in parsed.settings if item is not given.get(of_image_model)]
            parsed.add_setting(fields_by_name()[of_image_model], layers.value, layers.origin.detail)


def _ignore_query_groups_without_gqa(parsed: ParsedFlags, given: Mapping[str, Setting]) -> None:
    """Drops `--num-query-groups` without `--group-query-attention`, which Megatron needs to read it: the model has multi-head attention."""
    groups, switch = given.get("num_query_groups"), given.get("group_query_attention")
    if groups is not None and (switch is None or not switch.value):
        _drop(parsed, groups, "it is for --group-query-attention")


def _mla_always_uses_rope(parsed: ParsedFlags, latent: Setting, given: Mapping[str, Setting]) -> None:
    """Sets rope for latent attention without it: Megatron's MLA rotates a part of each head whatever `--position-embedding-type` is.

    A learned position table is used in addition. Settings of this rotation that Petatron does not have are problems.
    """
    info, share, factor = (
        fields_by_name()["position_embedding_type"],
        given.get("rotary_percent"),
        given.get("rope_scaling_factor"),
    )
    positions = given.get("position_embedding_type")
    scales = factor is not None and factor.value != 1 and factor.origin.detail not in _FLAGS_IGNORED_BY_MLA
    if positions is not None and positions.value == "none":
        parsed.add_setting(info, "rope", latent.origin.detail)
        parsed.notices.append(
            f"{latent.origin.detail} rotates a part of each head beside {info.flag} none, as in Megatron"
        )
    if share is not None and share.value != 1.0 and parsed.rope_type == "rope":
        rule = "would rotate less than the rotary part of latent attention's heads, which is not in this version"
        parsed.problems.append(Problem(share.origin.detail, f"{share.value:g}", rule, "Leave it out."))
    temperature = given.get("yarn_mscale_all_dim")
    if parsed.rope_type == "rope" and scales and temperature is not None and temperature.value:
        rule = "would scale attention's scores without YaRN, which is not in this version"
        parsed.problems.append(Problem(temperature.origin.detail, f"{temperature.value:g}", rule, "Leave it out."))


def _drop_flags(parsed: ParsedFlags, flags: Collection[str], reason: str) -> None:
    for setting in list(parsed.settings):
        if setting.origin.detail.replace("_", "-") in flags:
            _drop(parsed, setting, reason)


def _drop(parsed: ParsedFlags, setting: Setting, reason: str) -> None:
    parsed.settings.remove(setting)
    value = "" if isinstance(setting.value, bool) else f" {setting.value}"
    parsed.implied.append(ImpliedFlag(f"{setting.origin.detail}{value}", reason))
