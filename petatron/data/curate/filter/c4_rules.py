"""The rules of C4 (Raffel et al. 2020, section 2.2): lines that are no sentences are removed, then pages are judged by the rest."""

from __future__ import annotations

import re

from petatron.data.curate.filter.rule import LineRule, Rule
from petatron.data.curate.filter.text_view import TextView

MIN_LINE_WORDS, MIN_SENTENCES = 3, 5
_ENDINGS = tuple('.!?"\u201d\u3002\uff01\uff1f\u0964\u061f')
_SENTENCE_END = re.compile(r"[.!?\u061f]+[\"'\u201d\u2019)\]]*(?=\s|$)|[\u3002\uff01\uff1f\u0964]+")
_LOREM_IPSUM = re.compile(r"lorem ipsum", re.IGNORECASE)
_POLICY = re.compile(
    r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies", re.IGNORECASE
)


def ends_a_sentence(line: str) -> bool:
    """Whether a line ends in terminal punctuation; an ellipsis is none.

    >>> [ends_a_sentence(line) for line in ("It ends.", '"So?"', "more...", "Menu")]
    [True, True, False, False]
    """
    return line.endswith(_ENDINGS) and not line.endswith("...")


def num_sentences(view: TextView) -> float:
    """Returns the number of ends of sentences.

    >>> num_sentences(TextView("One. Two?! \\u201cThree.\\u201d v1.5 four"))
    3
    """
    return len(_SENTENCE_END.findall(view.text))


def c4_line_rules() -> tuple[LineRule, ...]:
    return (
        LineRule("c4_no_terminal_punctuation", ends_a_sentence),
        LineRule("c4_few_words", lambda line: len(line.split()) >= MIN_LINE_WORDS),
        LineRule("c4_javascript", lambda line: "javascript" not in line.lower()),
        LineRule("c4_policy", lambda line: _POLICY.search(line) is None),
    )


def c4_rules() -> tuple[Rule, ...]:
    return (
        Rule("c4_curly_bracket", lambda view: view.text.count("{"), most=0),
        Rule("c4_lorem_ipsum", lambda view: len(_LOREM_IPSUM.findall(view.text)), most=0),
        Rule("c4_sentences", num_sentences, least=MIN_SENTENCES),
    )
