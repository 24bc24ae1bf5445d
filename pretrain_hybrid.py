"""Entry point with the name Megatron users' scripts call: `pretrain_hybrid.py FLAGS` is `petatron train --is-hybrid-model FLAGS`."""

from petatron.cli.main import entry

if __name__ == "__main__":
    entry("train", "--is-hybrid-model", "--megatron-defaults")
