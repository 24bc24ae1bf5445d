"""Hubs of public datasets: the Hugging Face hub, a mirror of it, or a folder laid out as OWNER/NAME/files.

The hub library downloads into its own cache, resumes what was interrupted and knows the user's token. Whatever goes wrong with it
is one `DataError` here that says what to do.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from petatron.base.errors import DataError
from petatron.base.format_text import abbreviate_names
from petatron.base.safe_files import symlink_target_outside
from petatron.base.terminal_escape import printable, raw_output
from petatron.base.untrusted_files import not_a_file_reason, read_limited_bytes, reading_untrusted
from petatron.config.yaml_limits import limited_loader
from petatron.data.data_file_error import data_file_error

HUB_URL = "https://huggingface.co"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_CARD_BYTES = 1 << 20
_MAX_LICENCE_CHARS = 200
# An answer of the hub about more files at once may be cut off.
_SIZES_PER_REQUEST = 500


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset as its hub describes it. A folder has no revisions."""

    repository: str
    revision: str | None
    license: str | None
    page: str
    files: tuple[str, ...]


class DatasetHub(Protocol):
    """A place that has datasets by the name OWNER/NAME."""

    def describe(self, repository: str, revision: str | None) -> HubDataset: ...

    def file_sizes(self, dataset: HubDataset, names: Sequence[str]) -> dict[str, int]: ...

    def local_path(self, dataset: HubDataset, name: str) -> Path:
        """Returns a file's path on this machine, downloading it if needed."""
        ...


def open_hub(place: str | None) -> DatasetHub:
    """`place` is a folder, the address of a mirror, or None for the hub itself."""
    if place is None or place.startswith(("http://", "https://")):
        return HuggingFaceHub(place)
    return FolderHub(Path(place))


def check_repository_name(repository: str) -> None:
    """
    >>> check_repository_name("roneneldan/TinyStories")
    >>> check_repository_name("../..")
    Traceback (most recent call last):
    petatron.base.errors.DataError: ../.. is not the name of a dataset. Write OWNER/NAME, as in roneneldan/TinyStories.
    """
    if not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise DataError(
            f"{printable(repository)} is not the name of a dataset. Write OWNER/NAME, as in roneneldan/TinyStories."
        )


class FolderHub:
    """Datasets in a folder, for machines without a network and for tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self, repository: str, revision: str | None) -> HubDataset:
        """Lists the files and reads the license in README.md."""
        check_repository_name(repository)
        folder = self._folder / repository
        if revision is not None:
            raise DataError(f"--revision {revision}: {folder} is a folder and has no revisions. Leave the flag out.")
        if not folder.is_dir():
            raise DataError(
                f"{folder} does not exist. With --hub FOLDER the files of a dataset are in FOLDER/OWNER/NAME; on a machine with a "
                f"network, `hf download {repository} --repo-type dataset --local-dir {folder}` puts them there."
            )
        names = tuple(sorted(_files_below(folder)))
        # Python keeps bytes of a name that are no text as surrogates, which nothing can write.
        strange = [printable(name) for name in names if any("\ud800" <= character <= "\udfff" for character in name)]
        if strange:
            raise DataError(
                f"{folder} has files whose names are not UTF-8: {abbreviate_names(strange)}. Rename them; a dataset of the hub has none."
            )
        return HubDataset(repository, None, _card_license(folder), str(folder), names)

    def file_sizes(self, dataset: HubDataset, names: Sequence[str]) -> dict[str, int]:
        return {name: self.local_path(dataset, name).stat().st_size for name in names}

    def local_path(self, dataset: HubDataset, name: str) -> Path:
        return _file_of(self._folder / dataset.repository, name)


def _file_of(folder: Path, name: str) -> Path:
    """A file of a dataset's folder, which must not be a link out of it."""
    path = folder / name
    if why := not_a_file_reason(path):
        raise data_file_error(path, why)
    if (target := symlink_target_outside(path, folder)) is not None:
        raise DataError(f"{path} is a link to {target}, outside of the dataset. Put the file itself there.")
    return path


def _files_below(folder: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name).relative_to(folder).as_posix() for name in files if not name.startswith("."))


def _card_license(folder: Path) -> str | None:
    """The license of a dataset card's YAML head."""
    if not os.path.lexists(folder / "README.md"):
        return None
    card = _file_of(folder, "README.md")
    import yaml

    with reading_untrusted(card, data_file_error):
        head = re.match(
            r"---\r?\n(.*?)^---", read_limited_bytes(card, _MAX_CARD_BYTES).decode(), re.DOTALL | re.MULTILINE
        )
        settings = yaml.load(head[1], limited_loader()) if head else None
    return license_text(settings.get("license")) if isinstance(settings, dict) else None


