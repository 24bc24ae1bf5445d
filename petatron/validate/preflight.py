"""Checks the machine before a run starts: files exist, folders are writable, libraries are installed, data files have the right format.

`check_config` checks the values of settings, this module the machine. A text or parquet file in place of token files is reported with the
command that converts it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from petatron.base.errors import Problem
from petatron.base.remote_address import is_remote
from petatron.base.untrusted_files import not_a_file_reason
from petatron.config.nccl_communicators import communicator_problems
from petatron.config.schema.data_blend import BlendError, named_sets, parse_blend
from petatron.config.schema.fields import flag_name
from petatron.config.schema.objective_and_dataset_names import NEXT_TOKEN, TEXT_DATASETS
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.chat_template import BUILT_IN_TEMPLATES

_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_BLENDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
# Setting -> library and extra that it needs.
_LIBRARIES = {
    "tensorboard_dir": ("tensorboard", "log"),
    "wandb_project": ("wandb", "log"),
    "sign_key": ("cryptography", "sign"),
}


def preflight(config: RawRunConfig) -> list[Problem]:
    """Returns all problems of the machine at once; the config may have problems too, which are reported with them."""
    asked = (_missing_files, _missing_data, _missing_libraries, _timeline, _run_folders, _new_folders)
    return [*(problem for ask in asked for problem in ask(config)), *communicator_problems(config.parallel)]


def _timeline(config: RawRunConfig) -> Iterator[Problem]:
    path = config.log.pipeline_timeline
    if path is not None and Path(path).is_dir():
        yield Problem("--pipeline-timeline", path, "is a folder", "Give the path of a file.")
    elif path is not None and not Path(path).absolute().parent.is_dir():
        yield Problem("--pipeline-timeline", path, "is in a folder that does not exist", "Make the folder first.")


def _run_folders(config: RawRunConfig) -> Iterator[Problem]:
    """Checks output folders that a run creates with their parents: the nearest existing folder must be writable."""
    save, log = config.checkpoint.save, config.log
    named = {
        "save": save,
        "save_megatron": config.checkpoint.save_megatron,
        "log_dir": log.log_dir if log.log_dir != save else None,
        "tensorboard_dir": log.tensorboard_dir,
        "object_storage_cache_path": config.data.object_storage_cache_path,
    }
    for name, path in named.items():
        if path is None:
            continue
        folder = Path(path).absolute()
        there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
        if not there.is_dir():
            rule = "is a file" if there == folder else f"is in {there}, which is a file"
            yield Problem(flag_name(name), path, rule, "Give the path of a folder.")
        elif (why := _write_error(there)) is not None:
            rule = f"cannot be written to ({there}: {why})"
            yield Problem(flag_name(name), path, rule, "Make it writable, or give another folder.")


def _new_folders(config: RawRunConfig) -> Iterator[Problem]:
    """Checks folders whose parent must exist: without it the path is mistyped or a disk is not mounted.

    The folder of profiler traces may also be inside a folder that the run creates.
    """
    if config.memory.optimizer_nvme_offload is not None:
        yield from _new_folder("--optimizer-nvme-offload", config.memory.optimizer_nvme_offload)
    log = config.log
    if not log.profile or log.profile_dir is None:
        return
    made = (config.checkpoint.save, log.log_dir, log.tensorboard_dir)
    if Path(log.profile_dir).absolute().parent not in [Path(folder).absolute() for folder in made if folder]:
        yield from _new_folder("--profile-dir", log.profile_dir)


def _new_folder(flag: str, path: str) -> Iterator[Problem]:
    folder = Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        yield Problem(flag, path, "is a file", "Give the path of a folder.")
    elif not folder.exists() and not folder.parent.is_dir():
        fix = f"Make {folder.parent} first, or give a folder on a disk that is there."
        yield Problem(flag, path, f"is in {folder.parent}, which is no folder", fix)
    elif (why := _write_error(folder if folder.exists() else folder.parent)) is not None:
        yield Problem(flag, path, f"cannot be written to ({why})", "Make it writable, or give another folder.")


def _write_error(folder: Path) -> str | None:
    """Returns why a folder is not writable. Tries to write: permissions tell nothing for root, /proc or a full disk."""
    try:
        with tempfile.TemporaryDirectory(prefix="petatron-", dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _missing_files(config: RawRunConfig) -> Iterator[Problem]:
    named = {name: getattr(config.tokenizer, name) for name in _FILES}
    named |= {"data_args_path": config.data.data_args_path, "sample_prompts": config.log.sample_prompts}
    named["eval_tasks"] = config.train.eval_tasks
    if config.data.chat_template not in BUILT_IN_TEMPLATES:
        named["chat_template"] = config.data.chat_template
    for name, path in ((name, path) for name, path in named.items() if path is not None):
        if not Path(path).exists():
            yield Problem(flag_name(name), path, "does not exist", "Give the path of a file that is there.")
        elif name == "tokenizer_model" and Path(path).is_dir():
            continue
        elif (reason := not_a_file_reason(Path(path))) is not None:
            yield Problem(flag_name(name), path, reason, "Give the path of a file.")


def reads_packed_text(config: RawRunConfig) -> bool:
    """Whether the data is Megatron's token files; another dataset kind checks its own files."""
    if config.data.dataset_type is not None:
        return config.data.dataset_type in TEXT_DATASETS
    return config.train.objective in (None, NEXT_TOKEN)


