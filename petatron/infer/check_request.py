"""Whether a model can serve a request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from petatron.base.errors import DataError
from petatron.data.tokenizer import Tokenizer
from petatron.infer.sampling_params import SamplingParams


class ServedModel(Protocol):
    """max_length: tokens of prompt and answer together. reads_only: why it continues no text; None: it does. source_length: the most
    tokens of a prompt that an encoder reads; the answer is then a text of its own."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def reads_only(self) -> str | None: ...
    @property
    def source_length(self) -> int | None: ...


def check_request(prompt_ids: Sequence[int], params: SamplingParams, model: ServedModel) -> None:
    """Raises `DataError` if a model cannot continue a prompt as asked."""
    asks_to_read = params.pooling is not None or params.best_items is not None
    if model.reads_only is not None and (not asks_to_read or params.max_new_tokens):
        raise DataError(model.reads_only)
    if params.best_items is not None and model.reads_only is None:
        raise DataError("This model continues text, and recommends no items. Serve one of --model-type recommender.")
    if model.source_length is None:
        check_prompt(prompt_ids, params.max_new_tokens, positions=model.max_length - 1, vocab_size=model.vocab_size)
    else:
        check_prompt(prompt_ids, 0, positions=model.source_length, vocab_size=model.vocab_size)
        _check_answer_of_decoder(params, model.max_length - 1)
    named = (*params.logit_bias, *params.stop_ids, *(params.allowed_ids or ()), *chain(*params.bad_words_ids))
    foreign = [token for token in named if not 0 <= token < model.vocab_size]
    if foreign:
        raise DataError(
            f"Ids {', '.join(map(str, foreign[:5]))} of logit_bias, stop_ids, allowed_ids or bad_words_ids are not among the model's "
            f"{model.vocab_size} ids."
        )
    if params.stop_strings and model.tokenizer is None:
        raise DataError("Stop texts need a tokenizer, and the model has none. Use stop ids.")
    if params.constraint is not None and model.tokenizer is None:
        raise DataError("A constraint on the text needs a tokenizer, and the model has none.")


def _check_answer_of_decoder(params: SamplingParams, positions: int) -> None:
    """An answer begins with a token of its own, after the prompt that the encoder reads."""
    if params.max_new_tokens > positions:
        raise DataError(
            f"The model's decoder has {positions} positions, not {params.max_new_tokens}. Ask for fewer tokens."
        )
    if params.prompt_logprobs is not None or params.pooling is not None:
        raise DataError("An encoder reads the prompt, so nothing predicts its tokens: leave out what asks for them.")


def check_prompt(prompt_ids: Sequence[int], max_new_tokens: int, *, positions: int, vocab_size: int) -> None:
    """Raises `DataError` if a model of so many positions and ids cannot continue a prompt by so many tokens."""
    if not prompt_ids:
        raise DataError("The prompt is empty, and there is nothing to continue. Give at least one token.")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise DataError(
            f"The prompt has ids {min(prompt_ids)}..{max(prompt_ids)}, but the model's vocabulary has {vocab_size} ids. "
            "Encode it with the tokenizer the model was trained with."
        )
    # The last new token is never an input, so it needs no position.
    room = positions + 1 - len(prompt_ids)
    if room < 1:
        raise DataError(
            f"The prompt has {len(prompt_ids)} tokens, but the model has {positions} positions. Shorten the prompt."
        )
    if max_new_tokens > room:
        raise DataError(
            f"A prompt of {len(prompt_ids)} tokens leaves room for {room} new ones in the model's {positions} positions, not "
            f"{max_new_tokens}. Ask for fewer, or shorten the prompt."
        )
