"""Applies rules about combinations of flags: which of two wins, which contradict each other, which only work together."""

from __future__ import annotations

from dataclasses import replace

from petatron.base.errors import Problem
from petatron.config.flags import megatron_flags as spellings
from petatron.config.flags.megatron_semantics import apply_megatron_semantics
from petatron.config.flags.parsed_flags import ImpliedFlag, ParsedFlags
from petatron.config.schema.fields import fields_by_name, fields_by_path
from petatron.config.schema.hybrid_mtp_pattern import depth_problems, split_depths
from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.config.schema.sections.hybrid import STAGE_BOUNDARY
from petatron.config.value_origins import Setting

_MEGATRON_FSDP = ("--use-megatron-fsdp", "--use-megatron-fsdp-v2")
_FSDP_GRADS, _EXPORTED_L2_NORM = "--megatron-fsdp-main-grads-dtype", "--export-qk-l2-norm"


def apply_combined_rules(parsed: ParsedFlags) -> None:
    """Applies the rules to all settings of a command line."""
    _drop_unusable_overlap(parsed)
    _drop_overridden_shorthands(parsed)
    _check_contradictions(parsed)
    apply_megatron_semantics(parsed)
    _apply_latent_rotation(parsed)
    _drop_replaced_norm(parsed)
    _split_hybrid_pattern(parsed)
    _keep_offloaded_attention(parsed)
    _accumulate_fsdp_gradients_in_fp32(parsed)


def _drop_overridden_shorthands(parsed: ParsedFlags) -> None:
    """`--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp`: the field's own flag wins in either order."""

    def is_overridable(setting: Setting) -> bool:
        shorthand = spellings.SHORTHANDS.get(setting.origin.detail.replace("_", "-"))
        return shorthand is not None and shorthand.is_overridable

    named = {setting.path for setting in parsed.settings if not is_overridable(setting)}
    parsed.settings = [
        setting for setting in parsed.settings if not (is_overridable(setting) and setting.path in named)
    ]


def _apply_latent_rotation(parsed: ParsedFlags) -> None:
    """Latent attention with a scaling factor has YaRN, as in Megatron, unless `--rope-type` says otherwise."""
    given = {setting.path.partition(".")[2]: setting for setting in parsed.settings}
    latent, factor = given.get("multi_latent_attention"), given.get("rope_scaling_factor")
    if latent is None or not latent.value:
        if parsed.rope_type is not None:
            parsed.implied.append(
                ImpliedFlag(f"{spellings.ROPE_TYPE} {parsed.rope_type}", "it is for latent attention")
            )
        return
    positions = given.get("position_embedding_type")
    has_table = parsed.megatron_defaults if positions is None else positions.value == "learned_absolute"
    if has_table:
        _add_latent_table(parsed, latent, positions)
    if parsed.rope_type == "rope":
        parsed.add_setting(fields_by_name()["position_embedding_type"], "rope", spellings.ROPE_TYPE)
    elif factor is not None and factor.value != 1 and (positions is None or has_table or positions.value == "rope"):
        parsed.add_setting(fields_by_name()["position_embedding_type"], "yarn", factor.origin.detail)
        if "original_max_position_embeddings" not in given:
            context = fields_by_name()["original_max_position_embeddings"]
            parsed.add_setting(context, spellings.LATENT_ORIGINAL_CONTEXT, factor.origin.detail)
        parsed.notices.append(
            f"{factor.origin.detail} {factor.value:g} with {latent.origin.detail} is YaRN, as in Megatron; "
            f"{spellings.ROPE_TYPE} rope asks for plain rotary positions"
        )


def _add_latent_table(parsed: ParsedFlags, latent: Setting, positions: Setting | None) -> None:
    """Latent attention rotates whatever positions are named, and a learned table is beside that."""
    typed = (positions or latent).origin.detail
    parsed.add_setting(fields_by_name()["position_embedding_type"], "rope", typed)
    parsed.add_setting(fields_by_name()["learned_position_table"], True, typed)
    parsed.notices.append(
        f"{latent.origin.detail} rotates a part of each head beside the learned table of positions, as in Megatron; "
        "--position-embedding-type rope leaves the table out"
    )


