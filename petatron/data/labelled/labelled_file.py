"""Reads files of texts with labels: a JSON object in each line.

    {"text": "...", "label": "good"}                           a label by name (--label-names) or number
    {"text": ["premise", "hypothesis"], "label": 2}            a pair of texts
    {"text": "...", "label": 0.5}                              a number to predict, or a list of several
    {"query": "...", "positive": "...", "negatives": ["..."]}  a query, the text that belongs to it, and others that do not

Problems name the file and the line, and what to do; the first ones of a file are reported together.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import reading_untrusted
from petatron.config.schema.objective_and_dataset_names import CLASSIFICATION, CONTRASTIVE
from petatron.data.data_file_error import data_file_error
from petatron.data.inputs.json_record import parse_record, repeated_keys
from petatron.data.inputs.line_blocks import numbered_lines

MAX_LINE_BYTES = 1 << 24
_MAX_PROBLEMS = 5
Label = int | tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRule:
    """What a line must have: the objective that reads it, its keys, its labels, and how many negatives beside a positive."""

    objective: str
    num_labels: int
    label_names: tuple[str, ...] = ()
    text_key: str = "text"
    label_key: str = "label"
    negatives: int = 0


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """The texts of a line, each of one or two parts, and its label: a number from 0 on, or numbers; None for a query with its texts."""

    texts: tuple[tuple[str, ...], ...]
    label: Label


def read_labelled_file(path: Path, rule: LabelRule) -> list[LabelledTexts]:
    """Returns what the lines of a file have; `DataError` names the lines that have something else."""
    records: list[LabelledTexts] = []
    problems: list[str] = []
    unnamed: Counter[str] = Counter()
    with reading_untrusted(path, data_file_error):
        for number, line in numbered_lines(path, max_line_bytes=MAX_LINE_BYTES):
            try:
                records.append(_read_record(parse_record(line), rule))
            except _UnknownLabel as error:
                unnamed[error.name] += 1
                problems.append(f"{path}, line {number}: {error}")
            except (ValueError, RecursionError) as error:
                problems.append(f"{path}, line {number}: {error}")
            if len(problems) >= _MAX_PROBLEMS and not unnamed:
                break
    if unnamed and not rule.label_names:
        names = " ".join(printable(name, max_chars=40) for name in sorted(unnamed)[:20])
        raise DataError(f"{path}: labels are strings, and nothing numbers them. Add --label-names {names}.")
    if problems:
        more = f"\n  and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        listed = "\n  ".join(problems[:_MAX_PROBLEMS])
        raise DataError(listed if len(problems) == 1 else f"{path} has lines of another form:\n  {listed}{more}")
    if not records:
        raise DataError(f"{path} has no lines. Give a file with a JSON object in each.")
    return records


class _UnknownLabel(ValueError):
    """A label that `--label-names` does not have."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        self.name = name
        super().__init__(
            f'the label "{printable(name, max_chars=40)}" is none of --label-names {" ".join(known)}. Correct the label, or add it there'
        )


def _read_record(record: object, rule: LabelRule) -> LabelledTexts:
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object. Write an object with keys in each line")
    if twice := sorted(repeated_keys(record)):
        raise ValueError(f"the key {twice[0]!r} is there twice. Keep one")
    if rule.objective == CONTRASTIVE:
        return LabelledTexts(_compared_texts(record, rule), None)
    text = _text(_value(record, rule.text_key, "--dataset-settings text_key=NAME"), rule.text_key)
    value = _value(record, rule.label_key, "--dataset-settings label_key=NAME")
    return LabelledTexts((text,), _class(value, rule) if rule.objective == CLASSIFICATION else _numbers(value, rule))


def _value(record: dict[str, Any], key: str, setting: str | None = None) -> Any:
    if key not in record:
        present = ", ".join(printable(name, max_chars=40) for name in sorted(record)[:8]) or "none"
        raise ValueError(
            f"no key {key!r} (keys here: {present}). Add it{f', or name another: {setting}' if setting else ''}"
        )
    return record[key]


def _text(value: Any, key: str) -> tuple[str, ...]:
    parts = value if isinstance(value, list) else [value]
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{key!r} is neither a string nor a list of two. Write one of them")
    if not all(part.strip() for part in parts):
        raise ValueError(f"{key!r} is empty. Leave the line out, or give it a text")
    return tuple(parts)


def _compared_texts(record: dict[str, object], rule: LabelRule) -> tuple[tuple[str, ...], ...]:
    texts = [_text(_value(record, key), key) for key in ("query", "positive")]
    negatives = record.get("negatives", [])
    if not isinstance(negatives, list):
        raise ValueError("'negatives' is no list. Write a list of strings")
    if len(negatives) < rule.negatives:
        raise ValueError(
            f"{count_with_noun(len(negatives), 'negative')}, and each line needs {rule.negatives}. Add some, or use --dataset-settings "
            f"negatives={len(negatives)}"
        )
    return (*texts, *(_text(text, "negatives") for text in negatives[: rule.negatives]))


def _class(value: Any, rule: LabelRule) -> int:
    if isinstance(value, str):
        if value not in rule.label_names:
            raise _UnknownLabel(value, rule.label_names)
        return rule.label_names.index(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            f"the label {printable(str(value), max_chars=40)} is neither a whole number nor a string. Write one of them"
        )
    if not 0 <= value < rule.num_labels:
        raise ValueError(
            f"the label {value} is not from 0 to {rule.num_labels - 1}, as --num-labels {rule.num_labels} says. Correct the label or the "
            "flag"
        )
    return value


def _numbers(value: Any, rule: LabelRule) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in values):
        raise ValueError(
            f"the label {printable(str(value), max_chars=40)} is no finite number. Write a number, or a list of them"
        )
    if len(values) != rule.num_labels:
        raise ValueError(
            f"{count_with_noun(len(values), 'number')} as label, and --num-labels is {rule.num_labels}. Correct the label, or the flag"
        )
    return tuple(float(x) for x in values)
