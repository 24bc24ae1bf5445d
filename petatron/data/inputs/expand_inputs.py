"""Expands what a user names as input to files: a file, a pattern, a folder, or the same behind an address.

A folder has the files below it whose names tell a format, in the order of their names, without hidden ones; one saved by the
`datasets` library has the files that it lists itself, and one that a curation step has written those with what it has kept.
Whoever filled a folder may not have the user's rights, so a link in it that leads elsewhere is an error; a file that the user
names may be a link.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from glob import glob, has_magic
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.format_text import abbreviate_names
from petatron.base.remote_address import is_remote
from petatron.base.safe_files import symlink_target_outside
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import not_a_file_reason, read_limited_json, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.inputs.curation_output_folder import DROPPED_FOLDER, SUMMARY_FILE, is_step_output
from petatron.data.inputs.input_file import InputFile, input_file
from petatron.data.inputs.input_formats import (
    TEXT_ENDINGS,
    TEXT_FORMATS,
    InputFormat,
    format_of_name,
    name_endings,
)
from petatron.data.inputs.remote_files import expand_remote

_SAVED_STATE = "state.json"
_SAVED_SPLITS = "dataset_dict.json"
_METADATA_FILES = (_SAVED_STATE, _SAVED_SPLITS, "dataset_info.json", "dataset_infos.json", "metadata.json")
_MAX_METADATA_BYTES = 1 << 26


def expand_inputs(names: Sequence[str], input_format: InputFormat) -> list[InputFile]:
    """Returns the files in the order in which they are named; one error has everything that is wrong."""
    files: list[InputFile] = []
    problems: list[str] = []
    for name in names:
        try:
            if is_remote(name):
                files += _remote_inputs(name, input_format)
            else:
                files += [input_file(path, input_format) for path in _local_paths(name, input_format)]
        except _InputProblem as problem:
            problems.append(str(problem))
        except DataError as error:
            problems.append(str(error).removesuffix("."))
        except OSError as error:  # a name that no file can have, or a folder that is closed to the user
            problems.append(f"input {printable(name, max_chars=200)} cannot be read: {error.strerror or error}")
    if problems:
        raise DataError(f"{'; '.join(problems)}.")
    return files


class _InputProblem(Exception):
    """Why a name gives no files, without a full stop."""


def _remote_inputs(name: str, input_format: InputFormat) -> list[InputFile]:
    expanded = expand_remote(name)
    if expanded and expanded[0][0] == name:
        ((path, state),) = expanded
        return [input_file(path, input_format, state)]
    states = dict(expanded)
    paths = _choose_files(name, list(states), input_format)
    return [input_file(path, input_format, states[path]) for path in paths]


def _local_paths(name: str, input_format: InputFormat) -> list[str]:
    path = Path(name)
    if path.is_dir():
        return _folder_paths(path, input_format)
    if input_format == "huggingface":
        raise _InputProblem(f"input {name} is not a folder, which --input-format huggingface reads")
    if path.is_file():
        return [name]
    if has_magic(name) and not os.path.lexists(name):
        paths = sorted(match for match in glob(name, recursive=True) if not Path(match).is_dir())
        if not paths:
            raise _InputProblem(f"input {name} matches no file")
        if strange := [f"{match} {why}" for match in paths if (why := not_a_file_reason(Path(match)))]:
            raise _InputProblem(f"input {abbreviate_names(strange)}")
        return paths
    raise _InputProblem(f"input {name} {'is not a file' if path.exists() else 'does not exist'}")


_MAX_FOLDER_FILES = 20_000


def _folder_paths(folder: Path, input_format: InputFormat) -> list[str]:
    if (folder / _SAVED_SPLITS).is_file():
        splits = _read_list(folder / _SAVED_SPLITS, "splits")
        example = folder / (splits[0] if splits else "train")
        raise _InputProblem(f"input {folder} has the splits {', '.join(splits)}; name one, for instance {example}")
    if (folder / _SAVED_STATE).is_file():
        return [str(folder / name) for name in _saved_files(folder)]
    paths = _choose_files(str(folder), [str(folder / name) for name in _names_below(folder)], input_format)
    for path in paths:
        if (target := symlink_target_outside(Path(path), folder)) is not None:
            raise _InputProblem(f"input {path} is a link to {target}, outside of the folder; name that file itself")
    return paths


def _saved_files(folder: Path) -> list[str]:
    """Returns the files of a folder of `Dataset.save_to_disk`, which must be inside of it."""
    names = _read_list(folder / _SAVED_STATE, "_data_files", "filename")
    for name in names:
        reason = "is no name of a file" if Path(name).name != name else not_a_file_reason(folder / name)
        if reason is not None:
            named = f"{printable(name, max_chars=80)}, which {_SAVED_STATE} names,"
            raise _InputProblem(f"input {folder}: {named} {reason}")
        if (target := symlink_target_outside(folder / name, folder)) is not None:
            raise _InputProblem(f"input {folder / name} is a link to {target}, outside of the folder")
    if not names:
        raise _InputProblem(f"input {folder} is a dataset without files: {_SAVED_STATE} names none")
    return names


def _read_list(path: Path, key: str, inner: str | None = None) -> list[str]:
    with reading_untrusted(path, data_file_error):
        entries = read_limited_json(path, _MAX_METADATA_BYTES)[key]
        names = [entry if inner is None else entry[inner] for entry in entries]
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} has entries that are not names")
        return names


def _names_below(folder: Path) -> list[str]:
    names: list[str] = []
    for place, folders, files in os.walk(folder):
        no_data = (SUMMARY_FILE, DROPPED_FOLDER) if SUMMARY_FILE in files and is_step_output(Path(place)) else ()
        folders[:] = [name for name in folders if not _is_hidden(name) and name not in no_data]
        names += [os.path.join(place, name) for name in files if not _is_hidden(name) and name not in no_data]
        if len(names) > _MAX_FOLDER_FILES:
            raise _InputProblem(f"input {folder} has more than {_MAX_FOLDER_FILES:,} files; name them by patterns")
    return sorted(os.path.relpath(name, folder) for name in names)


def _is_hidden(name: str) -> bool:
    """Whether a program keeps it for itself, as `.cache` and `_SUCCESS`."""
    return name.startswith((".", "_"))


def _choose_files(folder: str, paths: Sequence[str], input_format: InputFormat) -> list[str]:
    """Returns the files of a folder that are of the format; with `auto`, all must be of one."""
    data = [path for path in paths if path.rpartition("/")[2] not in _METADATA_FILES]
    if input_format in TEXT_FORMATS:
        chosen = [path for path in data if name_endings(path)[0] in TEXT_ENDINGS]
    elif input_format in ("auto", "huggingface"):
        chosen = [path for path in data if format_of_name(path) is not None]
        formats = Counter(format_of_name(path) for path in chosen)
        if len(formats) > 1:
            counts = ", ".join(f"{count:,} {name}" for name, count in formats.most_common())
            raise _InputProblem(
                f"input {folder} has files of several formats ({counts}); choose one with --input-format"
            )
    else:
        chosen = [path for path in data if format_of_name(path) == input_format]
    if chosen:
        return chosen
    texts = sum(name_endings(path)[0] in TEXT_ENDINGS for path in data)
    if texts and input_format == "auto":
        raise _InputProblem(
            f"input {folder} has {texts:,} text files; say what a document is: --input-format text (a paragraph) or text-file"
        )
    asked = "" if input_format == "auto" else f" of --input-format {input_format}"
    listed = f": it has {abbreviate_names([printable(path) for path in paths])}" if paths else ""
    raise _InputProblem(f"input {folder} is a folder without files{asked}{listed}")
