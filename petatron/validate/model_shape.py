"""Rules about the shape of the model: sizes, heads, positions, rope, MTP."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.fields import flag_name
from petatron.config.schema.model import REQUIRED_FIELDS, RawModelConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.hybrid import has_attention
from petatron.config.schema.sections.rope import ROTARY_TYPES
from petatron.config.setting_bounds_and_conflicts import above, at_least, divisors, multiples_near
from petatron.validate.layer_kinds import check_layer_variants

_LATENT = "--multi-latent-attention"


def check_model(config: RawRunConfig) -> Iterator[Problem]:
    yield from _sizes(config.model)
    yield from _heads(config.model)
    if config.model.multi_latent_attention:
        yield from _latent_attention(config.model)
    if config.model.mtp_num_layers:
        yield from _multi_token_prediction(config.model)
    yield from _positions(config.model)
    if config.model.embedding_init_method_std != config.model.init_method_std:
        yield from above("embedding_init_method_std", config.model.embedding_init_method_std, 0)
    yield from check_layer_variants(config.model)


def _sizes(model: RawModelConfig) -> Iterator[Problem]:
    for name in REQUIRED_FIELDS:
        value = getattr(model, name)
        if name == "num_attention_heads" and value == 0 and not has_attention(model):
            continue
        flag = flag_name(name)
        if value == 0:
            fix = "Give a positive number, or start from a preset such as --preset llama3-8b."
            yield Problem(flag, "", "is not set", fix)
        elif value < 0:
            yield Problem(flag, str(value), "is negative", "Give a positive number.")


def _multi_token_prediction(model: RawModelConfig) -> Iterator[Problem]:
    """Rules of `--mtp-num-layers`."""
    yield from at_least("mtp_num_layers", model.mtp_num_layers, 1)
    if model.position_embedding_type == "learned_absolute" or model.learned_position_table:
        rule = "looks up tokens ahead, for which a table of positions would end too early"
        fix = "Use --position-embedding-type rope, or none."
        yield Problem("--mtp-num-layers", str(model.mtp_num_layers), rule, fix)
    if model.model_type != "decoder":
        rule = f"is for the decoder, and --model-type is {model.model_type}"
        yield Problem("--mtp-num-layers", str(model.mtp_num_layers), rule, "Leave it out.")


def _heads(model: RawModelConfig) -> Iterator[Problem]:
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads > 0 and model.hidden_size > 0 and model.kv_channels is None:
        rule = f"is not a multiple of --num-attention-heads {heads}, and --kv-channels is not set"
        nearest = multiples_near(model.hidden_size, heads)
        yield Problem("--hidden-size", str(model.hidden_size), rule, f"Nearest: {nearest}. Or set --kv-channels.")
    if heads > 0 and groups is not None and groups > 0:
        if heads % groups:
            rule = f"does not divide --num-attention-heads {heads}"
            yield Problem("--num-query-groups", str(groups), rule, f"Use {divisors(heads)}.")
        elif groups != heads and not model.group_query_attention:
            rule = "shares key/value heads, but --group-query-attention is turned off"
            yield Problem("--num-query-groups", str(groups), rule, f"Leave one out, or use {heads}.")


def _latent_attention(model: RawModelConfig) -> Iterator[Problem]:
    """Checks the positions of `--multi-latent-attention`."""
    positions, rotary = model.position_embedding_type, model.qk_pos_emb_head_dim
    if positions not in (*ROTARY_TYPES, "none"):
        rule = f"rotates a part of each head, but --position-embedding-type is {positions}"
        yield Problem(_LATENT, "", rule, "Use --position-embedding-type rope, or yarn; or none, which rotates nothing.")
    if positions != "none" and rotary > 0 and rotary % 2:
        rule = "is odd, and rotary embedding rotates pairs"
        yield Problem("--qk-pos-emb-head-dim", str(rotary), rule, f"Nearest: {multiples_near(rotary, 2)}.")


def _positions(model: RawModelConfig) -> Iterator[Problem]:
    longest = model.max_position_embeddings
    of_decoder = model.model_type == ENCODER_DECODER_MODEL and (model.decoder_seq_length or 0) > model.seq_length
    name = "decoder_seq_length" if of_decoder else "seq_length"
    needed = (length := getattr(model, name)) + model.position_offset
    if longest is not None and 0 < longest < needed:
        offset = f" and --position-offset {model.position_offset}" if model.position_offset else ""
        rule = f"is shorter than {flag_name(name)} {length}{offset}"
        yield Problem("--max-position-embeddings", str(longest), rule, f"Use {needed} or more.")
    if model.position_embedding_type in ROTARY_TYPES:
        yield from _rotary(model)
    if model.use_rope_scaling and model.rope_low_freq_factor > model.rope_high_freq_factor:
        rule = f"is above --rope-high-freq-factor {model.rope_high_freq_factor:g}"
        yield Problem("--rope-low-freq-factor", f"{model.rope_low_freq_factor:g}", rule, "Llama-3 uses 1 and 4.")
    if model.position_embedding_type == "yarn" and model.yarn_beta_slow > model.yarn_beta_fast:
        rule = f"is above --yarn-beta-fast {model.yarn_beta_fast:g}"
        yield Problem("--yarn-beta-slow", f"{model.yarn_beta_slow:g}", rule, "The paper uses 1 and 32.")


def _rotary(model: RawModelConfig) -> Iterator[Problem]:
    percent, width = model.rotary_percent, model.kv_channels
    if not 0 < percent <= 1:
        yield Problem("--rotary-percent", f"{percent:g}", "is not in (0, 1]", "Use 1 to rotate the whole head.")
    elif model.multi_latent_attention:
        pass  # it rotates --qk-pos-emb-head-dim, whole
    elif width is not None and width > 0 and (int(width * percent) % 2 or int(width * percent) == 0):
        rule = f"rotates {int(width * percent)} of --kv-channels {width}, which is not an even number above 0"
        yield Problem("--rotary-percent", f"{percent:g}", rule, "Use an even head width, or a fraction that gives one.")
