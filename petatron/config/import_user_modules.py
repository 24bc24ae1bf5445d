"""`--import MODULE`: code of a user's own that registers models, objectives, datasets or optimizers before a run uses them.

A module is the path of a file, or a dotted name that Python finds. Its name is stored in the run (config.yaml and checkpoints), so that
later commands find it again, and that is where danger is: a folder from a stranger must not make us run code by naming it. So a name
that somebody types (`--import`, PETATRON_IMPORT) is imported, and its file is recorded in `~/.petatron/imports`, where nobody else can
write. A name that comes out of a file is imported only if the same file was recorded before: then it is this user's own run. Any
other is refused with the flag that would allow it. Nothing is executed to find out: packages on the way to a dotted name are located,
not imported (`docs/security.md`).

Installed packages need no flag: those with an entry point in the group `petatron.plugins` are imported when a name is asked for that
nobody has registered.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from petatron.base.errors import ConfigError, Problem, raise_problems
from petatron.base.safe_files import private_folder, write_atomic

IMPORT_FLAG, IMPORTS_PATH = "--import", "launch.imports"
PLUGIN_GROUP = "petatron.plugins"
_RECORD, _FILE_MODULE = "imports", "petatron_import_"


@dataclass(frozen=True, slots=True)
class NamedImport:
    """A module that a source names. `file` is the config file or checkpoint that names it; None: the user typed it."""

    name: str
    file: str | None = None


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file rather than a dotted one.

    >>> is_file_name("models/mine.py"), is_file_name("mine.models")
    (True, False)
    """
    return name.endswith(".py") or os.sep in name


def module_file_name(name: str) -> str:
    """Returns a file's name without its folders; a dotted name as it is.

    >>> module_file_name("/home/me/mine.py"), module_file_name("mine.models")
    ('mine.py', 'mine.models')
    """
    return os.path.basename(name) if is_file_name(name) else name


def absolute_import(name: str) -> str:
    """Returns a name that means the same in any working folder."""
    return os.path.abspath(name) if is_file_name(name) else name


def import_modules(named: Iterable[NamedImport]) -> list[Problem]:
    """Imports the modules that the user has consented to, each once; returns what is wrong with the others."""
    problems: list[Problem] = []
    for module in dict.fromkeys(named):
        try:
            problems += _import_named(module)
        except ConfigError as error:
            problems += error.problems
    return problems


def import_typed(names: Iterable[str]) -> None:
    """Imports modules that the user has typed; raises `ConfigError` with every problem."""
    raise_problems(import_modules(NamedImport(name) for name in names))


def import_stored(names: Iterable[str], *, file: str) -> list[Problem]:
    """Imports modules that a checkpoint names, if the user has consented to them; returns what is wrong with the others.

    A file that is imported already takes the place of a stored one of the same name: that of a run that was moved.
    """
    imported = {
        module_file_name(str(module.__file__)) for name, module in sys.modules.items() if name.startswith(_FILE_MODULE)
    }
    return import_modules(
        NamedImport(name, file) for name in names if not (is_file_name(name) and module_file_name(name) in imported)
    )


def split_imports(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the modules that a command line names, and its other words.

    >>> split_imports(["convert", "--import", "mine.py", "run", "--import=other"])
    (['mine.py', 'other'], ['convert', 'run'])
    """
    names, rest, arguments = list[str](), list[str](), iter(argv)
    for word in arguments:
        flag, equals, value = word.partition("=")
        if flag != IMPORT_FLAG:
            rest.append(word)
        elif value := value if equals else next(arguments, ""):
            names.append(value)
        else:
            raise ConfigError([Problem(IMPORT_FLAG, "", "needs a value", "Give a file or a dotted name.")])
    return names, rest


@lru_cache(maxsize=1)
def import_installed_plugins() -> None:
    """Imports every installed package with an entry point in our group, once per process."""
    for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        try:
            entry.load()
        except Exception as error:
            rule = f"is a plug-in of an installed package ({entry.value}) and fails: {type(error).__name__}: {error}"
            raise ConfigError([Problem(entry.name, "", rule, "Mend or uninstall the package.")]) from error


def _import_named(module: NamedImport) -> Iterator[Problem]:
    if not is_file_name(module.name) and module.name in sys.modules:
        return
    path = _locate(module.name)
    if path is None:
        yield _missing(module)
        return
    if module.file is not None and str(path) not in _consented():
        rule = f"is named by {module.file}: it would run the code in {path}, and a file's word is not enough for that"
        yield Problem(IMPORT_FLAG, module.name, rule, f"If you trust that code, add {IMPORT_FLAG} {module.name}.")
        return
    if module.file is None:
        _record_consent(path)
    failure = _run_module(module.name, path)
    if failure is not None:
        fix = "Mend it; importing it in Python shows the whole traceback."
        yield Problem(IMPORT_FLAG, module.name, f"fails with {failure}", fix)


def _missing(module: NamedImport) -> Problem:
    where = "" if module.file is None else f" ({module.file} names it)"
    if is_file_name(module.name):
        rule = f"does not exist{where}: looked for the file {os.path.abspath(module.name)}"
        fix = "Give its path, from here or from /."
        if module.file is not None:
            fix = f"Put it back; or, if it was moved, add {IMPORT_FLAG} PATH, where PATH ends in {module_file_name(module.name)}."
        return Problem(IMPORT_FLAG, module.name, rule, fix)
    rule = f"is no module that Python finds{where}: looked in {os.getcwd()} and the {len(sys.path)} folders of sys.path"
    fix = "Give the path of its file, start in the folder that holds it, or put that folder into PYTHONPATH."
    return Problem(IMPORT_FLAG, module.name, rule, fix)


def _locate(name: str) -> Path | None:
    """Returns the file of a module without running anything; None if there is none."""
    if is_file_name(name):
        path = Path(name).resolve()
        return path if path.is_file() else None
    places: Sequence[str] | None = [*sys.path, os.getcwd()]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if places is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None


def _run_module(name: str, path: Path) -> str | None:
    """Imports a module; returns the error that its code raised."""
    try:
        if is_file_name(name):
            _import_file(path)
        else:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
            importlib.import_module(name)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" ({path}:{frames[-1].lineno})" if frames else ""
        return f"{type(error).__name__}: {error}{line}"
    return None


def _import_file(path: Path) -> None:
    name = f"{_FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _consented() -> set[str]:
    folder = private_folder(_RECORD)
    try:
        return set() if folder is None else set((folder / "files").read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return set()


def _record_consent(path: Path) -> None:
    """Records the file; where that is not possible, the user is asked again next time."""
    folder, known = private_folder(_RECORD), _consented()
    if folder is None or str(path) in known or "\n" in str(path):
        return
    try:
        write_atomic(folder / "files", "".join(f"{line}\n" for line in sorted({*known, str(path)})).encode())
    except OSError:
        return
