"""Translates between Megatron's arguments and our configuration, and lists everything that cannot be expressed.

A Megatron checkpoint stores the command line it was trained with. Most model arguments have our names; the others are translated
here in both directions. Arguments that change the mathematics and that we do not have are refused, all at once.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.megatron.layer_kind_arguments import (
    hybrid_arguments,
    hybrid_values,
    latent_attention_arguments,
    latent_attention_values,
    prediction_arguments,
    prediction_values,
    sparse_attention_arguments,
    sparse_attention_values,
    unsupported_kinds,
)
from petatron.checkpoint.megatron.mup_arguments import expected_multipliers, mup_arguments, mup_values, unlike_mup
from petatron.checkpoint.megatron.pickle_interpreter import InertObject
from petatron.config.schema.fields import FieldInfo, all_fields, fields_by_name, flag_name
from petatron.config.schema.model import ModelConfig, MoEConfig, RawModelConfig
from petatron.config.schema.model_identity import variant_defaults
from petatron.config.schema.moe_layer_freq import parse_moe_layer_freq
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.hybrid import ATTENTION
from petatron.config.schema.sections.sparse_attention import SPARSE_ATTENTION
from petatron.config.schema.sections.tokenizer_options import DEFAULT_TIKTOKEN_SIZE
from petatron.config.setting_bounds_and_conflicts import conflict_problems, number_problems
from petatron.models.hf.check_claimed_counts import MAX_EXPERTS, MAX_LAYERS
from petatron.validate.layer_kinds import check_hybrid, check_recurrent_layers
from petatron.validate.model_shape import check_model
from petatron.validate.sparse_attention import check_sparse_attention

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
# Same name, same meaning.
_MODEL_FIELDS = (
    *_REQUIRED, "ffn_hidden_size", "kv_channels", "seq_length", "max_position_embeddings", "rotary_base",
    "rotary_percent", "use_rope_scaling", "rope_scaling_factor", "normalization", "norm_epsilon", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout",
    "init_method_std", "make_vocab_size_divisible_by", "apply_layernorm_1p",
)  # fmt: skip
# Variants of layers that Megatron has an argument for; a pattern of layers is a number or a list there.
_VARIANT_FIELDS = ("window_attn_skip_freq", "no_rope_freq", "rotary_seq_len_interpolation_factor", "rotary_interleaved")
_CONVERTED_SEPARATELY = ("moe_layer_freq", "moe_router_force_load_balancing")
_MOE_FIELDS = tuple(field.name for field in dataclasses.fields(MoEConfig) if field.name not in _CONVERTED_SEPARATELY)
# Megatron hard-codes these for Llama-3 rope scaling and has no argument for them.
_LLAMA3_SCALING = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Arguments that change the function of the same weights, with the values that do not.
_UNSUPPORTED_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (),
    "attention_output_gate": (),
    "activation_func_clamp_value": (),
    "experimental_attention_variant": (SPARSE_ATTENTION,),
    "glu_linear_offset": (),
    "heterogeneous_layers_config_path": (),
    "linear_attention_freq": (),
    "qk_l2_norm": (),
    "quick_geglu": (),
    "softmax_type": ("vanilla",),  # its learned scores have no name in our maps of Megatron's weights
}
_FIX = "Such a checkpoint cannot be converted."
_SCALARS = (bool, int, float, str)
_MAX_TEXT_CHARS, _MAX_SHOWN_CHARS = 10_000, 80


def checkpoint_arguments(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns Megatron's command line as stored in a file."""
    kept = content.get("args")
    arguments = kept.fields if isinstance(kept, InertObject) else kept
    values = (
        {name: _plain_value(value) for name, value in arguments.items()}
        if isinstance(arguments, dict) and arguments
        else None
    )
    if values is None:
        raise CheckpointError(
            f"{path} has no `args`, so the model's shape is not known. Save the checkpoint with Megatron's own trainer, "
            "or put an argparse.Namespace of the model's arguments there."
        )
    if "add_bias_linear" not in values and "disable_bias_linear" in values:
        values["add_bias_linear"] = not values["disable_bias_linear"]
    return values


