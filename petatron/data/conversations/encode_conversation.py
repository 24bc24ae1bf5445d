"""Makes token ids of a record, with the weight of each in the loss.

A conversation is rendered and encoded as a whole, and a token is learned if it has a character of an answer: so ids are those of the served
model, and no token is split at the border of two parts. Texts get what the tokenizer puts around a text, and the end-of-document token
where nothing else ends them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.conversations.answer_spans import AnswerFinder, RenderedConversation
from petatron.data.conversations.conversation_record import Conversation, ReadRecord, TextRecord, read_record
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversation_template import ConversationTemplate
from petatron.data.conversations.preference_record import read_preference, read_unpaired
from petatron.data.conversations.refused_conversation import RefusedConversation
from petatron.data.encoded_text import EncodedText, Span
from petatron.data.prompt.prompt_encoder import check_unicode, special_token, surrounding_ids, tokenizer_settings
from petatron.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ConversationTokens:
    """Token ids, and the weight of each in the loss: 0 for what is not learned."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


class ConversationEncoder:
    """Encodes records for one tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, template: ConversationTemplate, settings: ConversationSettings) -> None:
        self._tokenizer, self.settings = tokenizer, settings
        self._finder = AnswerFinder(template.of_date(settings.today), settings.values, template.tokens, template.ends)
        self._before, self._after = surrounding_ids(tokenizer)
        self._eos = special_token(tokenizer_settings(tokenizer), "eos_token")
        self._eos_is_text = (
            bool(self._eos) and tokenizer.eod is not None and tokenizer.encode(self._eos or "") != [tokenizer.eod]
        )

    def encode(self, record: ReadRecord) -> ConversationTokens:
        """Raises `RefusedConversation` for a record of which nothing can be learned."""
        encoded = self._text(record) if isinstance(record, TextRecord) else self._conversation(record)
        if not encoded.weights[1:].any():
            raise RefusedConversation(
                "nothing to learn", "has nothing that is learned: no answer of the assistant with a weight"
            )
        return encoded

    def prompt_ids(self, conversation: Conversation, length: int) -> list[int]:
        """Returns the ids that a served model continues with its answer to the first messages."""
        return self._encode(self._finder.prompt(conversation, length)).ids

    def _conversation(self, conversation: Conversation) -> ConversationTokens:
        rendered = self._finder.render(conversation)
        spans = [
            (answer.span, conversation.weights[answer.message])
            for answer in rendered.answers
            if answer.message >= conversation.first
        ]
        if self.settings.train_on == "last-answer":
            last = max((answer.message for answer in rendered.answers), default=-1)
            spans = [(answer.span, conversation.weights[last]) for answer in rendered.answers if answer.message == last]
        elif self.settings.train_on == "all":
            spans = [
                ((0, len(rendered.text)), 1.0),
                *((answer.span, conversation.weights[answer.message]) for answer in rendered.answers),
            ]
        encoded = self._encode(rendered.text)
        ids, weights = encoded.ids, _token_weights(encoded, spans)
        if self._tokenizer.eod is not None and self._lacks_end(conversation, rendered):
            ids, weights = [*ids, self._tokenizer.eod], np.append(weights, weights[-1])
        return ConversationTokens(np.array(ids, np.int32), weights)

    def _lacks_end(self, conversation: Conversation, rendered: RenderedConversation) -> bool:
        last = rendered.answers[-1] if rendered.answers else None
        if last is None or last.message < len(conversation.messages) - 1:
            return False
        return not self._finder.has_end_of_turn(rendered.text[slice(*last.span)])

    def _text(self, record: TextRecord) -> ConversationTokens:
        text = record.prompt + record.completion
        begin = 0 if self.settings.train_on == "all" else len(record.prompt)
        ends = self._tokenizer.eod is None or (self._eos is not None and text.endswith(self._eos))
        after = self._after if ends or self._tokenizer.eod in self._after else (self._tokenizer.eod, *self._after)
        encoded = self._tokenizer.encode_with_offsets(_checked(text))
        weights = _token_weights(encoded, [((begin, len(text)), 1.0)])
        return _with_ids(
            self._before, encoded.ids, weights, tuple(x for x in after if x is not None), learns_prefix=not begin
        )

    def _encode(self, text: str) -> EncodedText:
        """Encodes a rendered conversation; a tokenizer that takes the end-of-text token's name for a text gets what is around it."""
        if not self._eos_is_text or self._tokenizer.eod is None or not self._eos:
            return self._tokenizer.encode_with_offsets(_checked(text))
        ids, spans, place = list[int](), list[Span](), 0
        for number, part in enumerate(_checked(text).split(self._eos)):
            if number:
                ids.append(self._tokenizer.eod)
                spans.append((place, place + len(self._eos)))
                place += len(self._eos)
            encoded = self._tokenizer.encode_with_offsets(part)
            ids += encoded.ids
            spans += [(place + begin, place + end) for begin, end in encoded.spans]
            place += len(part)
        return EncodedText(ids, spans)


def encode_preference(encoder: ConversationEncoder, record: object) -> tuple[tuple[ConversationTokens, ...], float]:
    """Returns the rows of the chosen and of the rejected answer of a record, and no label."""
    chosen, rejected = read_preference(record, encoder.settings)
    return (encoder.encode(chosen), encoder.encode(rejected)), 0.0


def encode_unpaired(encoder: ConversationEncoder, record: object) -> tuple[tuple[ConversationTokens, ...], float]:
    """Returns the row of an answer, and whether it is desirable."""
    answer, desirable = read_unpaired(record, encoder.settings)
    return (encoder.encode(answer),), float(desirable)


def encode_conversation(encoder: ConversationEncoder, record: object) -> tuple[tuple[ConversationTokens, ...], float]:
    """Returns the row of a record, and no label. Other processes import this module to encode: it needs no torch."""
    return (encoder.encode(read_record(record, encoder.settings)),), 0.0


def _with_ids(
    before: tuple[int, ...],
    ids: list[int],
    weights: NDArray[np.float32],
    after: tuple[int, ...],
    *,
    learns_prefix: bool = False,
) -> ConversationTokens:
    parts = (np.full(len(before), float(learns_prefix), np.float32), weights, np.ones(len(after), np.float32))
    return ConversationTokens(np.array([*before, *ids, *after], np.int32), np.concatenate(parts))


def _token_weights(encoded: EncodedText, spans: list[tuple[Span, float]]) -> NDArray[np.float32]:
    """Returns the weight of each token: that of the last of the spans that have a character of it."""
    if not encoded.ids:
        return np.zeros(0, np.float32)
    tokens = np.array(encoded.spans, np.int64).reshape(-1, 2)
    first, stop = tokens[:, 0], np.maximum(tokens[:, 1], tokens[:, 0] + 1)
    weights = np.zeros(len(tokens), np.float32)
    for (begin, end), weight in spans:
        weights[(first < end) & (stop > begin)] = weight
    return weights


def _checked(text: str) -> str:
    try:
        return check_unicode(text)
    except DataError as error:
        raise RefusedConversation("wrong form", "has a text that is not valid Unicode: save it as UTF-8") from error
