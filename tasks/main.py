"""`petatron eval` under the name and with the flags that Megatron users' scripts call; runs from a clone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from petatron.cli.main import entry

if __name__ == "__main__":
    entry("eval", "--megatron-tasks")
