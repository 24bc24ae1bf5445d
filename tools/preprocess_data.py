"""`petatron data preprocess` under the name and with the flags that Megatron users' scripts call; runs from a clone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from petatron.cli.main import main

# Worker processes import this file again under another name and must not start a second job.
if __name__ == "__main__":
    sys.exit(main(["data", "preprocess", *sys.argv[1:]]))
