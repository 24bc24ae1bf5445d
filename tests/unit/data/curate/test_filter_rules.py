"""Formulas of rules against examples computed by hand."""

from __future__ import annotations

import doctest
import importlib
from collections import Counter
from pathlib import Path

import pytest

from petatron.data.curate.filter import gopher_rules as gopher
from petatron.data.curate.filter.c4_rules import c4_line_rules, c4_rules
from petatron.data.curate.filter.filter_documents import FilterOptions, build_rules
from petatron.data.curate.filter.gopher_rules import gopher_rules
from petatron.data.curate.filter.repetition import (
    NumberedTokens,
    duplicate_character_share,
    duplicate_ngram_share,
    duplicate_share,
    top_ngram_share,
)
from petatron.data.curate.filter.rule import Rule
from petatron.data.curate.filter.text_view import TextView
from petatron.data.curate.language.language_identification import LANGUAGES, language_shares

MODULES = ["rule", "text_view", "repetition", "c4_rules", "filter_documents"]
SENTENCES = [line.split("\t") for line in (Path(__file__).parent / "held_out_sentences.txt").read_text().splitlines()]
PROSE = (
    "The committee met on a cold morning and agreed that the old bridge should be repaired before winter. "
    "Nobody had expected such a quick decision, because similar plans were delayed for years with no reason given. "
    "Workers will begin next week. They have to replace most of the stones, and people who live nearby must take "
    "another road to town. The mayor thanked everyone who helped to collect the money."
)


@pytest.mark.parametrize("name", [*(f"filter.{name}" for name in MODULES), "language.language_identification"])
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"petatron.data.curate.{name}"))
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize(
    ("measure", "text", "expected"),
    [
        (gopher.num_words, "It's -- 3 words, (really).", 4),  # It's 3 words really
        (gopher.mean_word_length, "It's 3 words, (really).", (4 + 1 + 5 + 6) / 4),
        (gopher.mean_word_length, "...", 0),
        (lambda view: gopher.symbol_ratio(view, ("#",)), "#one # two three", 2 / 4),
        (lambda view: gopher.symbol_ratio(view, gopher.ELLIPSES), "so... what\u2026 now four", 2 / 4),
        (gopher.bullet_line_share, "* a\n\n- b\n\u2022 c\nd", 3 / 4),
        (gopher.ellipsis_line_share, "a...\nb\u2026 \nc\nd.", 2 / 4),
        (gopher.alphabetic_token_share, "a1 22 -- b", 2 / 4),
        (gopher.alphabetic_token_share, "", 0),
        (lambda view: gopher.num_stop_words(view, gopher.STOP_WORDS), "The end of THE, to", 3),
        (lambda view: len(view.paragraphs), "a\nb\n \n\nc\n\n\n", 2),
    ],
)
def test_measures(measure, text: str, expected: float) -> None:
    assert measure(TextView(text)) == pytest.approx(expected)


def test_repetition() -> None:
    lines = ["aaaa", "bb", "aaaa", "cc", "aaaa"]
    assert duplicate_share(lines) == 2 / 5
    assert duplicate_character_share(lines) == 8 / 16
    # "aa b" occurs 3 times, "b aa" twice; its occurrences cover 6 of the 7 words.
    tokens = NumberedTokens.of("aa b aa b aa b c".split())
    assert top_ngram_share(tokens, 2) == pytest.approx(9 / 10)
    # Every 2-gram from the third word on has occurred, but "b c": the words 3 to 6 are covered.
    assert duplicate_ngram_share(tokens, 2) == pytest.approx(6 / 10)
    # Both occur twice; the one with more characters counts: "long er" covers 12 of 17.
    assert top_ngram_share(NumberedTokens.of("a b long er a b long er x".split()), 2) == pytest.approx(12 / 17)
    assert top_ngram_share(NumberedTokens.of("a a a".split()), 2) == 1  # each character once, where occurrences overlap
    for measure in (top_ngram_share, duplicate_ngram_share):
        assert [measure(NumberedTokens.of(tokens), 2) for tokens in ([], ["a"], ["a", "b", "c"])] == [0, 0, 0]


def test_ngrams_equal_counting(tokens: str = "x y x y z x y z z x y x y z " * 3) -> None:
    """The numpy forms against plain loops."""
    parts = [f"{token}{'-' * (index % 3)}" for index, token in enumerate(tokens.split())]
    for n in (2, 3, 5, 10):
        grams = [tuple(parts[at : at + n]) for at in range(len(parts) - n + 1)]
        first = {gram: at for at, gram in reversed(list(enumerate(grams)))}
        covered = {at + k for at, gram in enumerate(grams) if first[gram] != at for k in range(n)}
        total = sum(map(len, parts))
        assert duplicate_ngram_share(NumberedTokens.of(parts), n) == pytest.approx(
            sum(len(parts[at]) for at in covered) / total
        )
        counts = Counter(grams)
        most = max(counts.values())
        longest = max(sum(map(len, gram)) for gram, count in counts.items() if count == most)
        shares = set()
        for gram, count in counts.items():
            if count == most and sum(map(len, gram)) == longest:
                covered = {at + k for at, other in enumerate(grams) if other == gram for k in range(n)}
                shares.add(round(sum(len(parts[at]) for at in covered) / total, 9) if most > 1 else 0)
        assert round(top_ngram_share(NumberedTokens.of(parts), n), 9) in shares


