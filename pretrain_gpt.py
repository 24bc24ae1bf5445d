"""Entry point with the name Megatron users' scripts call: `torchrun ... pretrain_gpt.py FLAGS` is `petatron train FLAGS` with Megatron's
defaults."""

from petatron.cli.main import entry

if __name__ == "__main__":
    entry("train", "--megatron-defaults")
