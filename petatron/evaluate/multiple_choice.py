"""Multiple choice: of several continuations, the one with the highest log-probability is the model's answer.

Prompts and tokenization are those of lm-evaluation-harness, so that numbers can be compared. Accuracy
takes sums of log-probabilities; normalized accuracy divides each by the bytes of its choice, which does not favor short ones.
WinoGrande is scored the other way round (partial evaluation): the choice is part of the context, and the rest of the sentence, which
is the same for both, is scored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.data.prompt.prompt_encoder import document_start, with_bos
from petatron.data.tokenizer import Tokenizer
from petatron.evaluate.confidence_interval import Estimate, accuracy_estimate
from petatron.evaluate.eval_task import ContextLimits, ScoredTask, truncate_left
from petatron.evaluate.examples_file import ExampleError, field_of, read_examples, text_field
from petatron.evaluate.score_sequences import SequenceScore


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """A context and a continuation for each choice, the bytes that normalize each, and the index of the right one.

    description: what every context begins with, to be said once before several examples.
    """

    pairs: tuple[tuple[str, str], ...]
    num_bytes: tuple[int, ...]
    answer: int
    description: str = ""

    @property
    def solved(self) -> str:
        """The example with its right choice, without the description."""
        return "".join(self.pairs[self.answer])[len(self.description) :]


def _example(context: str, choices: Sequence[str], answer: int, *, description: str = "") -> ChoiceExample:
    """Puts one space before each choice, unless there is space already."""
    spaced = not context or context[-1:].isspace()
    pairs = tuple((context, choice if spaced or choice[:1].isspace() else f" {choice}") for choice in choices)
    return ChoiceExample(pairs, tuple(len(choice.encode()) for choice in choices), answer, description)


def _choice_texts(value: Any, name: str) -> list[str]:
    texts = value if isinstance(value, list) else []
    if len(texts) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ExampleError(f'"{name}" is not a list of two or more texts')
    return texts


def _answer_index(value: Any, labels: Sequence[str], name: str) -> int:
    """Returns the index of an answer's label; numbers may be written as text."""
    text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else None
    if text is None or text not in labels:
        raise ExampleError(f'"{name}" is {value!r}, which is none of {", ".join(labels)}')
    return list(labels).index(text)


def _indices(choices: Sequence[str]) -> list[str]:
    return [str(index) for index in range(len(choices))]


def _hellaswag(record: Mapping[str, Any]) -> ChoiceExample:
    before, after = text_field(record, "ctx_a"), str(field_of(record, "ctx_b"))
    context = f"{text_field(record, 'activity_label')}: {before} {after.capitalize()}"
    endings = _choice_texts(field_of(record, "endings"), "endings")
    answer = _answer_index(field_of(record, "label"), _indices(endings), "label")
    return _example(_clean_wikihow(context), [_clean_wikihow(ending) for ending in endings], answer)


