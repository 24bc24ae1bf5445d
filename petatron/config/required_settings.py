"""Settings that a resolved config may leave open, because not every use of it needs them: the value, or an error that asks for it.

A plan needs no learning rate, a dense model no experts, and the vocabulary may be that of a tokenizer that nobody has opened yet.
"""

from __future__ import annotations

from typing import TypeVar

from petatron.base.errors import ConfigError, Problem
from petatron.config.schema.fields import fields_by_name
from petatron.config.schema.model import ModelConfig

_ValueT = TypeVar("_ValueT")

_NO_VOCABULARY = Problem(
    where="--vocab-size",
    value="",
    rule="is not known: there is neither a tokenizer nor a preset that says it",
    fix="Give --tokenizer-model (or --vocab-file and --merge-file), or --vocab-size N",
)


def required(name: str, value: _ValueT | None) -> _ValueT:
    """Returns the value of the field `name`; `ConfigError` if it is not set.

    >>> required("lr", 0.5)
    0.5
    """
    if value is None:
        info = fields_by_name()[name]
        raise ConfigError([Problem(info.flag, "", "is not set, and is needed here", info.meaning)])
    return value


def known_vocab_size(model: ModelConfig) -> int:
    """Returns the number of token ids; `ConfigError` if no setting says it and no tokenizer was opened.

    >>> known_vocab_size(ModelConfig(vocab_size=256))
    256
    """
    if model.vocab_size is None:
        raise ConfigError([_NO_VOCABULARY])
    return model.vocab_size
