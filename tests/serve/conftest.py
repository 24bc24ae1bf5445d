"""The server needs its extra; without it these tests have nothing to test."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = (
    [] if importlib.util.find_spec("fastapi") and importlib.util.find_spec("openai") else ["test_*.py"]
)
