"""The head of the parsers of subcommands that open a CHECKPOINT."""

from __future__ import annotations

import argparse

from petatron.cli.subcommands.command_parser import CommandParser

CHECKPOINT = "the folder of a run, of one of its steps, of a Hugging Face model, or of what Megatron-LM saved"
WEIGHTS_HELP = "kind of state to take as the weights, as checkpoint inspect lists it: ema (the model's)"


def checkpoint_parser(
    subcommand: str, usage: str, description: str, *, epilog: str, keep_lines: bool = False
) -> CommandParser:
    """Returns the parser of `petatron SUBCOMMAND CHECKPOINT ...`; words that it does not know are left to `petatron train`.

    usage: what follows CHECKPOINT. description: its `{checkpoint}` becomes what a CHECKPOINT is. keep_lines: of the epilog.
    """
    root = CommandParser(
        prog=f"petatron {subcommand}",
        usage=f"petatron {subcommand} CHECKPOINT {usage}",
        description=description.format(checkpoint=CHECKPOINT),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if keep_lines else argparse.HelpFormatter,
    )
    root.add_argument("--weights", metavar="KIND", help=WEIGHTS_HELP)
    return root