def license_text(license: object) -> str | None:
    """A card has one license or a list of them.

    >>> license_text("odc-by"), license_text(["cc-by-sa-3.0", "gfdl"]), license_text(None)
    ('odc-by', 'cc-by-sa-3.0, gfdl', None)
    """
    names = [license] if isinstance(license, str) else license if isinstance(license, list | tuple) else []
    text = ", ".join(str(name) for name in names)
    return printable(text, max_chars=_MAX_LICENCE_CHARS) or None


class HuggingFaceHub:
    """The hub, or a mirror, through the `huggingface_hub` library and its cache."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._library: Any = import_fetch_library("huggingface_hub")

    def describe(self, repository: str, revision: str | None) -> HubDataset:
        check_repository_name(repository)
        api = self._library.HfApi(endpoint=self._endpoint)
        page = f"{api.endpoint}/datasets/{repository}"
        with self._asking(repository, page):
            info = api.dataset_info(repository, revision=revision)
        card = info.card_data
        names = tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
        return HubDataset(repository, info.sha, license_text(card.get("license") if card else None), page, names)

    def file_sizes(self, dataset: HubDataset, names: Sequence[str]) -> dict[str, int]:
        api = self._library.HfApi(endpoint=self._endpoint)
        sizes: dict[str, int] = {}
        with self._asking(dataset.repository, dataset.page):
            for start in range(0, len(names), _SIZES_PER_REQUEST):
                asked = list(names[start : start + _SIZES_PER_REQUEST])
                entries = api.get_paths_info(dataset.repository, asked, revision=dataset.revision, repo_type="dataset")
                sizes |= {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
        return sizes

    def local_path(self, dataset: HubDataset, name: str) -> Path:
        if printable(name) != name:  # the library draws a progress bar with the name
            raise DataError(f"{dataset.repository} has a file with control characters in its name: {printable(name)}.")
        with self._asking(dataset.repository, dataset.page), raw_output():
            path = self._library.hf_hub_download(
                dataset.repository, name, repo_type="dataset", revision=dataset.revision, endpoint=self._endpoint
            )
        return Path(path)

    @contextmanager
    def _asking(self, repository: str, page: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise DataError(self._failure(error, repository, page)) from error

    def _failure(self, error: Exception, repository: str, page: str) -> str:
        """One sentence for what went wrong and one for what to do. The order matters: some errors are kinds of others."""
        errors = self._library.errors
        if isinstance(error, errors.GatedRepoError):
            return (
                f"{repository} is gated: its owner gives access by request. Accept its terms on {page}, then run `hf auth login` "
                "(or set HF_TOKEN), and fetch again."
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"{repository} is not on the hub, or is private. Check its name on {page}; for a private dataset run "
                "`hf auth login` (or set HF_TOKEN) first."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{repository} has no such revision. {page}/commits/main lists them; leave --revision out for the newest."
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"The disk is full while a file of {repository} is downloaded. Free space, or set HF_HOME to a folder on a larger "
                "disk; fetching again resumes."
            )
        said = printable(str(error).strip().split("\n")[0], max_chars=300) or type(error).__name__
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.HfHubHTTPError) and status is not None:
            return (
                f"The hub refuses {repository} with HTTP {status}: {said}. Try again later; what is downloaded is kept."
            )
        return (
            f"{page} cannot be reached ({type(error).__name__}: {said}). Without a network, copy the dataset's files to "
            f"FOLDER/{repository} and give --hub FOLDER; with a mirror, --hub https://MIRROR. What is downloaded is kept."
        )


def import_fetch_library(name: str) -> Any:
    """Imports a library of the extra `fetch`."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"`petatron data fetch` needs {name.partition('.')[0]}, which is not installed: pip install 'petatron[fetch]'."
        ) from error


def no_file_matches(dataset: HubDataset, globs: Sequence[str], names: Sequence[str]) -> DataError:
    """The error for globs that match none of the dataset's files that could be read."""
    has = (
        f"It has {abbreviate_names([printable(name) for name in names])}"
        if names
        else "It has no file that can be read"
    )
    asked = f"matches --files {' '.join(globs)}" if globs else "is named"
    return DataError(
        f"No file of {dataset.repository} {asked}. {has}. Give --files with a glob over these names (parquet, JSON lines or text)."
    )
