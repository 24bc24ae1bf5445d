"""What typed flags change in the model that a preset, files or a folder give, beyond their own values; every change has a notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from petatron.base.errors import Problem
from petatron.config.adapt.layer_cut import PATTERN_PATHS, cut_layers
from petatron.config.adapt.overridden_values import meaningless_values
from petatron.config.adapt.toy_model import toy_values
from petatron.config.checkpoint_settings import tokenizer_paths
from petatron.config.flags.parse import TOY_FLAG
from petatron.config.schema.fields import FieldValue, fields_by_path, unflatten_config
from petatron.config.unused_flags import unused_settings
from petatron.config.value_origins import Setting, ValueOrigin

_NUM_LAYERS = "model.num_layers"
_DEFAULT = ValueOrigin("default")


@dataclass(slots=True)
class AdaptedModel:
    """Values by path with their new origins, and what to tell the user."""

    values: dict[str, FieldValue] = field(default_factory=dict)
    origins: dict[str, ValueOrigin] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def adapt_model(
    values: Mapping[str, FieldValue], origins: Mapping[str, ValueOrigin], typed: Mapping[str, Setting], *, toy: bool
) -> AdaptedModel:
    """Returns the changes to the values of all sources before flags; `typed` are the settings of flags, which win anyway."""
    adapted = AdaptedModel()
    dropped, adapted.notices = meaningless_values(values, origins, typed, heads_may_follow=toy)
    adapted.values = {path: fields_by_path()[path].default for path in dropped}
    adapted.origins = dict.fromkeys(dropped, _DEFAULT)
    current, sources = {**values, **adapted.values}, {**origins, **adapted.origins}
    typed_values = {path: setting.value for path, setting in typed.items()}
    if toy:
        _shrink(adapted, current, sources, typed_values)
    else:
        _cut_patterns(adapted, current, sources, typed_values)
    return adapted


def _shrink(
    adapted: AdaptedModel,
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
    typed: Mapping[str, FieldValue],
) -> None:
    if {**values, **typed}["checkpoint.use_checkpoint_args"]:
        rule = "cannot be combined with --use-checkpoint-args, which takes the model from --load as it is"
        adapted.problems.append(Problem(TOY_FLAG, "", rule, "Keep one of them."))
        return
    if origins["model.hidden_size"].kind == "default":
        rule = "shrinks a model, and neither a preset nor a file nor --from gives one"
        adapted.problems.append(Problem(TOY_FLAG, "", rule, "Name a preset, as in `petatron train deepseek-v3 --toy`."))
        return
    chosen = {path: typed.get(path, values[path]) for path in tokenizer_paths()}
    has_tokenizer = any(chosen.values()) and "NullTokenizer" not in chosen.values()
    changed, cut = toy_values(values, typed, has_tokenizer=has_tokenizer)
    idle = unused_settings(unflatten_config({**values, **changed, **typed}))
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


def _cut_patterns(
    adapted: AdaptedModel,
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
    typed: Mapping[str, FieldValue],
) -> None:
    """`--num-layers` below the number of layers that patterns of a preset or file describe."""
    number = typed.get(_NUM_LAYERS)
    if not isinstance(number, int) or any(path in typed for path in PATTERN_PATHS):
        return
    cut = cut_layers(values, number, every_pattern=False)
    if cut is None:
        return
    adapted.values |= cut.values
    adapted.origins |= {path: ValueOrigin("adapted", f"{origins[path]}, cut to {number} layers") for path in cut.values}
    named = ", ".join(f"{fields_by_path()[path].flag} {value}" for path, value in cut.values.items())
    source = next(iter(origins[path] for path in cut.values))
    adapted.notices.append(f"--num-layers {number} cuts the layers of {source} to {cut.describe()}: {named}")