def _drop_unusable_overlap(parsed: ParsedFlags) -> None:
    """Drops the overlap of expert all-to-alls beside Megatron's FSDP and beside offload by module: it is not implemented with these here.

    Megatron overlaps there too, and its scripts should run; no number depends on the overlap.
    """
    path, offload = (
        fields_by_name()[name].path
        for name in ("overlap_moe_expert_parallel_comm", "fine_grained_activation_offloading")
    )
    overlaps = [setting for setting in parsed.settings if setting.path == path and setting.value]
    spellings_typed = {setting.origin.detail.replace("_", "-") for setting in parsed.settings}
    beside = next((flag for flag in _MEGATRON_FSDP if flag in spellings_typed), None)
    if (
        beside is None
        and parsed.megatron_defaults
        and any(setting.path == offload and setting.value for setting in parsed.settings)
    ):
        beside = fields_by_path()[offload].flag
    if beside is None:
        return
    parsed.settings = [setting for setting in parsed.settings if setting not in overlaps]
    reason = f"with {beside} it does not overlap; no number changes"
    parsed.implied += [ImpliedFlag(setting.origin.detail, reason) for setting in overlaps]


def _keep_offloaded_attention(parsed: ParsedFlags) -> None:
    """Drops recompute of `mla_up_proj` beside `--offload-modules core_attn`: it would recompute the tensors that are offloaded."""
    name, typed = "recompute_modules", "mla_up_proj"
    last = {setting.path: index for index, setting in enumerate(parsed.settings)}
    asked, offloaded = (last.get(fields_by_name()[field].path) for field in (name, "offload_modules"))
    if (name, typed) not in parsed.renamed_values or asked is None or offloaded is None:
        return
    setting, modules = parsed.settings[asked], parsed.settings[offloaded].value
    if not isinstance(setting.value, tuple) or not isinstance(modules, tuple) or "core_attn" not in modules:
        return
    parsed.settings[asked] = replace(setting, value=tuple(value for value in setting.value if value != "attention"))
    replaced = f"{setting.origin.detail} {typed} is "
    parsed.notices = [notice for notice in parsed.notices if not notice.startswith(replaced)]
    parsed.notices.append(
        f"{setting.origin.detail} {typed} recomputes nothing: the up-projections' results are what core_attn saves, which is "
        "offloaded; no number changes"
    )


def _accumulate_fsdp_gradients_in_fp32(parsed: ParsedFlags) -> None:
    """Replaces bfloat16 by fp32 for the main gradients of FSDP: fully_shard accumulates gradients in the dtype of the master weights."""
    path, strategy = (fields_by_name()[name].path for name in ("main_grads_dtype", "data_parallel_sharding_strategy"))
    last = {setting.path: index for index, setting in enumerate(parsed.settings)}
    if path not in last or strategy not in last or parsed.settings[last[strategy]].value not in FSDP_STRATEGIES:
        return
    setting = parsed.settings[last[path]]
    if setting.value == "bf16" and setting.origin.detail.replace("_", "-") == _FSDP_GRADS:
        parsed.settings[last[path]] = replace(setting, value="fp32")
        parsed.notices.append(
            f"{setting.origin.detail} bf16 is fp32 here: fully_shard adds gradients up in the format of the master weights, "
            "which is more exact and takes 2 more bytes of a parameter that a rank owns"
        )


