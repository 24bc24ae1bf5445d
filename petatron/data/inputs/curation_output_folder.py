"""Recognizes the output folder of a curation step: its summary and its dropped documents are no input of the next step."""

from __future__ import annotations

import json
from pathlib import Path

from petatron.base.untrusted_files import open_regular_file

SUMMARY_FILE = "summary.json"
DROPPED_FOLDER = "dropped"
_MAX_SUMMARY_BYTES = 1 << 28


def is_step_output(path: Path) -> bool:
    """Whether the folder has the summary of a step."""
    try:
        with open_regular_file(path / SUMMARY_FILE, follow_links=False) as file:
            content = json.loads(file.read(_MAX_SUMMARY_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "petatron" in content and "step" in content
