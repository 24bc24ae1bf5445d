"""Finds the files to copy along with a model's weights (tokenizer, chat template): from its own folder, and without remote code.

A folder that came from others may have `chat_template.jinja` as a link to somebody's private key, which a copy would put into the
new model for all to read. And `auto_map` in a config names Python files of a hub repository, which readers run once a user
allows it: a converted model needs none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from petatron.base.errors import PetatronError
from petatron.base.safe_files import symlink_target_outside
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted

COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""Files of a model folder that are copied along with the weights."""
_MAX_BYTES = 1 << 28
REMOTE_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines", "attn_implementation", "_attn_implementation")
"""Settings that name the code that loads a model, the last two because they may name a repository of kernels."""


def find_companion_files(
    folder: Path, error_class: type[PetatronError], *, names: Iterable[str] = COMPANION_FILES
) -> dict[str, Path]:
    """Returns those of these files that a folder has; an error names all that are links out of it."""
    files = {name: folder / name for name in names if (folder / name).is_file()}
    strange = [
        f"{name} -> {to}" for name, path in files.items() if (to := symlink_target_outside(path, folder)) is not None
    ]
    if strange:
        raise error_class(
            f"{folder} has links to files elsewhere, which would be copied into the new model: {', '.join(strange)}. Put the files "
            "themselves there if they belong to the model, or remove the links."
        )
    return files


def read_companion_file(path: Path, error_class: type[PetatronError]) -> bytes:
    """Reads one of them; a config without the settings that name code, anything else byte for byte."""
    with reading_untrusted(path, lambda file, why: error_class(f"{file} {why}. Copy it again, or remove it.")):
        content = read_limited_bytes(path, _MAX_BYTES)
    if not path.name.endswith("config.json"):
        return content
    try:
        settings = json.loads(content)
        stripped = strip_remote_code(settings)
    except (ValueError, RecursionError) as cause:
        raise error_class(f"{path} is not valid JSON: {cause}. Copy it again, or remove it.") from cause
    return content if stripped == settings else (json.dumps(stripped, indent=2) + "\n").encode()


def strip_remote_code(value: Any) -> Any:
    """Removes settings that name code, at any depth.

    >>> strip_remote_code({"model_type": "llama", "auto_map": {"AutoModel": "a.B"}, "text_config": {"trust_remote_code": True}})
    {'model_type': 'llama', 'text_config': {}}
    """
    if isinstance(value, Mapping):
        return {key: strip_remote_code(item) for key, item in value.items() if key not in REMOTE_CODE_KEYS}
    return [strip_remote_code(item) for item in value] if isinstance(value, list) else value
