"""`ParsedFlags`, the result of parsing a command line: settings, other sources of settings, notices and problems."""

from __future__ import annotations

from dataclasses import dataclass, field

from petatron.base.errors import Problem
from petatron.config.schema.fields import FieldInfo, FieldValue
from petatron.config.value_origins import Setting, ValueOrigin


@dataclass(frozen=True, slots=True)
class ImpliedFlag:
    """A flag with its value, as typed, that is accepted and changes nothing, and why."""

    text: str
    reason: str


@dataclass(slots=True)
class ParsedFlags:
    """The settings of argv. `doubtful_flags` are flags whose value is in doubt, so that rules about them are skipped.

    `sft_files` are the words after `--sft`; None without it.
    `renamed_values` are fields by name with values that were typed in Megatron's spelling.
    """

    settings: list[Setting] = field(default_factory=list)
    preset: str | None = None
    files: list[str] = field(default_factory=list)
    split_data_file: str | None = None
    from_folder: str | None = None
    notices: list[str] = field(default_factory=list)
    implied: list[ImpliedFlag] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    doubtful_flags: set[str] = field(default_factory=set)
    renamed_values: set[tuple[str, str]] = field(default_factory=set)
    drops_learned_positions: bool = False
    rope_type: str | None = None
    exact_gelu: bool = False
    megatron_defaults: bool = False
    toy: bool = False
    sft_files: tuple[str, ...] | None = None

    @property
    def all_notices(self) -> list[str]:
        """Returns the notices, and one for all flags that are accepted and change nothing."""
        by_reason: dict[str, list[str]] = {}
        for flag in self.implied:
            by_reason.setdefault(flag.reason, []).append(flag.text)
        listed = "; ".join(f"{', '.join(dict.fromkeys(texts))} ({reason})" for reason, texts in by_reason.items())
        return [f"accepted, and nothing changes: {listed}", *self.notices] if listed else self.notices

    def add_setting(self, info: FieldInfo, value: FieldValue, spelling: str) -> None:
        """The last of several wins; a flag that may be repeated takes the values of all."""
        if "repeatable" in info.marks and isinstance(value, tuple):
            before = [
                given.value for given in self.settings if given.path == info.path and isinstance(given.value, tuple)
            ]
            value = tuple(dict.fromkeys(map(str, (*(before[-1] if before else ()), *value))))
        self.settings.append(Setting(info.path, value, ValueOrigin("flag", spelling)))
