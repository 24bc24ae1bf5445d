"""A command line in Megatron's flags while it is drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SEQ = 64


@dataclass
class CommandLine:
    """The flags of one case while topics add to them, and what later topics need to know of earlier ones."""

    draw: random.Random
    ramps: bool
    flags: list[str] = field(default_factory=list)
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    layers: int = 4
    heads: int = 4
    width: int = 64
    is_hybrid: bool = False
    is_latent: bool = False
    has_experts: bool = False
    rotary: bool = False

    def add(self, *words: object) -> None:
        self.flags += [str(word) for word in words]

    def maybe(self, chance: float, *words: object) -> bool:
        """Adds words with a chance; returns whether it did."""
        if self.draw.random() >= chance:
            return False
        self.add(*words)
        return True

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def drop(self, name: str, num_values: int) -> None:
        """Removes a flag, if it is there, with its values."""
        if name in self.flags:
            at = self.flags.index(name)
            del self.flags[at : at + 1 + num_values]
