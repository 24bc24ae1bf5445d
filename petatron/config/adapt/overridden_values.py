"""Values of a preset that a typed flag makes meaningless: the flag wins, and they are as if the preset did not have them.

Only values that mean nothing beside the flag are dropped, as their declarations say (`NotWith` in `config/schema/metadata.py`). A flag that
contradicts what a preset is about (positions that latent attention cannot have, a hybrid pattern beside experts) remains a problem of the
validator.
"""

from __future__ import annotations

from collections.abc import Mapping

from petatron.config.schema.fields import FieldInfo, FieldValue, all_fields, fields_by_name
from petatron.config.schema.metadata import NotWith
from petatron.config.value_origins import Setting, ValueOrigin


def meaningless_values(
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
    typed: Mapping[str, Setting],
    *,
    heads_may_follow: bool,
) -> tuple[list[str], list[str]]:
    """Returns the paths of a preset's values that typed flags make meaningless, and a notice for each of these flags.

    `heads_may_follow`: the number of key/value heads will be chosen for a typed number of heads.
    """
    dropped: dict[str, list[FieldInfo]] = {}
    for info in all_fields():
        if origins[info.path].kind != "preset" or info.path in typed or values[info.path] == info.default:
            continue
        for note in info.notes_of(NotWith):
            path = fields_by_name()[note.setting].path
            if path in typed and note.when(typed[path].value):
                dropped.setdefault(path, []).append(info)
    if not heads_may_follow and _heads_are_indivisible(values, typed):
        shared = [fields_by_name()[name] for name in ("num_query_groups", "group_query_attention")]
        dropped["model.num_attention_heads"] = [info for info in shared if origins[info.path].kind == "preset"]
    notices = [
        f"{typed[path].origin.detail} makes values of preset {origins[infos[0].path].detail} meaningless, which are left out: "
        + ", ".join(f"{info.flag} {values[info.path]}" for info in infos)
        for path, infos in dropped.items()
        if infos
    ]
    return [info.path for infos in dropped.values() for info in infos], notices


def _heads_are_indivisible(values: Mapping[str, FieldValue], typed: Mapping[str, Setting]) -> bool:
    """Whether the preset's key/value heads do not divide a typed number of heads."""
    groups, heads = values["model.num_query_groups"], typed.get("model.num_attention_heads")
    if heads is None or "model.num_query_groups" in typed or not isinstance(groups, int) or groups < 1:
        return False
    return isinstance(heads.value, int) and heads.value > 0 and heads.value % groups != 0
