"""Rules about encoder-decoder models: their layers, and what cross-attention and biases of relative positions go with."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.objective_and_dataset_names import NEXT_TOKEN
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.encoder_decoder import (
    ENCODER_DECODER_MODEL,
    RELATIVE_POSITIONS,
    is_encoder_decoder,
)

_MODEL = "--model-type"
_POSITIONS = "--position-embedding-type"


def check_encoder_decoder(config: RawRunConfig) -> Iterator[Problem]:
    model = config.model
    if model.position_embedding_type == RELATIVE_POSITIONS:
        yield from _relative_positions(model)
    if not is_encoder_decoder(config):
        return
    yield from _layers(model)
    for flag, is_set in _not_for_cross_attention(model).items():
        if is_set:
            rule = f"has cross-attention, for which there is no {flag}"
            yield Problem(_MODEL, ENCODER_DECODER_MODEL, rule, "Leave one of them out.")
    objective = config.train.objective
    if objective not in (None, NEXT_TOKEN):
        rule = f"is about text that a decoder continues, and {_MODEL} is {ENCODER_DECODER_MODEL}"
        yield Problem("--objective", str(objective), rule, "Leave one of them out.")


def _layers(model: RawModelConfig) -> Iterator[Problem]:
    encoder, decoder = model.encoder_num_layers, model.decoder_num_layers
    if encoder is None:
        rule = f"is not set, and {_MODEL} {ENCODER_DECODER_MODEL} has two stacks of layers"
        fix = "Give it, and --decoder-num-layers unless the decoder has as many; --num-layers is their sum."
        yield Problem("--encoder-num-layers", "", rule, fix)
    elif decoder is not None and min(encoder, decoder) > 0 and model.num_layers != encoder + decoder:
        rule = f"is not the {encoder} layers of the encoder and {decoder} of the decoder"
        yield Problem("--num-layers", str(model.num_layers), rule, "Leave it out: it follows from these.")


def _not_for_cross_attention(model: RawModelConfig) -> dict[str, bool]:
    """Returns whether what cross-attention or an encoder cannot have is set, by flag."""
    return {
        "--multi-latent-attention": model.multi_latent_attention,
        "--hybrid-layer-pattern": model.hybrid_layer_pattern is not None,
        "--experimental-attention-variant": model.experimental_attention_variant is not None,
        "--softmax-type": model.softmax_type != "vanilla",
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        "--attention-output-gate": model.attention_output_gate,
        "--clip-qkv": model.clip_qkv is not None,
        "--qk-l2-norm": model.qk_l2_norm,
        "--qk-layernorm-scope projection": model.qk_layernorm and model.qk_layernorm_scope == "projection",
        "--attention-temperature-scale": model.attention_temperature_scale is not None,
        "--longrope-short-factor": model.longrope_short_factor is not None,
        "--position-embedding-type alibi": model.position_embedding_type == "alibi",
        "--residual-branches": model.residual_branches != "sequential",
        "--norm-placement stream": model.norm_placement == "stream",
        "--use-mup": model.use_mup,
    }


def _relative_positions(model: RawModelConfig) -> Iterator[Problem]:
    buckets, distance = model.relative_attention_num_buckets, model.relative_attention_max_distance
    if model.model_type != ENCODER_DECODER_MODEL:
        rule = f"has a table for each stack of an encoder-decoder, and {_MODEL} is {model.model_type}"
        yield Problem(_POSITIONS, RELATIVE_POSITIONS, rule, f"Use rope, or {_MODEL} {ENCODER_DECODER_MODEL}.")
    if buckets % 2:
        rule = "is odd, and half of them are of keys after the query"
        yield Problem("--relative-attention-num-buckets", str(buckets), rule, f"Use {buckets + 1}.")
    elif distance <= buckets // 2:
        rule = f"has no distances for the wide ones of {buckets} buckets, which begin at {buckets // 2}"
        yield Problem("--relative-attention-max-distance", str(distance), rule, f"Use {buckets // 2 + 1} or more.")
