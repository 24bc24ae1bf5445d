"""BERT and its relatives: encoders that predict masked tokens.

BERT has norms after sums, embeddings of segments, and a head on the first token; Megatron's has norms before branches and none on
embeddings. RoBERTa has no head on the first token, and its positions begin at row 2. ModernBERT has rotary positions, gated activations,
windows in two of three layers with a rope of their own, no biases, and no norm before the first attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from petatron.base.errors import Problem
from petatron.config.schema.attention_layer_freq import format_layers, window_layers
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.mlp import ActivationName
from petatron.kernels.activation import GATE_ACTIVATIONS
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import GATED, PLAIN, activation, heads, tied_embeddings
from petatron.models.hf.family import Family, ModuleMapping, TaskHeadForm
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import QKV
from petatron.models.hf.window_config_json import FULL, SLIDING
from petatron.models.model_spec import ModelSpec

_ATTENTION = "layers.*.attention"


def _layers(prefix: str, *, attention_norm: str, mlp_norm: str) -> tuple[ModuleMapping, ...]:
    layer = f"{prefix}.encoder.layer.*"
    return (
        ModuleMapping(("embedding",), f"{prefix}.embeddings.word_embeddings"),
        ModuleMapping(("position",), f"{prefix}.embeddings.position_embeddings"),
        ModuleMapping(("token_type",), f"{prefix}.embeddings.token_type_embeddings"),
        ModuleMapping((f"{_ATTENTION}_norm",), f"{layer}.{attention_norm}"),
        ModuleMapping((f"{_ATTENTION}.q",), f"{layer}.attention.self.query"),
        ModuleMapping((f"{_ATTENTION}.k",), f"{layer}.attention.self.key"),
        ModuleMapping((f"{_ATTENTION}.v",), f"{layer}.attention.self.value"),
        ModuleMapping((f"{_ATTENTION}.out",), f"{layer}.attention.output.dense"),
        ModuleMapping(("layers.*.mlp_norm",), f"{layer}.{mlp_norm}"),
        ModuleMapping(("layers.*.mlp.up",), f"{layer}.intermediate.dense"),
        ModuleMapping(("layers.*.mlp.down",), f"{layer}.output.dense"),
    )


def _prediction(dense: str, norm: str, bias: str, head: str | None = None) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of the output head; its weight is a tensor only where it is not tied."""
    return (
        ModuleMapping(("transform.dense",), dense),
        ModuleMapping(("transform.norm",), norm),
        ModuleMapping(("head",), bias, no_weight_suffix=True, leaf="bias"),
        *(() if head is None else (ModuleMapping(("head",), f"{head}.weight", no_weight_suffix=True),)),
    )


