"""What a request may and may not draw besides a constraint, and what of its ids reaches the text."""

from __future__ import annotations

from functools import cache

import pytest

from petatron.base.errors import ConfigError, DataError
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import Constraint, SamplingParams
from petatron.infer.text_stream import TextStream
from tests.unit.infer.test_sample import model_in


@cache
def engine() -> Engine:
    model = model_in("--seq-length 64 --vocab-size 300")
    return Engine(model, ByteTokenizer(), EngineOptions(page_size=4, max_sequences=4, num_pages=60))


def draw(**params) -> Completion:
    wanted = SamplingParams(**{"max_new_tokens": 24, "temperature": 2.0, **params})
    return engine().complete([[1, 2, 3]], wanted)[0][0]


def test_only_allowed_ids_are_drawn():
    answer = draw(allowed_ids=(97, 98, 120))
    assert set(answer.ids) <= {97, 98, 120} and len(set(answer.ids)) > 1
    assert set(draw(allowed_ids=(97,), temperature=0.0).ids) == {97}


def test_allowed_ids_and_a_constraint_hold_together():
    answer = draw(allowed_ids=(97, 98), constraint=Constraint(kind="regex", grammar="[b-z]{5}"))
    assert answer.text == "bbbbb" and answer.finish_reason == "stop"
    nothing = draw(allowed_ids=(97,), constraint=Constraint(kind="regex", grammar="[b-z]{5}"))
    assert nothing.text == "" and nothing.finish_reason == "length"


def test_a_bad_word_is_never_written():
    allowed = (97, 98)
    words = ((97, 98), (98, 98, 98))
    texts = [draw(allowed_ids=allowed, bad_words_ids=words, sample=sample).text for sample in range(3)]
    assert not any("ab" in text or "bbb" in text for text in texts)
    free = [draw(allowed_ids=allowed, sample=sample).text for sample in range(3)]
    assert any("ab" in text for text in free)
    assert set(draw(allowed_ids=allowed, bad_words_ids=((97,),)).text) == {"b"}


def test_a_stop_is_kept_where_it_is_asked_for():
    stream = TextStream(ByteTokenizer(), SamplingParams(stop_strings=("end", "en"), keep_stop=True))
    assert "".join(stream.add(byte) for byte in b"the end of") == "the en" and stream.stop == "en"
    answer = draw(allowed_ids=(97,), stop_ids=(97,), keep_stop=True)
    assert answer.text == "a" and answer.stop == 97
    assert draw(allowed_ids=(97,), stop_ids=(97,)).text == ""


def test_hidden_ids_are_no_text():
    answer = draw(allowed_ids=(97, 98), hidden_ids=(97,))
    assert answer.text == "b" * answer.ids.count(98) and 97 in answer.ids


def test_ids_outside_the_vocabulary_are_refused():
    for wrong in ({"allowed_ids": (300,)}, {"bad_words_ids": ((1, 300),)}):
        with pytest.raises(DataError, match="300"):
            draw(**wrong)
    for wrong in ({"allowed_ids": ()}, {"bad_words_ids": ((),)}):
        with pytest.raises(ConfigError):
            draw(**wrong)