GOPHER_VIOLATIONS = {
    "gopher_few_words": "Of the few that have to be with and.",
    "gopher_short_words": f"{PROSE} " + "i a o " * 40,
    "gopher_long_words": PROSE + " incomprehensibilities" * 60,
    "gopher_hashes": PROSE + " #tag" * 12,
    "gopher_ellipses": PROSE.replace(" the", "... the").replace(" a", "... a"),
    "gopher_bullet_lines": "\n".join(f"- {part}" for part in PROSE.split(". ")),
    "gopher_ellipsis_lines": PROSE.replace(". ", "...\n"),
    "gopher_alphabetic_words": PROSE + " 1234" * 30,
    "gopher_stop_words": "Quick brown foxes jump over lazy dogs near green rivers " * 7,
    "gopher_duplicate_lines": PROSE + "\n" + "ok\n" * 4,
    "gopher_duplicate_paragraphs": PROSE + "\n\n" + "ok\n\nno\n\n" * 3,
    "gopher_duplicate_line_characters": f"{PROSE}\n{PROSE}\n" + "\n".join("abcd"),
    "gopher_duplicate_paragraph_characters": f"{PROSE}\nx\n\n{PROSE}\nx\n\n" + "\n\n".join("abcd"),
    "gopher_top_2_gram": PROSE + " nothing happens, then nothing happens so nothing happens" * 6,
    "gopher_duplicate_5_grams": PROSE + " " + PROSE.split(". ")[1],
}


@pytest.mark.parametrize("name", GOPHER_VIOLATIONS)
def test_each_rule_drops_its_violation(name: str) -> None:
    rules = {rule.name: rule for rule in gopher_rules()}
    assert rules[name].drops(TextView(GOPHER_VIOLATIONS[name]))
    assert not rules[name].drops(TextView(PROSE))


def test_prose_is_kept() -> None:
    rules = gopher_rules()
    assert not [rule.name for rule in rules if rule.drops(TextView(PROSE))] and len(rules) == 10 + 4 + 3 + 6
    long = next(rule for rule in rules if rule.name == "gopher_many_words")
    assert long.drops(TextView("a " * 100_001)) and not long.drops(TextView("a " * 100_000))


@pytest.mark.parametrize(
    ("line", "removed_by"),
    [
        ("A whole sentence.", None),
        ('He said "so it is."', None),
        ("No end here", "c4_no_terminal_punctuation"),
        ("And so on...", "c4_no_terminal_punctuation"),
        ("Only two.", "c4_few_words"),
        ("Please enable JavaScript to go on.", "c4_javascript"),
        ("This site uses cookies for you.", "c4_policy"),
    ],
)
def test_c4_lines(line: str, removed_by: str | None) -> None:
    assert next((rule.name for rule in c4_line_rules() if not rule.keeps(line)), None) == removed_by


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PROSE, []),
        ("One is here. Two is. Three? Four!", ["c4_sentences"]),
        (PROSE + " Lorem Ipsum dolor.", ["c4_lorem_ipsum"]),
        (PROSE + " if (x) { y }", ["c4_curly_bracket"]),
    ],
)
def test_c4_pages(text: str, expected: list[str]) -> None:
    assert [rule.name for rule in c4_rules() if rule.drops(TextView(text))] == expected


def test_bounds_of_rules() -> None:
    options = FilterOptions(
        gopher=True, c4=True, min_chars=3, bounds=(("gopher_few_words", 7), ("c4_sentences", 3)),
        without=("c4_javascript", "gopher_stop_words"),
    )  # fmt: skip
    rules, line_rules = build_rules(options)
    by_name: dict[str, Rule] = {rule.name: rule for rule in rules}
    assert by_name["gopher_few_words"].bound == "at least 7" and by_name["c4_sentences"].least == 3
    assert by_name["gopher_many_words"].bound == "at most 100000" and "gopher_stop_words" not in by_name
    assert [rule.name for rule in line_rules] == ["c4_no_terminal_punctuation", "c4_few_words", "c4_policy"]
    assert [rule.name for rule in rules[:4]] == ["c4_curly_bracket", "c4_lorem_ipsum", "c4_sentences", "min_chars"]


def test_languages_of_held_out_sentences() -> None:
    """Ten sentences in each language that the model has not seen."""
    assert {name for name, _ in SENTENCES} == set(LANGUAGES) and len(SENTENCES) == 240 and len(LANGUAGES) == 24
    right = [next(iter(language_shares(text))) == name for name, text in SENTENCES]
    assert sum(right) / len(right) >= 0.99
    beginnings = [(name, text[:8] if len(text.split()) < 4 else " ".join(text.split()[:4])) for name, text in SENTENCES]
    right = [next(iter(language_shares(text))) == name for name, text in beginnings]
    assert sum(right) / len(right) >= 0.9


@pytest.mark.parametrize(
    "text",
    ["", " 12 !", "ทุกเช้าร้านขนมปังที่หัวมุมเปิดก่อน", "ყოველ დილით კუთხეში საცხობი იხსნება", "a8f0 9b3c ffed xkcd qwzx jjkq",
     "Mỗi buổi sáng tiệm bánh ở góc phố mở cửa trước khi mặt trời mọc", "\ud800 \udc00"],
)  # fmt: skip
def test_other_languages_and_none(text: str) -> None:
    assert language_shares(text) == {"unknown": 1.0}


def test_a_text_in_two_languages_has_shares_of_both() -> None:
    english, german = (" ".join(text for name, text in SENTENCES if name == code) for code in ("en", "de"))
    shares = language_shares(f"{english} {german}")
    assert (
        0.35 < shares["en"] < 0.65 and 0.35 < shares["de"] < 0.65 and sum(shares.values()) == pytest.approx(1, abs=0.01)
    )
    long = language_shares(f"{english} " * 200 + german)
    assert long["en"] > 0.9
