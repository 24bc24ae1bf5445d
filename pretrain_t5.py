"""Entry point with the name Megatron users' scripts call: `pretrain_t5.py FLAGS` is `petatron train --model-type t5 FLAGS`, with
Megatron's defaults."""

from petatron.cli.main import entry

if __name__ == "__main__":
    entry("train", "--megatron-defaults", "--model-type", "t5")
