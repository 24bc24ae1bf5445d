"""Loss over text: WikiText-103 as Megatron measures it, and any text with bits per byte.

A perplexity per token depends on the tokenizer. Two numbers do not: the one per word, which WikiText defines (the words of the file
as it is, before its spaces around punctuation are removed), and bits per byte of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.data.prompt.prompt_encoder import document_start
from petatron.data.tokenizer import Tokenizer
from petatron.evaluate.confidence_interval import Estimate, perplexity, ratio_estimate
from petatron.evaluate.eval_task import BITS_PER_NAT, ContextLimits, ScoredTask
from petatron.evaluate.examples_file import is_json_lines, read_examples, read_text, text_field
from petatron.evaluate.score_sequences import SequenceScore

_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))


def detokenize_wikitext(text: str) -> str:
    """Removes the spaces that WikiText has around punctuation, in Megatron's order of replacements.

    >>> detokenize_wikitext("Valkyria Chronicles 3 @-@ D , ( 2011 ) cost 1 @,@ 000 yen . \\n = = Plot = = \\n")
    'Valkyria Chronicles 3-D, (2011) cost 1,000 yen.\\n== Plot ==\\n'
    """
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for left, right in _PAIRS:
        inside = f"{re.escape(left)}([^{re.escape(right)}]*){re.escape(right)}"
        text = re.sub(inside, lambda match: match[0][0] + match[1].strip() + match[0][-1], text)
    for count in (4, 3, 2):
        text = text.replace(" ".join("=" * count), "=" * count)
    for spaced, tight in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(spaced, tight)
    return text


@dataclass(frozen=True, slots=True)
class Window:
    """Scores tokens[start:stop] and counts those from `counted_from` on, each predicted by the ones before it in the window."""

    start: int
    stop: int
    counted_from: int

    @property
    def num_counted(self) -> int:
        return self.stop - self.counted_from


def sliding_windows(num_tokens: int, *, length: int, stride: int, extend_last: bool = True) -> Iterator[Window]:
    """Yields windows of `length` inputs that count every token but the first once.

    The first one counts all its tokens, each further one its last `stride`. The last one is shorter; `extend_last` extends it to
    the left to full length instead, which only adds context.

    >>> [(w.start, w.stop, w.counted_from) for w in sliding_windows(10, length=4, stride=4)]
    [(0, 5, 1), (4, 9, 5), (5, 10, 9)]
    >>> [(w.start, w.stop, w.counted_from) for w in sliding_windows(10, length=4, stride=2, extend_last=False)]
    [(0, 5, 1), (2, 7, 5), (4, 9, 7), (6, 10, 9)]
    """
    assert 1 <= stride <= length, (stride, length)
    counted, start = 1, 0
    while counted < num_tokens:
        stop = min(start + length + 1, num_tokens)
        first = max(0, stop - length - 1) if extend_last else start
        yield Window(first, stop, counted)
        counted, start = stop, start + stride


@dataclass(slots=True)
class _WindowedTask(ScoredTask):
    """Documents, each one or several windows."""

    windows: list[Window] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    """Which document a window belongs to."""

    def add_document(self, ids: list[int], *, length: int, stride: int, extend_last: bool) -> None:
        document = self.documents[-1] + 1 if self.documents else 0
        for window in sliding_windows(len(ids), length=length, stride=stride, extend_last=extend_last):
            self.sequences.append(ids[window.start : window.stop])
            self.windows.append(window)
            self.documents.append(document)

    def loss_sums(self, scores: Sequence[SequenceScore]) -> tuple[list[float], list[int]]:
        """Returns the sum of counted losses of each window, and their number."""
        sums = [
            -float(score.logprobs[len(score.logprobs) - window.num_counted :].sum())
            for score, window in zip(scores, self.windows, strict=True)
        ]
        return sums, [window.num_counted for window in self.windows]


@dataclass(slots=True)
class WikiText103Task(_WindowedTask):
    """One long text; perplexity per token, and per word of the file as it is."""

    num_words: int = 0
    num_bytes: int = 0

    def metrics(self, scores: Sequence[SequenceScore]) -> tuple[dict[str, Estimate], dict[str, int]]:
        sums, counts = self.loss_sums(scores)
        num_targets = sum(counts)
        ratio = num_targets / max(self.num_words - 1, 1)
        estimates = {
            "loss": ratio_estimate(sums, counts),
            "perplexity": ratio_estimate(sums, counts, perplexity),
            "adjusted_perplexity": ratio_estimate(sums, counts, lambda loss: perplexity(loss * ratio)),
            "token_ratio": Estimate(ratio),
            "bits_per_byte": ratio_estimate(
                sums, counts, lambda loss: loss * num_targets * BITS_PER_NAT / self.num_bytes
            ),
        }
        return estimates, {"tokens": num_targets + 1, "words": self.num_words, "bytes": self.num_bytes}


def read_wikitext103(
    path: Path, tokenizer: Tokenizer, limits: ContextLimits, *, stride: int | None = None
) -> WikiText103Task:
    """Reads a text file of WikiText; only the last `stride` tokens of every window but the first count, None: all of them."""
    text = read_text(path)
    plain = detokenize_wikitext(text)
    ids = tokenizer.encode(plain)
    if len(ids) < 2:
        raise DataError(f"{path} has {count_with_noun(len(ids), 'token')}. A loss needs at least two.")
    num_bytes = len(plain.encode()) - len(tokenizer.decode(ids[:1]).encode())  # the first token is not predicted
    task = WikiText103Task(num_words=len(text.strip().split(" ")), num_bytes=num_bytes)
    stride = min(stride or limits.window, limits.window)
    task.add_document(ids, length=limits.window, stride=stride, extend_last=False)
    return task


@dataclass(slots=True)
class TextTask(_WindowedTask):
    """Documents; loss and perplexity per token, bits per byte."""

    document_bytes: list[int] = field(default_factory=list)

    def metrics(self, scores: Sequence[SequenceScore]) -> tuple[dict[str, Estimate], dict[str, int]]:
        sums, counts = self.loss_sums(scores)
        loss_of, tokens_of = [0.0] * len(self.document_bytes), [0] * len(self.document_bytes)
        for document, loss, count in zip(self.documents, sums, counts, strict=True):
            loss_of[document] += loss
            tokens_of[document] += count
        is_single = len(self.document_bytes) == 1  # its windows are resampled then
        items = (sums, counts) if is_single else (loss_of, tokens_of)
        num_tokens, num_bytes = sum(counts), sum(self.document_bytes)
        estimates = {"loss": ratio_estimate(*items), "perplexity": ratio_estimate(*items, perplexity)}
        if is_single:
            estimates["bits_per_byte"] = ratio_estimate(
                *items, lambda loss: loss * num_tokens * BITS_PER_NAT / num_bytes
            )
        else:
            estimates["bits_per_byte"] = ratio_estimate(loss_of, self.document_bytes, lambda loss: loss * BITS_PER_NAT)
        return estimates, {"documents": len(self.document_bytes), "tokens": num_tokens, "bytes": num_bytes}


def read_text_task(
    path: Path,
    tokenizer: Tokenizer,
    limits: ContextLimits,
    *,
    stride: int | None = None,
    limit: int | None = None,
    bos: Sequence[int] = (),
) -> TextTask:
    """Reads JSON lines with a "text", each a document, or a text file, which is one.

    A document follows `bos`, else the end of another, so its first token counts too; without such an id the tokenizer's first token
    of each document is only context, and its bytes do not count.
    """
    if is_json_lines(path):
        texts = read_examples(path, lambda record: text_field(record, "text"), limit=limit)
    else:
        texts = [read_text(path)]
    task, skipped = TextTask(), 0
    start = document_start(tokenizer, bos)
    stride = min(stride or limits.window, limits.window)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        num_bytes = len(text.encode())
        if start is None:
            num_bytes -= len(tokenizer.decode(ids[:1]).encode())
        else:
            ids = [start, *ids]
        if len(ids) < 2:
            skipped += 1
            continue
        task.document_bytes.append(num_bytes)
        task.add_document(ids, length=limits.window, stride=stride, extend_last=True)
    if not task.sequences:
        raise DataError(f"{path} has no text of two tokens or more. A loss needs that many.")
    if skipped:
        task.notes.append(f"{count_with_noun(skipped, 'text')} of fewer than two tokens left out")
    return task
