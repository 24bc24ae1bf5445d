"""Files that go with a model's weights wherever they go: copied only from the model's own folder, and without naming any code.

A folder that came from others may have `chat_template.jinja` as a link to somebody's private key, which a copy would put into the
new model for all to read. And `auto_map` in a config names Python files of a hub repository, which readers run once a user
says that they may: a model that was converted needs none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from petatron.base.errors import PetatronError
from petatron.base.safe_files import outside
from petatron.base.untrusted_files import read_bytes, reading

_MOST_BYTES = 1 << 28
NAMES_OF_CODE = ("auto_map", "trust_remote_code", "custom_pipelines", "attn_implementation", "_attn_implementation")
"""Settings that say which code reads a model, the last two because they may name a repository of kernels."""


def find_companions(folder: Path, names: Iterable[str], error: type[PetatronError]) -> dict[str, Path]:
    """Those of these files that a folder has; an error that names all that are links out of it."""
    found = {name: folder / name for name in names if (folder / name).is_file()}
    strange = [f"{name} -> {to}" for name, path in found.items() if (to := outside(path, folder)) is not None]
    if strange:
        raise error(
            f"{folder} has links to files elsewhere, which would be copied into the new model: {', '.join(strange)}. Put the files "
            "themselves there if they belong to the model, or remove the links."
        )
    return found


def read_companion(path: Path, error: type[PetatronError]) -> bytes:
    """The content of one of them; a config without the settings that name code, and else byte for byte."""
    with reading(path, lambda file, why: error(f"{file} {why}. Copy it again, or remove it.")):
        content = read_bytes(path, _MOST_BYTES)
    if not path.name.endswith("config.json"):
        return content
    try:
        settings = json.loads(content)
        kept = without_code(settings)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {cause}. Copy it again, or remove it.") from cause
    return content if kept == settings else (json.dumps(kept, indent=2) + "\n").encode()


def without_code(value: Any) -> Any:
    """Settings without those that name code, at any depth.

    >>> without_code({"model_type": "llama", "auto_map": {"AutoModel": "a.B"}, "text_config": {"trust_remote_code": True}})
    {'model_type': 'llama', 'text_config': {}}
    """
    if isinstance(value, Mapping):
        return {key: without_code(item) for key, item in value.items() if key not in NAMES_OF_CODE}
    return [without_code(item) for item in value] if isinstance(value, list) else value
