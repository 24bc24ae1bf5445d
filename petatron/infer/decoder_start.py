"""The token that an answer of an encoder-decoder begins with, before the first one that is generated."""

from __future__ import annotations

from petatron.base.errors import DataError
from petatron.data.tokenizer import Tokenizer
from petatron.infer.engine_options import EngineOptions


def decoder_start_id(tokenizer: Tokenizer | None, options: EngineOptions, vocab_size: int) -> int:
    """Returns the id of the options, else what samples of training begin with: the tokenizer's first token, or its padding.

    >>> decoder_start_id(None, EngineOptions(decoder_start_id=0), 100)
    0
    """
    given = options.decoder_start_id
    if given is None and tokenizer is not None:
        roles = tokenizer.special_ids
        given = roles.get("bos", roles.get("pad"))
    if given is None:
        whose = "There is no tokenizer, and it" if tokenizer is None else f"The tokenizer {tokenizer.name}"
        raise DataError(
            f"{whose} names no first token and no padding, with which the answers of an encoder-decoder begin. "
            "Give EngineOptions(decoder_start_id=ID)."
        )
    if not 0 <= given < vocab_size:
        raise DataError(f"decoder_start_id {given} is not among the model's {vocab_size} ids.")
    return given
