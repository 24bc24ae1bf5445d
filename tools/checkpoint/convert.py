"""`petatron checkpoint convert` under the path and with the flags that Megatron users' scripts call; runs from a clone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from petatron.cli.main import main
from petatron.cli.subcommands.megatron_convert_flags import parser

if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or "-h" in words or "--help" in words:
        parser().print_help()
        sys.exit(0 if words else 2)
    sys.exit(main(["checkpoint", "convert", *words]))
