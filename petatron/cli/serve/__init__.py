"""`petatron serve`: answers requests over HTTP with the model of a checkpoint."""

from petatron.cli.serve.arguments import parser
from petatron.cli.serve.start_server_ranks import main

__all__ = ["main", "parser"]
