"""Checkpoints that are wrong in meaning only: manifest and tables are changed consistently, digests included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from petatron.checkpoint.files import manifest

TABLE = "state/rank-00000.table.json"


def rewrite_manifest(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the fields of manifest.json."""
    path = step / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("digest")
    change(body)
    path.write_text(json.dumps({**body, "digest": manifest._digest(body)}, indent=1))


def rewrite_table(step: Path, change: Callable[[dict[str, Any]], object], name: str = TABLE) -> None:
    """Change the fields of a rank's table."""
    path = step / name
    body = json.loads(path.read_text())
    change(body)
    content = json.dumps(body).encode()
    path.write_bytes(content)
    row = [len(content), manifest.table_digest(content)]
    rewrite_manifest(step, lambda head: head["tables"].update({name: row}))


def tables(step: Path) -> dict[str, dict[str, Any]]:
    """Every table of a step by its path."""
    names = json.loads((step / "manifest.json").read_text())["tables"]
    return {name: json.loads((step / name).read_text()) for name in names}