def _drop_replaced_norm(parsed: ParsedFlags) -> None:
    """Drops `--qk-layernorm` beside `--qk-l2-norm`: Megatron's scripts set both, and the L2 norm (without weights) replaces the other."""
    last = {setting.path: setting for setting in parsed.settings}
    plain, l2 = (last.get(fields_by_name()[name].path) for name in ("qk_layernorm", "qk_l2_norm"))
    if plain is None or l2 is None or not plain.value or not l2.value:
        return
    if parsed.megatron_defaults or l2.origin.detail.replace("_", "-") == _EXPORTED_L2_NORM:
        parsed.settings = [setting for setting in parsed.settings if setting.path != plain.path]
        parsed.implied.append(ImpliedFlag(plain.origin.detail, f"{l2.origin.detail} takes its place, as in Megatron"))


def _split_hybrid_pattern(parsed: ParsedFlags) -> None:
    """Takes Megatron's hybrid patterns apart: bars end pipeline stages, and a slash begins each depth of multi-token prediction."""
    given = {setting.path: index for index, setting in enumerate(parsed.settings)}
    info = fields_by_name()["hybrid_layer_pattern"]
    if info.path not in given:
        return
    setting = parsed.settings[given[info.path]]
    spelling, pattern = setting.origin.detail, str(setting.value)
    parts = split_depths(pattern)
    stages = parts.main.split(STAGE_BOUNDARY)
    if len(stages) > 1:
        layout = f"E{STAGE_BOUNDARY.join('t' * len(stage) for stage in stages)}L"
        field = fields_by_name()["pipeline_model_parallel_layout"]
        other = parsed.settings[given[field.path]] if field.path in given else None
        if other is not None and other.value not in (None, layout):
            rule = f"cuts the layers into stages, and so do the bars of {spelling} {pattern}"
            parsed.problems.append(
                Problem(other.origin.detail, str(other.value), rule, "Keep one way to cut the layers.")
            )
        parsed.add_setting(field, layout, spelling)
    parsed.problems += depth_problems(spelling, pattern)
    if parts.depths and not parts.main:
        parsed.doubtful_flags.add(info.flag)
    depths = (("mtp_num_layers", len(parts.depths)), ("mtp_hybrid_override_pattern", parts.layers or None))
    for name, value in depths if parts.depths else ():
        field = fields_by_name()[name]
        other = parsed.settings[given[field.path]] if field.path in given else None
        if other is not None and other.value != value:
            rule = f"contradicts {spelling} {pattern}, which says {value}"
            parsed.problems.append(Problem(other.origin.detail, str(other.value), rule, "Leave it out."))
        parsed.add_setting(field, value, spelling)
    parsed.settings[given[info.path]] = replace(setting, value="".join(stages))


def _check_contradictions(parsed: ParsedFlags) -> None:
    """`--swiglu --squared-relu`, `--fp8-format e4m3 --fp8-hybrid`: each names a whole choice, so neither can quietly win.

    The same flag twice is no contradiction, the last one wins; nor is a `none` or `--no-x` that reverts an earlier one,
    nor a field's own flag that refines a model whose base was given in shorthands. Of two names of one field (`--tp 2
    --tensor-model-parallel-size 4`) the last wins too, as scripts that add flags expect; a notice says so.
    """
    before: dict[str, Setting] = {}
    for setting in parsed.settings:
        earlier, info = before.get(setting.path), fields_by_path()[setting.path]
        before[setting.path] = setting
        if earlier is None or earlier.value == setting.value:
            continue
        first, last = (given.origin.detail.replace("_", "-") for given in (earlier, setting))
        if first != last and {first, last} <= {info.flag, *spellings.ALIASES}:
            rule = f"both set {info.flag}, and the last one wins"
            parsed.notices.append(f"{last} {setting.value} takes the place of {first} {earlier.value}: {rule}")
            continue
        if setting.value in (None, info.off_value):
            continue
        short = [flag in spellings.SHORTHANDS or flag in spellings.CHOICE_FLAGS for flag in (first, last)]
        if first != last and (all(short) or (any(short) and info.section != "model")):
            names_field = info.flag in (first, last)
            rule = f"contradicts {earlier.origin.detail}" + ("" if names_field else f"; both set {info.flag}")
            parsed.problems.append(Problem(setting.origin.detail, "", rule, "Keep one of them."))
