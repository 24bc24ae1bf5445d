"""Entry point with the name Megatron users' scripts call: `pretrain_mamba.py FLAGS` is `petatron train --is-hybrid-model FLAGS`, with
Megatron's defaults."""

from petatron.cli.main import entry

if __name__ == "__main__":
    entry("train", "--megatron-defaults", "--is-hybrid-model")