def _clean_wikihow(text: str) -> str:
    """Removes the marks of wikiHow texts: "[title]", "[step]" and "[substeps]"."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _arc(record: Mapping[str, Any]) -> ChoiceExample:
    """The published file nests {"question": {"stem", "choices"}}; the datasets library has {"choices": {"text", "label"}} beside it."""
    question = field_of(record, "question")
    if isinstance(question, dict):
        stem, listed = text_field(question, "stem"), field_of(question, "choices")
    else:
        stem, listed = text_field(record, "question"), field_of(record, "choices")
    if isinstance(listed, dict):
        texts, labels = field_of(listed, "text"), field_of(listed, "label")
    elif isinstance(listed, list) and all(isinstance(choice, dict) for choice in listed):
        texts, labels = ([field_of(choice, name) for choice in listed] for name in ("text", "label"))
    else:
        raise ExampleError('"choices" has no texts and labels')
    choices = _choice_texts(texts, "choices")
    answer = _answer_index(field_of(record, "answerKey"), [str(label) for label in labels], "answerKey")
    return _example(f"Question: {stem}\nAnswer:", choices, answer)


def _piqa(record: Mapping[str, Any]) -> ChoiceExample:
    solutions = [text_field(record, "sol1"), text_field(record, "sol2")]
    answer = _answer_index(field_of(record, "label"), ("0", "1"), "label")
    return _example(f"Question: {text_field(record, 'goal')}\nAnswer:", solutions, answer)


def _winogrande(record: Mapping[str, Any]) -> ChoiceExample:
    before, blank, after = text_field(record, "sentence").partition("_")
    if not blank or not after.strip():
        raise ExampleError('"sentence" has no "_" with text after it')
    options = [text_field(record, "option1"), text_field(record, "option2")]
    answer = _answer_index(field_of(record, "answer"), ("1", "2"), "answer")
    rest = f" {after.strip()}"
    return ChoiceExample(tuple((before + option, rest) for option in options), (len(rest.encode()),) * 2, answer)


def _mmlu(record: Mapping[str, Any]) -> ChoiceExample:
    choices = _choice_texts(field_of(record, "choices"), "choices")
    labels = [chr(ord("A") + index) for index in range(len(choices))]
    given = field_of(record, "answer")
    by_letter = isinstance(given, str) and not given.strip().isdigit()
    answer = _answer_index(given, labels if by_letter else _indices(choices), "answer")
    subject = str(record.get("subject") or "").replace("_", " ")
    about = f" about {subject}" if subject else ""
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(labels, choices))
    head = f"The following are multiple choice questions (with answers){about}.\n\n"
    context = f"{head}{text_field(record, 'question').strip()}\n{listed}Answer:"
    return _example(context, labels, answer, description=head)


def _general(record: Mapping[str, Any]) -> ChoiceExample:
    context = field_of(record, "context")
    if not isinstance(context, str):
        raise ExampleError('"context" is not a text')
    choices, given = _choice_texts(field_of(record, "choices"), "choices"), field_of(record, "answer")
    if len(set(choices)) < len(choices):  # known benchmarks have such examples, and comparable scores keep them
        raise ExampleError('"choices" has the same text twice, so that no answer is the right one')
    by_text = isinstance(given, str) and given in choices
    answer = choices.index(given) if by_text else _answer_index(given, _indices(choices), "answer")
    return _example(context, choices, answer)


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], ChoiceExample]] = {
    "hellaswag": _hellaswag,
    "arc": _arc,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "piqa": _piqa,
    "winogrande": _winogrande,
    "mmlu": _mmlu,
    "multiple_choice": _general,
}


@dataclass(slots=True)
class MultipleChoiceTask(ScoredTask):
    """One sequence for each choice of each example."""

    examples: list[ChoiceExample] = field(default_factory=list)
    num_targets: list[int] = field(default_factory=list)

    def metrics(self, scores: Sequence[SequenceScore]) -> tuple[dict[str, Estimate], dict[str, int]]:
        sums = [float(score.logprobs[-count:].sum()) for score, count in zip(scores, self.num_targets, strict=True)]
        plain, normalized, start = [], [], 0
        for example in self.examples:
            of_choices = np.array(sums[start : start + len(example.pairs)])
            start += len(of_choices)
            plain.append(int(of_choices.argmax()) == example.answer)
            normalized.append(int((of_choices / np.array(example.num_bytes)).argmax()) == example.answer)
        estimates = {"accuracy": accuracy_estimate(plain), "accuracy_norm": accuracy_estimate(normalized)}
        return estimates, {"examples": len(plain), "correct": sum(plain), "correct_norm": sum(normalized)}


def read_multiple_choice(
    path: Path,
    tokenizer: Tokenizer,
    limits: ContextLimits,
    *,
    format_name: str,
    limit: int | None = None,
    bos: Sequence[int] = (),
    shots: FewShot | None = None,
) -> MultipleChoiceTask:
    """Reads JSON lines in one of `FORMATS`; each prompt begins with `bos` and the solved examples of `shots`."""
    parse = FORMATS[format_name]
    examples = read_examples(path, parse, limit=limit)
    if shots is not None:
        source = shots.data or path
        examples = shots.prepend(examples, read_examples(source, parse), source=source)
    task = MultipleChoiceTask(examples=examples)
    pairs = [pair for example in task.examples for pair in example.pairs]
    truncated = 0
    for ids, num_targets in encode_pairs(tokenizer, pairs, bos=bos, source=str(path)):
        kept, cut = truncate_left(ids, limits.max_tokens)
        truncated += cut
        task.sequences.append(kept)
        task.num_targets.append(min(num_targets, len(kept) - 1))
    if truncated:
        count = count_with_noun(truncated, "choice")
        task.notes.append(f"{count} cut from the left to {limits.max_tokens:,} tokens, with the context")
    return task


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShot:
    """Solved examples before each prompt: the first `number`, or drawn with a seed; of `data`, or the task's own file.

    An example is never before itself.
    """

    number: int
    data: Path | None = None
    seed: int | None = None

    def prepend(
        self, examples: Sequence[ChoiceExample], pool: Sequence[ChoiceExample], *, source: Path
    ) -> list[ChoiceExample]:
        """Returns the examples with longer contexts; a draw is a function of (seed, index of the example)."""
        prepended: list[ChoiceExample] = []
        for index, example in enumerate(examples):
            order: Iterable[int] = range(len(pool))
            if self.seed is not None:
                order = np.random.default_rng([self.seed, index]).permutation(len(pool))
            shown = [*islice((pool[at].solved for at in order if pool[at] != example), self.number)]
            if len(shown) < self.number:
                raise DataError(
                    f"{source} has {count_with_noun(len(shown), 'example')} to show before example {index + 1}, not {self.number}. "
                    "Ask for fewer, or give a file with more."
                )
            head, cut = example.description + "".join(f"{text}\n\n" for text in shown), len(example.description)
            pairs = tuple((head + context[cut:], continuation) for context, continuation in example.pairs)
            prepended.append(replace(example, pairs=pairs, description=head))
        return prepended


def encode_pairs(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    *,
    source: str,
    bos: Sequence[int] = (),
    start: int | None = None,
) -> list[tuple[list[int], int]]:
    """Returns the ids of each context and continuation together after `bos`, and how many are the continuation's.

    Both are tokenized as one text, and cut where the context's own tokens end: spaces at the end of the context belong to the
    continuation, as tokenizers put them there. An empty context is the id `start`, by default `document_start`; `source` is named
    where there is none.
    """
    contexts = [context.rstrip() for context, _ in pairs]
    joined = tokenizer.encode_batch([context + continuation for context, continuation in pairs])
    alone = tokenizer.encode_batch(contexts)
    start = document_start(tokenizer, bos) if start is None else start
    encoded: list[tuple[list[int], int]] = []
    for ids, before in zip(joined, alone, strict=True):
        num_targets = max(len(ids) - len(before), 1)
        if before and num_targets < len(ids):
            encoded.append((with_bos(ids, bos), num_targets))
        elif start is not None:
            encoded.append(([start, *ids], len(ids)))
        else:
            raise DataError(
                f"{source} has an empty context, and the tokenizer {tokenizer.name} has no end-of-document id to start from. "
                "Give every example a context."
            )
    return encoded
