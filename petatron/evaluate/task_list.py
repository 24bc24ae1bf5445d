"""Which tasks to run on which files: one of a command line, or a list in a YAML file.

    - task: lambada
      data: lambada.jsonl
      strict: true
    - task: text
      data: held-out.txt
      name: held out
      limit: 100
      every: 2

Paths are relative to the file. In training, `every: 2` runs a task at every second evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from petatron.base.errors import ConfigError, DataError, Problem, raise_problems
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.config.yaml_file import MAX_YAML_BYTES
from petatron.config.yaml_limits import limited_loader
from petatron.data.prompt.prompt_encoder import bos_ids
from petatron.data.tokenizer import Tokenizer
from petatron.evaluate import multiple_choice
from petatron.evaluate.eval_task import ContextLimits, EvalTask
from petatron.evaluate.labelled_texts import LabelledTextsTask
from petatron.evaluate.lambada import read_lambada
from petatron.evaluate.language_modeling import read_text_task, read_wikitext103
from petatron.evaluate.masked_tokens import read_masked_tokens
from petatron.evaluate.multiple_choice import FewShot
from petatron.evaluate.score_sequences import max_scored_tokens
from petatron.parallel.parallel_model import ParallelModel

WIKITEXT103, LAMBADA, TEXT, MASKED, LABELS = "wikitext103", "lambada", "text", "masked", "labels"
TASK_NAMES = (WIKITEXT103, LAMBADA, *multiple_choice.FORMATS, TEXT, MASKED, LABELS)
_MAX_TASKS = 100
_KINDS = {"str": (str, "a text"), "Path": (str, "a path"), "int": (int, "a number"), "bool": (bool, "true or false")}
# Which settings have an effect on which tasks; the others on all.
_SETTINGS_OF = {
    "stride": (WIKITEXT103, TEXT),
    "strict": (LAMBADA,),
    "limit": tuple(n for n in TASK_NAMES if n != WIKITEXT103),
    "bos": tuple(n for n in TASK_NAMES if n not in (WIKITEXT103, MASKED, LABELS)),
    "num_fewshot": tuple(multiple_choice.FORMATS),
    "fewshot_data": tuple(multiple_choice.FORMATS),
    "fewshot_seed": tuple(multiple_choice.FORMATS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """One task.

    task: one of `TASK_NAMES`. data: its file. name: in results, by default that of the task. limit: examples at most. stride: tokens
    that each window counts, by default all. strict: LAMBADA's whole last word. every: the task runs at every N-th evaluation of training.
    bos: whether a BOS token precedes each text, by default what the tokenizer does. num_fewshot: solved examples before each prompt of
    multiple choice, the first ones, or drawn with fewshot_seed; of the file fewshot_data, by default the task's own.
    """

    task: str
    data: Path
    name: str = ""
    limit: int | None = None
    stride: int | None = None
    strict: bool = False
    every: int = 1
    bos: bool | None = None
    num_fewshot: int = 0
    fewshot_data: Path | None = None
    fewshot_seed: int | None = None

    @property
    def label(self) -> str:
        return self.name or self.task


def setting_problems(settings: TaskSettings, *, where: str) -> Iterator[Problem]:
    """Yields everything that is wrong with a task's settings, before its file is opened."""
    if settings.task not in TASK_NAMES:
        yield Problem(where, settings.task, "is not a task", f"Use one of {', '.join(TASK_NAMES)}.")
        return
    by_flags = where == "--task"

    def place(name: str) -> str:
        return _flag(name) if by_flags else f"{where} {name}"

    for names, least, kind in (
        (("limit", "stride", "every"), 1, "a positive number"),
        (("num_fewshot", "fewshot_seed"), 0, "0 or more"),
    ):
        for name in names:
            if (value := getattr(settings, name)) is not None and value < least:
                yield Problem(place(name), str(value), f"is below {least}", f"Use {kind}, or leave it out.")
    defaults = {setting.name: setting.default for setting in fields(TaskSettings)}
    for name, tasks in _SETTINGS_OF.items():
        if settings.task not in tasks and getattr(settings, name) != defaults[name]:
            rule = f"has no effect on {settings.task}"
            yield Problem(place(name), "", rule, f"Leave it out; it is for {', '.join(tasks)}.")
    if not settings.data.is_file():
        named = "--data" if by_flags else where
        yield Problem(named, str(settings.data), "is not a file", "Give the path of the task's data.")
    for name in ("fewshot_data", "fewshot_seed"):
        given = getattr(settings, name) is not None and settings.task in multiple_choice.FORMATS
        if given and settings.num_fewshot == 0:
            rule = f"has no effect without {_flag('num_fewshot') if by_flags else 'num_fewshot'}"
            yield Problem(place(name), "", rule, "Say how many examples to show.")
    if settings.fewshot_data is not None and not settings.fewshot_data.is_file():
        named = _flag("fewshot_data") if by_flags else where
        yield Problem(named, str(settings.fewshot_data), "is not a file", "Give a file of the task's format.")


