"""lm_eval and the server need their extras; without them these tests have nothing to test."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("lm_eval", "tenacity", "fastapi"))) else ["test_*.py"]
