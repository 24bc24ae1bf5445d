"""Entry point with the name Megatron users' scripts call: `pretrain_bert.py FLAGS` is `petatron train --model-type bert FLAGS`, with
Megatron's defaults."""

from petatron.cli.main import entry

if __name__ == "__main__":
    entry("train", "--megatron-defaults", "--model-type", "bert")
