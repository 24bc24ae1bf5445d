"""Adapts the model of a preset, a file or a folder to typed flags, beyond their own values; every change has a notice.

Of a preset, values that mean nothing beside a typed flag are as if the preset did not have them, as their declarations say (`NotWith` in
`config/schema/setting_metadata.py`). A flag that contradicts what a preset is about (positions that latent attention cannot have, a hybrid
pattern beside experts) remains a problem of the validator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from petatron.base.errors import Problem
from petatron.config.adapt.cut_layer_pattern import PATTERN_PATHS, cut_layers
from petatron.config.adapt.toy_model import toy_values
from petatron.config.flags.parse_command_line import TOY_FLAG
from petatron.config.schema import fields
from petatron.config.schema.setting_metadata import NotWith
from petatron.config.settings_from_checkpoint import tokenizer_paths
from petatron.config.unused_settings import unused_settings
from petatron.config.value_origins import Setting, SourcedValues, ValueOrigin

_NUM_LAYERS = "model.num_layers"
_DEFAULT = ValueOrigin("default")


@dataclass(slots=True)
class AdaptedModel:
    """Values by path with their new origins, and what to tell the user."""

    values: dict[str, fields.FieldValue] = field(default_factory=dict)
    origins: dict[str, ValueOrigin] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def adapt_model(given: SourcedValues, typed: Mapping[str, Setting], *, toy: bool) -> AdaptedModel:
    """Returns the changes to the values of all sources before flags; `typed` are the settings of flags, which win anyway."""
    adapted = AdaptedModel()
    dropped, adapted.notices = meaningless_values(given, typed, heads_may_follow=toy)
    adapted.values = {path: fields.fields_by_path()[path].default for path in dropped}
    adapted.origins = dict.fromkeys(dropped, _DEFAULT)
    current = SourcedValues({**given.values, **adapted.values}, {**given.origins, **adapted.origins})
    typed_values = {path: setting.value for path, setting in typed.items()}
    (_shrink if toy else _cut_patterns)(adapted, current, typed_values)
    return adapted


def _shrink(adapted: AdaptedModel, given: SourcedValues, typed: Mapping[str, fields.FieldValue]) -> None:
    values, origins = given.values, given.origins
    if {**values, **typed}["checkpoint.use_checkpoint_args"]:
        rule = "cannot be combined with --use-checkpoint-args, which takes the model from --load as it is"
        adapted.problems.append(Problem(TOY_FLAG, "", rule, "Keep one of them."))
        return
    if origins["model.hidden_size"].kind == "default":
        rule = "shrinks a model, and neither a preset nor a file nor --from gives one"
        adapted.problems.append(Problem(TOY_FLAG, "", rule, "Name a preset, as in `petatron train deepseek-v3 --toy`."))
        return
    chosen = {path: typed.get(path, values[path]) for path in tokenizer_paths()}
    named = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    has_tokenizer = any(chosen[f"tokenizer.{name}"] for name in named) and "NullTokenizer" not in chosen.values()
    changed, cut = toy_values(values, typed, has_tokenizer=has_tokenizer)
    idle = unused_settings(fields.unflatten_config({**values, **changed, **typed}))
    changed = {path: value for path, value in changed.items() if origins[path].kind != "default" or path not in idle}
    adapted.values |= changed
    adapted.origins |= {path: ValueOrigin("adapted", f"toy of {origins[path]}") for path in changed}
    sizes, source = {**values, **changed, **typed}, origins["model.hidden_size"]
    kept = f" ({cut.describe()})" if cut is not None else ""
    number = sizes[_NUM_LAYERS]
    layers = f"{number} of {values[_NUM_LAYERS]} layers{kept} and " if number else ""
    weights = "; the folder gives the structure alone, and weights are random" if source.kind == "checkpoint" else ""
    adapted.notices.append(
        f"{TOY_FLAG} shrinks the model of {source} to {layers}hidden size {sizes['model.hidden_size']}{weights}"
    )


def _cut_patterns(adapted: AdaptedModel, given: SourcedValues, typed: Mapping[str, fields.FieldValue]) -> None:
    """`--num-layers` below the number of layers that patterns of a preset or file describe."""
    number = typed.get(_NUM_LAYERS)
    if not isinstance(number, int) or any(path in typed for path in PATTERN_PATHS):
        return
    cut, origins = cut_layers(given.values, number, every_pattern=False), given.origins
    if cut is None:
        return
    adapted.values |= cut.values
    adapted.origins |= {path: ValueOrigin("adapted", f"{origins[path]}, cut to {number} layers") for path in cut.values}
    named = ", ".join(f"{fields.fields_by_path()[path].flag} {value}" for path, value in cut.values.items())
    source = next(iter(origins[path] for path in cut.values))
    adapted.notices.append(f"--num-layers {number} cuts the layers of {source} to {cut.describe()}: {named}")


def meaningless_values(
    given: SourcedValues, typed: Mapping[str, Setting], *, heads_may_follow: bool
) -> tuple[list[str], list[str]]:
    """Returns the paths of a preset's values that typed flags make meaningless, and a notice for each of these flags.

    `heads_may_follow`: the number of key/value heads will be chosen for a typed number of heads.
    """
    values, origins, dropped = given.values, given.origins, dict[str, list[fields.FieldInfo]]()
    for info in fields.all_fields():
        if origins[info.path].kind != "preset" or info.path in typed or values[info.path] == info.default:
            continue
        for note in info.notes_of(NotWith):
            path = fields.fields_by_name()[note.setting].path
            if path in typed and note.when(typed[path].value):
                dropped.setdefault(path, []).append(info)
    if not heads_may_follow and _heads_are_indivisible(values, typed):
        shared = [fields.fields_by_name()[name] for name in ("num_query_groups", "group_query_attention")]
        dropped["model.num_attention_heads"] = [info for info in shared if origins[info.path].kind == "preset"]
    notices = [
        f"{typed[path].origin.detail} makes values of preset {origins[infos[0].path].detail} meaningless, which are left out: "
        + ", ".join(f"{info.flag} {values[info.path]}" for info in infos)
        for path, infos in dropped.items()
        if infos
    ]
    return [info.path for infos in dropped.values() for info in infos], notices


def _heads_are_indivisible(values: Mapping[str, fields.FieldValue], typed: Mapping[str, Setting]) -> bool:
    """Whether the preset's key/value heads do not divide a typed number of heads."""
    groups, heads = values["model.num_query_groups"], typed.get("model.num_attention_heads")
    if heads is None or "model.num_query_groups" in typed or not isinstance(groups, int) or groups < 1:
        return False
    return isinstance(heads.value, int) and heads.value > 0 and heads.value % groups != 0