_EMBEDDING_NORM = ModuleMapping(("embedding_norm",), "bert.embeddings.LayerNorm")
_BERT_HEADS = (
    *_prediction(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
    ModuleMapping(("order_head.pooler",), "bert.pooler.dense"),
    ModuleMapping(("order_head.out",), "cls.seq_relationship"),
    ModuleMapping(("task_head.pooler",), "bert.pooler.dense"),
    ModuleMapping(("task_head.out",), "classifier"),
)
_SUMS_NORMED = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
_BERT_MAPPINGS = (*_layers("bert", **_SUMS_NORMED), _EMBEDDING_NORM, *_BERT_HEADS)
_MEGATRON_BERT_MAPPINGS = (
    *_layers("bert", attention_norm="attention.ln", mlp_norm="ln"),
    ModuleMapping(("norm",), "bert.encoder.ln"),
    *_BERT_HEADS,
)
_ROBERTA_MAPPINGS = (
    *_layers("roberta", **_SUMS_NORMED),
    ModuleMapping(("embedding_norm",), "roberta.embeddings.LayerNorm"),
    *_prediction("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    ModuleMapping(("task_head.pooler",), "classifier.dense"),
    ModuleMapping(("task_head.out",), "classifier.out_proj"),
)
_MODERN_LAYER = "model.layers.*"
_MODERN_MAPPINGS = (
    ModuleMapping(("embedding",), "model.embeddings.tok_embeddings"),
    ModuleMapping(("embedding_norm",), "model.embeddings.norm"),
    ModuleMapping((f"{_ATTENTION}_norm",), f"{_MODERN_LAYER}.attn_norm"),
    ModuleMapping(QKV, f"{_MODERN_LAYER}.attn.Wqkv"),
    ModuleMapping((f"{_ATTENTION}.out",), f"{_MODERN_LAYER}.attn.Wo"),
    ModuleMapping(("layers.*.mlp_norm",), f"{_MODERN_LAYER}.mlp_norm"),
    ModuleMapping(("layers.*.mlp.gate", "layers.*.mlp.up"), f"{_MODERN_LAYER}.mlp.Wi"),
    ModuleMapping(("layers.*.mlp.down",), f"{_MODERN_LAYER}.mlp.Wo"),
    ModuleMapping(("norm",), "model.final_norm"),
    *_prediction("head.dense", "head.norm", "decoder.bias", "decoder"),
)


def _encoder(config: Translation, *, epsilon: str, epsilon_default: float) -> None:
    """Translates what all of them have in common."""
    config.copy("norm_epsilon", epsilon, epsilon_default)
    config.copy("init_method_std", "initializer_range", 0.02)
    heads(config, divide_width=True)
    config.always(
        normalization="LayerNorm",
        qk_layernorm=False,
        apply_layernorm_1p=False,
        scale_embeddings=False,
        residual_branches="sequential",
    )


def _bert(config: Translation, *, prediction_activation: str | None = None, type_vocab_size: int = 2) -> None:
    for setting, (key, default) in {
        "num_layers": ("num_hidden_layers", 12),
        "hidden_size": ("hidden_size", 768),
        "num_attention_heads": ("num_attention_heads", 12),
        "ffn_hidden_size": ("intermediate_size", 3072),
        "vocab_size": ("vocab_size", 30522),
        "max_position_embeddings": ("max_position_embeddings", 512),
        "num_token_types": ("type_vocab_size", type_vocab_size),
    }.items():
        config.copy(setting, key, default, needed=True)
    _encoder(config, epsilon="layer_norm_eps", epsilon_default=1e-12)
    config.copy("hidden_dropout", "hidden_dropout_prob", 0.1)
    config.copy("attention_dropout", "attention_probs_dropout_prob", 0.1)
    activation(config, "hidden_act", "gelu", PLAIN)
    config.always(
        position_embedding_type="learned_absolute",
        add_bias_linear=True,
        norm_bias=True,
        prediction_bias=True,
        prediction_activation=prediction_activation,
    )
    config.only(is_decoder=False, add_cross_attention=False, tie_word_embeddings=True)
    config.always(untie_embeddings_and_output_weights=False)


def _plain_bert(config: Translation) -> None:
    _bert(config)
    config.only(position_embedding_type="absolute")
    config.always(norm_placement="post", embed_layernorm=True, bert_binary_head=True)


def _megatron_bert(config: Translation) -> None:
    _bert(config)
    config.only(position_embedding_type="absolute")
    config.always(norm_placement="pre", embed_layernorm=False, bert_binary_head=True)


def _roberta(config: Translation) -> None:
    _bert(config, prediction_activation="gelu")
    config.only(position_embedding_type="absolute")
    config.always(norm_placement="post", embed_layernorm=True, bert_binary_head=False)
    config.convert(
        ("position_offset",),
        lambda keys: ({"position_offset": _padding_id(keys) + 1}, []),
        lambda spec: {"pad_token_id": spec.config.position_offset - 1},
        pad_token_id=1,
    )
    config.expect("position_offset", "1 or more", lambda spec: spec.config.position_offset > 0)


def _padding_id(keys: Keys) -> int:
    given = keys["pad_token_id"]
    return 1 if given is None else given


def _modernbert(config: Translation) -> None:
    for setting, (key, default) in {
        "num_layers": ("num_hidden_layers", 22),
        "hidden_size": ("hidden_size", 768),
        "num_attention_heads": ("num_attention_heads", 12),
        "ffn_hidden_size": ("intermediate_size", 1152),
        "vocab_size": ("vocab_size", 50368),
        "max_position_embeddings": ("max_position_embeddings", 8192),
    }.items():
        config.copy(setting, key, default, needed=True)
    _encoder(config, epsilon="norm_eps", epsilon_default=1e-5)
    tied_embeddings(config, True)
    activation(config, "hidden_activation", "gelu", GATED)
    config.copy("norm_bias", "norm_bias", False)
    config.copy("prediction_bias", "decoder_bias", True)
    config.copy("attention_dropout", "attention_dropout", 0.0)
    _prediction_activation(config)
    _switches_of_biases(config)
    _local_layers(config)
    config.only(embedding_dropout=0.0, mlp_dropout=0.0)
    config.always(
        norm_placement="pre",
        embed_layernorm=True,
        first_attention_norm=False,
        bert_binary_head=False,
        num_token_types=0,
        hidden_dropout=0.0,
    )
    config.also(rope_theta="global_rope_theta", rope_local_base_freq="local_rope_theta")
    rope(config, by_layer_type=True, rope_theta=160000.0, rope_local_base_freq=10000.0)


def _prediction_activation(config: Translation) -> None:
    names: Mapping[str, ActivationName] = PLAIN
    written = {ours: theirs for theirs, ours in reversed(list(names.items()))}

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        name = keys["classifier_activation"]
        if name in names:
            return {"prediction_activation": names[name]}, []
        rule = "is not an activation that the model has"
        return {}, [Problem("classifier_activation", f'"{name!s:.40}"', rule, f"It has {', '.join(names)}.")]

    def write(spec: ModelSpec) -> Keys:
        model = spec.config
        name = model.prediction_activation or GATE_ACTIVATIONS.get(model.activation, model.activation)
        return {"classifier_activation": written[name]}

    config.convert(("prediction_activation",), read, write, classifier_activation="gelu")


def _switches_of_biases(config: Translation) -> None:
    """Translates three switches, which are one of ours."""
    names = ("attention_bias", "mlp_bias", "classifier_bias")

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        values = {name: bool(keys[name]) for name in names}
        if len(set(values.values())) == 1:
            return {"add_bias_linear": values["mlp_bias"]}, []
        rule = "differs from mlp_bias or classifier_bias, and the model has one switch for all three"
        return {}, [Problem("attention_bias", str(values["attention_bias"]), rule, OTHER_MODEL_FIX)]

    config.convert(
        ("add_bias_linear",),
        read,
        lambda spec: dict.fromkeys(names, spec.config.add_bias_linear),
        **dict.fromkeys(names, False),
    )


def _local_layers(config: Translation) -> None:
    """Translates windows: `local_attention` counts the tokens on both sides of a token; every third layer has none."""

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        layers, every = config.setting("num_layers"), keys.get("global_attn_every_n_layers", 3)
        kinds = keys["layer_types"] or [SLIDING if layer % every else FULL for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or {str(kind) for kind in kinds} - {FULL, SLIDING}:
            rule = f"does not name each of the {layers} layers {FULL} or {SLIDING}"
            return {}, [Problem("layer_types", "", rule, OWN_FOLDER_FIX)]
        half, named = keys["local_attention"] // 2, keys["sliding_window"]  # transformers reads either
        if named is not None and named != half:
            rule = f"is not {half}, half of local_attention"
            return {}, [Problem("sliding_window", f"{named!r:.40}", rule, "Leave it out.")]
        slides = [kind == SLIDING for kind in kinds]
        if not any(slides):
            return {"window_size": None}, []
        pattern = {} if all(slides) else {"window_attn_skip_freq": format_layers(slides)}
        return {"window_size": half + 1, **pattern}, []

    def write(spec: ModelSpec) -> Keys:
        window, kinds = spec.config.window_size, [SLIDING if here else FULL for here in window_layers(spec.config)]
        return {"local_attention": 128 if window is None else 2 * (window - 1), "layer_types": kinds}

    config.convert(
        ("window_size", "window_attn_skip_freq"),
        read,
        write,
        layer_types=None,
        local_attention=128,
        sliding_window=None,
        global_attn_every_n_layers=3,
    )


def _family(
    name: str, architecture: str, translate: Callable[[Translation], None], mappings: tuple[ModuleMapping, ...],
    *, models: str, what_differs: str, prefix: str = "bert.", classifier: str | None = None,
) -> Family:  # fmt: skip
    return Family(
        name=name,
        architecture=architecture,
        models=models,
        what_differs=what_differs,
        translate=translate,
        mappings=mappings,
        prefix=prefix,
        ignored_tensors=("*.position_ids", "*.token_type_ids", "*.predictions.decoder.*", "lm_head.decoder.*"),
        model_type=MASKED_LANGUAGE_MODEL,
        task_head=None if classifier is None else TaskHeadForm(classifier, "first", pooler=True, bias=True),
    )


BERT = _family(
    "bert",
    "BertForPreTraining",
    _plain_bert,
    _BERT_MAPPINGS,
    models="BERT",
    what_differs="an encoder: norms after sums, segments, a head for masked tokens and one for the order of segments",
    classifier="BertForSequenceClassification",
)
MEGATRON_BERT = _family(
    "megatron-bert",
    "MegatronBertForPreTraining",
    _megatron_bert,
    _MEGATRON_BERT_MAPPINGS,
    models="Megatron-BERT",
    what_differs="a BERT with norms before branches",
    classifier="MegatronBertForSequenceClassification",
)
ROBERTA = _family(
    "roberta",
    "RobertaForMaskedLM",
    _roberta,
    _ROBERTA_MAPPINGS,
    models="RoBERTa, XLM-RoBERTa",
    what_differs="a BERT without the head for the order of segments, whose positions begin at row 2",
    prefix="roberta.",
    classifier="RobertaForSequenceClassification",
)
MODERNBERT = _family(
    "modernbert",
    "ModernBertForMaskedLM",
    _modernbert,
    _MODERN_MAPPINGS,
    models="ModernBERT",
    what_differs="an encoder with rotary positions, gated activations, windows in two of three layers, no biases",
    prefix="model.",
)
