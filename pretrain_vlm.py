"""Entry point with the name Megatron users' scripts call: `pretrain_vlm.py FLAGS` is `petatron train --model-type vlm FLAGS`, with
Megatron's defaults."""

from petatron.cli.main import entry

if __name__ == "__main__":
    entry("train", "--megatron-defaults", "--model-type", "vlm")
