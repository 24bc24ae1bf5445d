"""Source folders of peers, as `--peer-path` gives them: which packages they hold, of which version, and what these need.

A folder holds packages beside each other, for instance unpacked wheels. Nothing of a peer is imported here: its imports are read from
its files, so that everything that is missing can be told at once, before anything is built.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from petatron.base.errors import Problem

_VERSION = re.compile(r"""^__version__ = ["'](?P<version>[^"']+)["']""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PeerSource:
    """A package of a peer in a folder."""

    package: str
    folder: Path

    @property
    def version(self) -> str | None:
        """The version that the metadata beside the package or the package itself names; None where neither does."""
        folders = sorted(self.folder.glob(f"{self.package}-*.dist-info"))
        if folders:
            return folders[-1].name.removesuffix(".dist-info").partition("-")[2]
        named = _VERSION.search((self.root / "__init__.py").read_text(encoding="utf-8"))
        return named["version"] if named else None

    def __str__(self) -> str:
        return self.package if self.version is None else f"{self.package} {self.version}"

    @property
    def root(self) -> Path:
        return self.folder / self.package

    def make_importable(self) -> None:
        """Puts the folder where Python looks first."""
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))

    def copy_importable(self, folder: Path, replaced: Mapping[str, str] | None = None) -> None:
        """Copies the package into a folder where Python looks first; `replaced`: the content of some of its files there.

        The copy has no namespace packages: torch reads every module's `__file__`, which these lack. Does nothing where the package is
        imported already.
        """
        if self.package in sys.modules:
            return
        copy = folder / self.package
        shutil.copytree(self.root, copy, ignore=shutil.ignore_patterns("__pycache__", "experiments"))
        for name, text in (replaced or {}).items():
            (copy / name).write_text(text)
        for path in [path for path in copy.rglob("*") if path.is_dir()]:
            (path / "__init__.py").touch()
        sys.path.insert(0, str(folder))


def peer_sources(package: str, paths: Sequence[Path]) -> list[PeerSource]:
    """Returns the folders that hold a package, in the order given."""
    return [PeerSource(package, path) for path in paths if (path / package / "__init__.py").is_file()]


def folder_problems(paths: Sequence[Path], fix: str) -> list[Problem]:
    """Returns which of the folders are none."""
    wrong = [(path, "is not a folder" if path.exists() else "does not exist") for path in paths if not path.is_dir()]
    return [Problem("--peer-path", str(path), rule, fix) for path, rule in wrong]


@dataclass(slots=True)
class Imports:
    """What modules of a source import when they are imported: names of torch, and other packages."""

    torch_names: set[tuple[str, str]] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)

    def missing_torch_names(self) -> list[str]:
        """Returns the names that the installed torch does not have."""
        return sorted(f"{module}.{name}" for module, name in self.torch_names if not _has_name(module, name))

    def missing_packages(self, folder: Path) -> list[str]:
        """Returns the packages that are neither installed nor in the folder."""
        there = {path.name.removesuffix(".py") for path in folder.iterdir()}
        return sorted(package for package in self.packages - there if importlib.util.find_spec(package) is None)


def _has_name(module: str, name: str) -> bool:
    try:
        submodule = f"{module}.{name}"
        return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(submodule) is not None
    except ImportError:
        return False


def read_imports(source: PeerSource, modules: Sequence[str]) -> Imports:
    """Reads the imports of these modules and of all that they import from the folder.

    Imports in functions, in `try` and in `if` do not count: the package does without them.
    """
    imports, seen, left = Imports(), set[Path](), [source.package, *modules]
    while left:
        for path in _module_files(source.folder, left.pop()):
            if path in seen:
                continue
            seen.add(path)
            for module, names in _top_level_imports(path, source.folder):
                package = module.partition(".")[0]
                if package == "torch":
                    imports.torch_names |= {(module, name) for name in names}
                elif package not in sys.stdlib_module_names:
                    imports.packages.add(package)
                    left += [module, *(f"{module}.{name}" for name in names)]
    return imports


def _module_files(folder: Path, module: str) -> Iterator[Path]:
    """Yields the files that run when a module is imported: those of the packages around it, and its own."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:count])
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file():
                yield path


def _top_level_imports(path: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields modules with the names that a file imports from them."""
    parents = path.relative_to(folder).parts[:-1]
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            yield from ((alias.name, []) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            above = list(parents[: len(parents) - statement.level + 1]) if statement.level else []
            module = ".".join([*above, *([statement.module] if statement.module else [])])
            yield module, [alias.name for alias in statement.names]