def _missing_data(config: RawRunConfig) -> Iterator[Problem]:
    for name in _BLENDS if reads_packed_text(config) else ():
        blend = getattr(config.data, name)
        try:
            sets = named_sets(blend).values() if name == "valid_data_path" else (blend,)
            parts = [part for of_set in sets for part in parse_blend(of_set)]
        except BlendError:  # a problem of its own
            continue
        prefixes = dict.fromkeys(part.prefix for part in parts)
        remote = [prefix for prefix in prefixes if is_remote(prefix)]
        if remote and config.data.object_storage_cache_path is None:
            rule = "is an address, and there is no --object-storage-cache-path"
            fix = "Give it a folder on a disk of this machine, for the index and for the tokens that are read."
            yield Problem(flag_name(name), remote[0], rule, fix)
        elif remote and importlib.util.find_spec("fsspec") is None:
            rule = "is read through fsspec, which is not installed"
            yield Problem(flag_name(name), remote[0], rule, "pip install 'petatron[remote]'.")
        for prefix in [prefix for prefix in prefixes if prefix not in remote]:
            reasons = {f"{prefix}{end}": not_a_file_reason(Path(f"{prefix}{end}")) for end in (".idx", ".bin")}
            gone = [path for path, reason in reasons.items() if reason == "is missing"]
            strange = [f"{path} {reason}" for path, reason in reasons.items() if reason and path not in gone]
            fix = "Give the prefix of files that `petatron data preprocess` wrote, without .bin or .idx."
            raw = raw_text_problem(flag_name(name), prefix) if gone else None
            if raw is not None:
                yield raw
            elif strange:
                yield Problem(flag_name(name), prefix, f"cannot be read: {' and '.join(strange)}", fix)
            elif gone:
                yield Problem(flag_name(name), prefix, f"does not exist: there is no {' and no '.join(gone)}", fix)


def _missing_libraries(config: RawRunConfig) -> Iterator[Problem]:
    for name, (library, extra) in _LIBRARIES.items():
        value = getattr(config.checkpoint if name == "sign_key" else config.log, name)
        if value is not None and importlib.util.find_spec(library) is None:
            fix = f"pip install {library}, or pip install 'petatron[{extra}]'."
            yield Problem(flag_name(name), value, f"needs {library}, which is not installed", fix)


_TEXT_FILES = (
    ".jsonl",
    ".json",
    ".ndjson",
    ".txt",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".tar",
    ".gz",
    ".zst",
    ".bz2",
    ".xz",
)


def raw_text_problem(flag: str, path: str) -> Problem | None:
    """Returns the problem of a file of text in place of token files; None where the path is no such file."""
    if not path.lower().endswith(_TEXT_FILES) or not Path(path).is_file():
        return None
    prefix = str(Path(path).with_name(Path(path).name.partition(".")[0]))
    command = shlex.join(["petatron", "data", "preprocess", "--input", path, "--output-prefix", prefix])
    rule = "is a file of text, not the prefix of token files"
    return Problem(flag, path, rule, f"Make them: {command}, with the tokenizer's flags and --append-eod.")
