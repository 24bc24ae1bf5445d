"""`petatron serve` under the name and with the flags and the port that Megatron users' scripts call; runs from a clone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from petatron.base.errors import ConfigError
from petatron.cli.main import main
from petatron.port.inference_flags import server_flags

if __name__ == "__main__":
    try:
        flags = server_flags(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(["serve", "--port", "5000", *flags]))
