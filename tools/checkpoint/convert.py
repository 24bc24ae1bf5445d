"""`petatron checkpoint convert` under the path and with the flags that Megatron users' scripts call; runs from a clone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from petatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["checkpoint", "convert", *sys.argv[1:]]))
