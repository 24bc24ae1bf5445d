"""Downloads models by their name on the Hugging Face hub (OWNER/NAME or OWNER/NAME@REVISION), wherever a model folder is accepted.

huggingface_hub downloads into its own cache, resumes interrupted downloads, and uses the user's token and mirror (HF_ENDPOINT). Only
settings, tokenizer and safetensors files are downloaded, never pickles or code.
"""

from __future__ import annotations

import errno
import importlib
import re
from pathlib import Path
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.base.model_companion_files import COMPANION_FILES
from petatron.base.model_folder_file_names import CONFIG_FILE, is_hf_folder
from petatron.base.terminal_escape import printable, raw_output

_LIBRARY = "huggingface_hub"
_NAME = re.compile(r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_NOT_READ = ("*/*", "consolidated*")
"""Other copies of the weights: in subfolders (original/, onnx/), and Mistral's format."""


def local_model(name: str | Path, *, where: str = "--from", settings_only: bool = False) -> Path:
    """Returns the folder of a model: the path itself, the folder of a config.json, or a folder in the hub's cache.

    A path that neither exists nor can be a name is returned unchanged. `where` names the argument in errors. With
    `settings_only` the weights and the tokenizer are not downloaded.

    >>> local_model("runs/mine/step-00000010")
    PosixPath('runs/mine/step-00000010')
    """
    path = Path(name)
    if path.name == CONFIG_FILE and path.is_file():
        return path.parent
    match = _NAME.fullmatch(str(name))
    if match is None or path.exists() or Path(match["owner"]).exists():
        return path
    repository = f"{match['owner']}/{match['name']}"
    folder = _download(repository, match["revision"], where=where, settings_only=settings_only)
    if not (folder / CONFIG_FILE).is_file():
        rule = f"has no {CONFIG_FILE} on the hub, so it is no model of transformers"
        raise ConfigError([Problem(where, str(name), rule, "Name another repository, or convert this one first.")])
    if not settings_only and not is_hf_folder(folder):
        rule = "has no weights as safetensors on the hub; pickles can run any code, and are not downloaded"
        raise ConfigError([Problem(where, str(name), rule, "Use a repository with safetensors.")])
    return folder


def _download(repository: str, revision: str | None, *, where: str, settings_only: bool) -> Path:
    try:
        library: Any = importlib.import_module(_LIBRARY)
    except ImportError as error:
        rule = "is no folder here, and a name on the Hugging Face hub needs huggingface-hub, which is not installed"
        fix = (
            f"pip install huggingface-hub; or elsewhere `hf download {repository} --local-dir FOLDER`, and give FOLDER."
        )
        raise ConfigError([Problem(where, repository, rule, fix)]) from error
    files = (CONFIG_FILE,) if settings_only else (CONFIG_FILE, *COMPANION_FILES, *_WEIGHTS)
    try:
        with raw_output():  # the library draws progress bars
            folder = library.snapshot_download(
                repository, revision=revision, allow_patterns=list(files), ignore_patterns=list(_NOT_READ)
            )
    except Exception as error:
        page = f"{library.constants.ENDPOINT}/{repository}"
        raise ConfigError([Problem(where, repository, *_failure(library.errors, error, repository, page))]) from error
    return Path(folder)


def _failure(errors: Any, error: Exception, repository: str, page: str) -> tuple[str, str]:
    """Returns the cause and the remedy. The order matters: some errors are subclasses of others."""
    if isinstance(error, errors.GatedRepoError):
        login = "Accept its terms there, then run `hf auth login` (or set HF_TOKEN)."
        return f"is gated: its owner gives access by request on {page}", login
    if isinstance(error, errors.RepositoryNotFoundError):
        fix = "Check the name or the path; for a private model run `hf auth login` (or set HF_TOKEN) first."
        return f"is neither a folder here, nor a model at {page}, or it is private", fix
    if isinstance(error, errors.RevisionNotFoundError):
        return "has no such revision", f"{page}/commits/main lists them; leave @REVISION out for the newest."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "Free space, or set HF_HOME to a folder on a larger disk; downloading again resumes."
        return "does not fit on the disk", fix
    said = printable(str(error).strip().split("\n")[0], max_chars=200) or type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HfHubHTTPError) and status is not None:
        return f"is refused by the hub with HTTP {status}: {said}", "Try again later; what is downloaded is kept."
    fix = f"Check the path; or download it where there is a network, `hf download {repository} --local-dir FOLDER`, and give FOLDER."
    return f"is no folder here, and {page} cannot be reached ({type(error).__name__}: {said})", fix