def _plain_value(value: Any) -> Any:
    """Returns a value that can be compared and printed: objects of a file may contain themselves, or each other a million times."""
    if isinstance(value, str) and len(value) > _MAX_TEXT_CHARS:
        return InertObject("str", ())
    if isinstance(value, list | tuple):
        flat = len(value) <= MAX_LAYERS and all(isinstance(part, _SCALARS) for part in value)
        return value if flat else InertObject(type(value).__name__, ())
    return value if value is None or isinstance(value, _SCALARS) else InertObject(type(value).__name__, ())


def config_from_arguments(
    arguments: Mapping[str, Any], vocab_size: int | None
) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
    """Returns values for ModelConfig and for MoEConfig (empty without experts), and what cannot be expressed."""
    problems = [
        Problem(flag_name(name), "", "is not in the checkpoint's arguments", "Save it with Megatron's own trainer.")
        for name in _REQUIRED
        if not is_count(arguments.get(name), 1)
    ]
    problems += [
        Problem(flag_name(name), str(arguments[name]), f"is more than any model has ({most:,})", _FIX)
        for name, most in (("num_layers", MAX_LAYERS), ("num_experts", MAX_EXPERTS))
        if isinstance(arguments.get(name), int) and arguments[name] > most
    ]
    problems += [
        Problem(flag_name(name), _short_text(arguments[name]), "makes a model that Petatron does not have", _FIX)
        for name, harmless in _UNSUPPORTED_ARGUMENTS.items()
        if arguments.get(name) not in (None, False, 0, *harmless)
    ]
    if problems:
        return {}, {}, problems
    model = {name: arguments[name] for name in _MODEL_FIELDS if arguments.get(name) is not None}
    model.setdefault("norm_epsilon", arguments.get("layernorm_epsilon") or 1e-5)
    heads = arguments["num_attention_heads"]
    grouped = bool(arguments.get("group_query_attention"))
    model |= {
        "group_query_attention": grouped,
        "num_query_groups": arguments.get("num_query_groups") or 1 if grouped else heads,
        "activation": _activation(arguments),
        "vocab_size": vocab_size or _vocab_size(arguments),
    }
    model.setdefault("kv_channels", arguments["hidden_size"] // heads)
    model.setdefault("ffn_hidden_size", 4 * arguments["hidden_size"])
    model.setdefault("max_position_embeddings", arguments.get("seq_length"))
    model.setdefault("seq_length", model["max_position_embeddings"])
    latent = latent_attention_values(arguments, problems)
    model |= latent or _position_embedding(arguments, problems)
    model |= sparse_attention_values(arguments, problems)
    model |= _window(arguments, problems) | _variants(arguments)
    model |= prediction_values(arguments) | hybrid_values(arguments, problems)
    model |= mup_values(arguments, model, _has_scores(model), problems)
    if model["max_position_embeddings"] is None:
        rule = "is not in the checkpoint's arguments, and neither is --seq-length"
        problems.append(Problem("--max-position-embeddings", "", rule, "Save it with Megatron's own trainer."))
    if model["vocab_size"] is None:
        padded = arguments.get("padded_vocab_size")
        rule = f"is not in the checkpoint's arguments; its embedding is padded to {padded} rows"
        fix = "Convert it with petatron checkpoint convert --vocab-size N, the number of token ids of its tokenizer."
        problems.append(Problem("--vocab-size", "", rule, fix))
    moe = _moe_values(arguments, model, problems)
    model, moe = parse_values(model, problems, _FIX), parse_values(moe, problems, _FIX)
    if not problems:
        run = RawRunConfig(model=RawModelConfig(**model), moe=MoEConfig(**moe))
        alone = RawRunConfig(model=run.model)
        problems += [*number_problems(alone), *conflict_problems(alone), *check_model(alone)]
        problems += [*check_hybrid(run), *check_recurrent_layers(run), *check_sparse_attention(run)]
    return model, moe, problems


def _has_scores(model: Mapping[str, Any]) -> bool:
    """Whether some layer has attention whose factor on scores is a setting, which that of latent attention is not."""
    return not model.get("multi_latent_attention") and ATTENTION in (model.get("hybrid_layer_pattern") or ATTENTION)


def parse_values(values: Mapping[str, Any], problems: list[Problem], fix: str) -> dict[str, Any]:
    """Converts values to the schema's types: a checkpoint may have an integer for a float, or anything."""
    typed: dict[str, Any] = {}
    for name, value in values.items():
        field = fields_by_name()[name]
        try:
            if field.is_list:
                typed[name] = [field.parse(str(part)) for part in value]
            else:
                typed[name] = None if value is None else field.parse(str(value))
        except (TypeError, ValueError) as error:
            problems.append(Problem(flag_name(name), _short_text(value), str(error), fix))
    return typed


def _short_text(value: Any) -> str:
    return "" if value is True else str(value)[:_MAX_SHOWN_CHARS]


def _vocab_size(arguments: Mapping[str, Any]) -> int | None:
    """Megatron's null tokenizer has one id more than its argument, the end of a document, up to version 0.16, and none more since.

    The embedding tells which, unless its padding has room for both. A tokenizer of tiktoken has a size of its own by default.
    """
    size, padded = arguments.get("vocab_size"), arguments.get("padded_vocab_size")
    if not size and arguments.get("tokenizer_type") == "TikTokenizer":
        return DEFAULT_TIKTOKEN_SIZE
    if not size or arguments.get("tokenizer_type") != "NullTokenizer" or size == padded:
        return size
    return size + 1


def tokenizer_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer's type and files, if it is of a kind of ours that says what ids mean."""
    fields = [info for info in all_fields() if info.section == "tokenizer" and "one start" not in info.marks]
    values: dict[str, Any] = {}
    for info in fields:
        value = arguments.get(info.name)
        value = tuple(value) if info.is_list and isinstance(value, list) else value
        if value is not None and _fits(info, value):
            values[info.name] = value
    files = [name for name in ("tokenizer_model", "vocab_file", "merge_file") if name in values]
    kind = values.get("tokenizer_type")
    return values if kind is not None and kind != "NullTokenizer" and files else {}


def _fits(info: FieldInfo, value: Any) -> bool:
    """Whether a value of a file is of the type of a setting."""
    if info.is_list:
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    if info.kind == "choice":
        return value in info.choices
    return type(value) is {"bool": bool, "int": int}.get(info.kind, str)


def _activation(arguments: Mapping[str, Any]) -> str:
    """Megatron's fused GELU, its default where there are biases, is the tanh approximation."""
    if arguments.get("swiglu"):
        return "swiglu"
    if arguments.get("squared_relu"):
        return "squared_relu"
    fused = arguments.get("bias_gelu_fusion", True) and arguments.get("add_bias_linear", True)
    return "gelu_tanh" if fused or arguments.get("openai_gelu") else "gelu"


def _position_embedding(arguments: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    kind = arguments.get("position_embedding_type") or "learned_absolute"
    if arguments.get("use_rotary_position_embeddings"):
        kind = "rope"
    elif kind == "learned_absolute" and arguments.get("add_position_embedding", True) is False:
        kind = "none"
    if kind == "yarn":
        problems.append(Problem("--position-embedding-type", "yarn", "cannot be converted", _FIX))
    return {"position_embedding_type": kind, **(_LLAMA3_SCALING if arguments.get("use_rope_scaling") else {})}


def _window(arguments: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Megatron counts the tokens before and after; ours counts those before and the token itself."""
    window = arguments.get("window_size")
    if window is None:
        return {}
    if isinstance(window, Sequence) and len(window) == 2 and window[1] in (0, -1):
        return {"window_size": int(window[0]) + 1} if int(window[0]) >= 0 else {}
    problems.append(Problem("--window-size", _short_text(window), "is no window over the past", _FIX))
    return {}


def _variants(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variants of layers; Megatron ignores a window pattern without a window, and interpolates by 1 where it does not."""
    values = {name: arguments.get(name) for name in _VARIANT_FIELDS}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    if arguments.get("window_size") is None:
        values["window_attn_skip_freq"] = None
    if values["rotary_seq_len_interpolation_factor"] == 1:
        values["rotary_seq_len_interpolation_factor"] = None
    return {name: value for name, value in values.items() if value}


def _moe_values(arguments: Mapping[str, Any], model: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    if not arguments.get("num_experts"):
        return {}
    moe = {name: arguments[name] for name in _MOE_FIELDS if arguments.get(name) is not None}
    frequency = arguments.get("moe_layer_freq", 1)
    moe["moe_layer_freq"] = str(list(frequency) if isinstance(frequency, list | tuple) else frequency)
    moe.setdefault("moe_ffn_hidden_size", model["ffn_hidden_size"])
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = moe.get(name)
        if isinstance(value, list | tuple):
            if len(value) == 1:
                moe[name] = value[0]
            else:
                problems.append(
                    Problem(flag_name(name), _short_text(value), "is more than one value", "Train on with one of them.")
                )
    if moe.get("moe_token_dispatcher_type") == "flex":
        moe["moe_token_dispatcher_type"] = "alltoall"
    return moe


def arguments_from_config(
    model: ModelConfig, moe: MoEConfig | None, *, tp: int, pp: int, ep: int, padded_vocab_size: int, iteration: int
) -> Namespace:
    """Returns the arguments that Megatron reads from a checkpoint; `ConfigError` for what it has no argument for."""
    if problems := unsupported_by_megatron(model):
        raise ConfigError(problems)
    rotary = model.position_embedding_type == "rope"
    values: dict[str, Any] = {name: getattr(model, name) for name in _MODEL_FIELDS}
    values |= {name: _megatron_variant(getattr(model, name)) for name in _VARIANT_FIELDS}
    values |= {
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "position_embedding_type": model.position_embedding_type,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": rotary,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared_relu",
        "openai_gelu": model.activation == "gelu_tanh",
        "bias_gelu_fusion": model.activation == "gelu_tanh" and model.add_bias_linear,
        "window_size": None if model.window_size is None else (model.window_size - 1, 0),
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
        "context_parallel_size": 1,
        "apply_layernorm_1p": model.apply_layernorm_1p,
        "apply_query_key_layer_scaling": False,
        "transformer_impl": "transformer_engine",
        "use_mcore_models": True,
        "tokenizer_type": None,
        "no_save_optim": True,
        "no_save_rng": True,
        "iteration": iteration,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "num_experts": None,
        **prediction_arguments(model),
        **hybrid_arguments(model),
        **latent_attention_arguments(model),
        **mup_arguments(model),
        **sparse_attention_arguments(model),
    }
    if moe is not None and moe.num_experts is not None:
        values |= {name: getattr(moe, name) for name in _MOE_FIELDS}
        values["moe_layer_freq"] = _megatron_layer_freq(moe.moe_layer_freq)
    return Namespace(**values)


def _megatron_layer_freq(text: str) -> int | list[int]:
    pattern = parse_moe_layer_freq(text)
    return pattern if isinstance(pattern, int) else list(pattern)


def _megatron_variant(value: float | str | None) -> float | int | list[int] | None:
    return _megatron_layer_freq(value) if isinstance(value, str) else value


def _is_latent_table(model: ModelConfig, name: str) -> bool:
    """Megatron's latent attention alone may have a learned table of positions beside rotary ones."""
    return name == "learned_position_table" and model.multi_latent_attention


def _no_factor(model: ModelConfig, value: float | None) -> str:
    if not model.use_mup:
        return "has no argument in Megatron"
    return f"is not the {value or 1:g} of --use-mup, and Megatron has no argument for another"


def unsupported_by_megatron(model: ModelConfig) -> list[Problem]:
    """Returns the settings of a model that Megatron has no argument for."""
    expected, unlike = expected_multipliers(model), unlike_mup(model)
    expressible = {*_VARIANT_FIELDS, *expected, *sparse_attention_arguments(model)}
    problems = [
        Problem(flag_name(name), str(getattr(model, name)), "has no argument in Megatron", _FIX)
        for name, default in variant_defaults().items()
        if name not in expressible and getattr(model, name) != default and not _is_latent_table(model, name)
    ]
    problems += [
        Problem(flag_name(name), f"{getattr(model, name):g}", _no_factor(model, value), _FIX)
        for name, value in expected.items()
        if name in unlike
    ]
    if model.activation not in ("swiglu", "squared_relu", "gelu", "gelu_tanh"):
        problems.append(Problem("--activation", model.activation, "has no argument in Megatron", _FIX))
    if model.scale_embeddings:
        problems.append(Problem("--scale-embeddings", "", "has no argument in Megatron", _FIX))
    if model.position_embedding_type == "yarn" and not model.multi_latent_attention:
        problems.append(Problem("--position-embedding-type", "yarn", "cannot be converted", _FIX))
    problems += unsupported_kinds(model)
    if model.use_rope_scaling:
        problems += [
            Problem(flag_name(name), f"{getattr(model, name):g}", f"is fixed to {value:g} in Megatron", _FIX)
            for name, value in _LLAMA3_SCALING.items()
            if getattr(model, name) != value
        ]
    return problems
