"""Constrained decoding: whatever the model draws, the answer matches, in any batch, after preemption, and in every layout."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError, DataError
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from petatron.infer.constrained_decoding import ConstraintCompiler
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.grammar import ANY_WHITESPACE
from petatron.infer.sampling_params import Constraint, SamplingParams
from tests.dist import RankPool
from tests.unit.infer.test_sample import model_in

POSITIONS = 160
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["cat", "dög"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
REGEXES = (r"a{3}", r"[a-z]{2,6}@[a-z]+\.(com|org)", r"(ja|nein|ä{1,3})?!", r"[0-9]{1,3}(,[0-9]{3}){0,2}")


@cache
def model(flags: str = "", world_size: int = 1):
    return model_in(f"--seq-length {POSITIONS} --vocab-size 300 {flags}", world_size=world_size)


@cache
def engine() -> Engine:
    return Engine(model(), ByteTokenizer(), EngineOptions(page_size=4, max_sequences=4, num_pages=60))


def draw(engine: Engine, constraint: Constraint, **params: Any) -> Completion:
    wanted = SamplingParams(max_new_tokens=POSITIONS - 10, constraint=constraint, **params)
    return engine.complete([[1, 2, 3]], wanted)[0][0]


def check_json(answer: Completion) -> None:
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    else:
        assert len(answer.ids) == POSITIONS - 10


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**40), temperature=st.sampled_from([0.0, 1.0, 50.0]), top_k=st.sampled_from([None, 3]))
def test_an_answer_has_the_schema(seed: int, temperature: float, top_k: int | None):
    constraint = Constraint(kind="json_schema", grammar=json.dumps(SCHEMA))
    check_json(draw(engine(), constraint, seed=seed, temperature=temperature, top_k=top_k))


def test_most_answers_come_to_their_end():
    constraint = Constraint(kind="json_schema", grammar=json.dumps(SCHEMA))
    params = [
        SamplingParams(max_new_tokens=150, temperature=5.0, sample=sample, constraint=constraint) for sample in range(8)
    ]
    [answers] = engine().complete([[1, 2, 3]], params)
    assert sum(answer.finish_reason == "stop" for answer in answers) >= 6, "and so the property above is not empty"


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**40), pattern=st.sampled_from(REGEXES), temperature=st.sampled_from([0.0, 30.0]))
def test_an_answer_matches_the_regular_expression(seed: int, pattern: str, temperature: float):
    answer = draw(engine(), Constraint(kind="regex", grammar=pattern), seed=seed, temperature=temperature)
    if answer.finish_reason == "stop":
        assert re.fullmatch(pattern, answer.text), answer.text


def test_it_ends_where_nothing_may_follow_and_at_a_stop_id_where_it_may():
    fixed = draw(engine(), Constraint(kind="regex", grammar="a{3}"), temperature=9.0)
    assert (fixed.text, fixed.finish_reason, fixed.stop, len(fixed.ids)) == ("aaa", "stop", None, 3)
    open_ended = Constraint(kind="regex", grammar="[a-z]{2}[a-z]*")
    answer = draw(engine(), open_ended, temperature=0.0, stop_ids=(7,), logit_bias={7: 1000.0})
    assert (len(answer.text), answer.finish_reason, answer.stop) == (2, "stop", 7), "id 7 is no text here, and may end"
    answer = draw(engine(), open_ended, temperature=0.0, logit_bias={ByteTokenizer.eod: 1000.0})
    assert (len(answer.text), answer.finish_reason, answer.stop) == (2, "stop", ByteTokenizer.eod)


def test_any_json_is_an_object():
    for seed in range(6):
        answer = draw(engine(), Constraint(kind="json"), seed=seed, temperature=20.0, logit_bias={ord("}"): 100.0})
        assert isinstance(json.loads(answer.text), dict)


@pytest.mark.parametrize(
    "constraint", [Constraint(kind="json"), Constraint(kind="json_schema", grammar=json.dumps(SCHEMA))]
)
def test_json_is_compact_unless_white_space_is_asked_for(constraint: Constraint):
    flexible = replace(constraint, whitespace=ANY_WHITESPACE)
    compact, spaced = (
        [one.text for one in engine().complete([[1, 2, 3]], [_sampled(each, number) for number in range(3)])[0]]
        for each in (constraint, flexible)
    )
    assert not any(re.sub(r'"[^"]*"', "", text).count(part) for text in compact for part in " \n\r\t")
    assert any(re.sub(r'"[^"]*"', "", text).strip().count(part) for text in spaced for part in " \n\r\t")


def _sampled(constraint: Constraint, sample: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=40, temperature=2.0, sample=sample, constraint=constraint)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('start: "ja" | "nein" /[0-9]{2}/', r"ja|nein[0-9]{2}"),
        ('root ::= "ja" | "nein" digit digit\ndigit ::= [0-9]', r"ja|nein[0-9]{2}"),
    ],
)
def test_a_grammar_of_either_notation(grammar: str, pattern: str):
    for sample in range(3):
        answer = draw(engine(), Constraint(kind="grammar", grammar=grammar), temperature=2.0, sample=sample)
        assert re.fullmatch(pattern, answer.text) and answer.finish_reason == "stop"


@pytest.mark.parametrize("grammar", ["start: nothing", "root ::= (", "", "no grammar at all"])
def test_a_grammar_that_cannot_be_read_is_refused(grammar: str):
    with pytest.raises(DataError, match="The grammar cannot be used as a constraint"):
        ConstraintCompiler(ByteTokenizer(), vocab_size=300).check(Constraint(kind="grammar", grammar=grammar))


def test_preemption_and_batches_change_nothing():
    constraint = Constraint(kind="json_schema", grammar=json.dumps(SCHEMA), whitespace=ANY_WHITESPACE)
    params = [SamplingParams(max_new_tokens=60, temperature=3.0, sample=n, constraint=constraint) for n in range(4)]
    scarce = Engine(model(), ByteTokenizer(), EngineOptions(page_size=4, max_sequences=4, num_pages=42))
    together = scarce.complete([[1, 2, 3, 4, 5, 6, 7, 8]] * 2, params)
    assert scarce.stats.preemptions > 0
    alone = [engine().complete([[1, 2, 3, 4, 5, 6, 7, 8]], each)[0][0].text for each in params]
    assert [[answer.text for answer in row] for row in together] == [alone, alone]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    text = 'the cat and the dog {"name": "kind", "ages": [12, 34]} '
    return train_bpe([text] * 20, 290, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


class SyllableTokenizer:
    """Has no files: its vocabulary is known by decoding alone. Id 4 is no text."""

    name, vocab_size, eod = "syllables", 6, None
    bod, special_ids, sentinel_ids = None, {}, ()
    words = ("ba", "na", "n", "!", "", "\ufffd")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(char) for char in text]

    def encode_batch(self, texts: Any) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        return "".join(self.words[number] for number in ids)

    def files(self) -> dict[str, bytes]:
        return {}


def test_tokens_of_several_characters(bpe: HuggingFaceTokenizer):
    constraint = Constraint(kind="json_schema", grammar=json.dumps(SCHEMA))
    whole = Engine(model(), bpe)
    for seed in range(4):
        check_json(draw(whole, constraint, seed=seed, temperature=3.0))


def test_a_tokenizer_without_files():
    tokenizer: Tokenizer = SyllableTokenizer()
    syllables = Engine(model(), tokenizer)
    constraint = Constraint(kind="regex", grammar="(ba|!n){2}n?!")
    for seed in range(5):
        found = draw(syllables, constraint, temperature=9.0, seed=seed)
        assert re.fullmatch("(ba|!n){2}n?!", found.text) and found.finish_reason == "stop"


def test_what_the_vocabulary_cannot_say_ends_the_answer():
    syllables = Engine(model(), SyllableTokenizer())
    for pattern in ("bax", "ban[xy]", "nax"):
        stuck = draw(syllables, Constraint(kind="regex", grammar=pattern), logprobs=2)
        assert (stuck.text, stuck.finish_reason) == (pattern.split("x")[0].rstrip("["), "length")


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint(kind="regex", grammar="(a"), "regular expression cannot be used.*unclosed group"),
        (Constraint(kind="regex", grammar="x(?=y)"), "look-around.*not supported"),
        (Constraint(kind="regex", grammar=""), "allows no text"),
        (Constraint(kind="json_schema", grammar="{"), "not JSON"),
        (Constraint(kind="json_schema", grammar="[1]"), "is list, and not an object"),
        (Constraint(kind="json_schema", grammar='{"type": "cat"}'), "JSON schema cannot be used.*cat"),
        (Constraint(kind="json_schema", grammar='{"not": {}}'), "Unimplemented keys.*not"),
        (Constraint(kind="json_schema", grammar="false"), "JSON schema cannot be used|allows no text"),
    ],
)
def test_a_bad_grammar_is_refused_before_anything_runs(constraint: Constraint, said: str):
    with pytest.raises(DataError, match=re.compile(said, re.DOTALL)):
        engine().submit([1], SamplingParams(constraint=constraint))
    assert not engine().has_work


def test_without_the_library_a_constraint_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = ConstraintCompiler(ByteTokenizer(), vocab_size=257)
    with pytest.raises(ConfigError, match=re.escape("pip install 'petatron[serve]'")):
        fresh.check(Constraint(kind="json"))


def constrained_texts(layout: str, world_size: int) -> list[str]:
    """Runs on a rank."""
    params = SamplingParams(
        max_new_tokens=40, temperature=4.0, logprobs=1, constraint=Constraint(kind="regex", grammar=REGEXES[1])
    )
    inside = Engine(model(layout, world_size), ByteTokenizer())
    return [row[0].text for row in inside.complete_on_all_ranks([[1, 2], [3], [4, 5]], params)]


def test_layouts_agree(ranks: RankPool):
    expected = constrained_texts("", 1)
    for layout in ("--pp 2", "--dp 2"):
        assert ranks.run(constrained_texts, 2, layout, 2) == [expected] * 2