def _flag(name: str) -> str:
    """Returns the flag of `petatron eval` for a setting of a task."""
    return "--strict-lambada" if name == "strict" else f"--{name.replace('_', '-')}"


def read_task_list(path: Path) -> list[TaskSettings]:
    """Reads a YAML list of tasks, which may be untrusted; raises `ConfigError` with every problem."""
    content = _load_yaml(path)
    if not isinstance(content, list) or not 1 <= len(content) <= _MAX_TASKS:
        rule = f"is not a list of 1 to {_MAX_TASKS} tasks"
        raise ConfigError([Problem("tasks", str(path), rule, "Write `- task: NAME` and `  data: FILE` for each.")])
    tasks: list[TaskSettings] = []
    problems: list[Problem] = []
    for number, item in enumerate(content, start=1):
        where = f"{path}, task {number}:"
        settings, wrong = _parse_task(item, where, path.parent)
        problems += wrong
        if settings is not None:
            problems += setting_problems(settings, where=where)
            tasks.append(settings)
    raise_problems(problems)
    labels, fix = [task.label for task in tasks], "Give each a `name:` of its own."
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    raise_problems(
        Problem("tasks", str(path), f"has more than one task of the name {label}", fix) for label in repeated
    )
    return tasks


def build_tasks(settings: Sequence[TaskSettings], tokenizer: Tokenizer, limits: ContextLimits) -> list[EvalTask]:
    """Reads and tokenizes the files of tasks; raises `DataError` with the problems of all of them."""
    tasks: list[EvalTask] = []
    problems: list[str] = []
    for task in settings:
        try:
            tasks.append(_build_task(task, tokenizer, limits))
        except DataError as error:
            problems.append(f"task {task.label}: {error}")
    if problems:
        raise DataError("\n".join(problems))
    return tasks


def context_limits(model: ParallelModel) -> ContextLimits:
    """Returns what a model reads at once in its layout; a window over longer texts has the sequence length of training."""
    longest = max_scored_tokens(model)
    return ContextLimits(longest, min(model.spec.config.seq_length, longest - 1))


def _build_task(settings: TaskSettings, tokenizer: Tokenizer, limits: ContextLimits) -> EvalTask:
    path, limit, bos = settings.data, settings.limit, bos_ids(tokenizer, add=settings.bos)
    if settings.task == WIKITEXT103:
        return read_wikitext103(path, tokenizer, limits, stride=settings.stride)
    if settings.task == LAMBADA:
        return read_lambada(path, tokenizer, limits, strict=settings.strict, limit=limit, bos=bos)
    if settings.task == TEXT:
        return read_text_task(path, tokenizer, limits, stride=settings.stride, limit=limit, bos=bos)
    if settings.task == MASKED:
        return read_masked_tokens(path, tokenizer, limits, limit=limit)
    if settings.task == LABELS:
        return LabelledTextsTask(path=path, tokenizer=tokenizer, limits=limits, limit=limit)
    number, data, seed = settings.num_fewshot, settings.fewshot_data, settings.fewshot_seed
    shots = FewShot(number=number, data=data, seed=seed) if number else None
    return multiple_choice.read_multiple_choice(
        path, tokenizer, limits, format_name=settings.task, limit=limit, bos=bos, shots=shots
    )


def _load_yaml(path: Path) -> Any:
    import yaml

    with reading_untrusted(path, lambda file, why: DataError(f"The list of tasks {file} {why}.")):
        text = read_limited_bytes(path, MAX_YAML_BYTES).decode()
        try:
            return yaml.load(text, Loader=limited_loader())
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark else str(path)
            what = getattr(error, "problem", None) or "it cannot be parsed"
            raise ConfigError([Problem(where, "", f"is not valid YAML: {what}", "Correct that line.")]) from error


def _parse_task(item: Any, where: str, folder: Path) -> tuple[TaskSettings | None, list[Problem]]:
    if not isinstance(item, Mapping):
        rule = "is not `task: NAME` with further settings"
        return None, [Problem(where, "", rule, "Write one setting on each line.")]
    kinds = {setting.name: str(setting.type).removesuffix(" | None") for setting in fields(TaskSettings)}
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for key, value in item.items():
        kind = kinds.get(key) if isinstance(key, str) else None
        if kind is None:
            problems.append(Problem(where, str(key), "is not a setting of a task", f"Settings: {', '.join(kinds)}."))
        elif type(value) is not _KINDS[kind][0] or value == "":  # true is no number
            is_scalar = isinstance(value, str | int | float | None)  # anything else may be endless
            shown = repr(value) if is_scalar else "(a list or mapping)"
            problems.append(Problem(where, f"{key} {shown}", "has the wrong type", f"It is {_KINDS[kind][1]}."))
        else:
            values[key] = value
    missing = [name for name in ("task", "data") if name not in item]
    problems += [Problem(where, "", f"has no `{name}`", f"Add `{name}:`.") for name in missing]
    if problems:
        return None, problems
    paths = {name: folder / values[name] for name in ("data", "fewshot_data") if name in values}
    settings = TaskSettings(**{**values, **paths})
    return replace(settings, task=settings.task.lower()), []
