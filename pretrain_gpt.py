"""Entry point with the name Megatron users' scripts call: `torchrun ... pretrain_gpt.py FLAGS` is `petatron train FLAGS`."""

import sys

from petatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
