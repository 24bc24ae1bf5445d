"""`petatron data show`: a sample of a dataset as training sees it, token by token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.base.terminal_escape import printable, raw_stream
from petatron.cli.subcommands.tokenizer_arguments import add_tokenizer_arguments, tokenizer_settings

if TYPE_CHECKING:
    from petatron.data.gpt_dataset import GPTDataset
    from petatron.data.indexed_dataset import IndexedDataset
    from petatron.data.tokenizer import Tokenizer

_SPLITS = ("train", "valid", "test")
_BACKGROUNDS = ("\x1b[30;48;5;153m", "\x1b[30;48;5;223m")
_MASKED_BACKGROUND, _BORDER, _RESET = "\x1b[30;48;5;250m", "\x1b[2m", "\x1b[0m"
_LINE_END, _TAB, _END_OF_DOCUMENT = "\u23ce", "\u21e5", "<end of document>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = (
        "Show a sample of a dataset as a run reads it: its tokens, its documents, and where there is a loss."
    )
    add("dataset", metavar="DATASET", help="dataset prefix, or its .bin or .idx")
    add("--index", type=int, default=0, metavar="N", help="number of the sample in the order of the run (0)")
    add("--seq-length", type=int, default=1024, metavar="N", help="of the run (1024)")
    add("--seed", type=int, metavar="N", help="of the run (1234)")
    add("--split", metavar="SHARES", help="of the run (969,30,1)")
    add("--part", choices=_SPLITS, default="train", help="part of the split (train)")
    add("--num-samples", type=int, metavar="N", help="that the run reads of it, which decides the epochs (one epoch)")
    add("--eod-mask-loss", action="store_true", help="mark tokens after an end of document, as the run's flag does")
    add("--no-color", action="store_true", help="put | between tokens, and ~ before those without a loss")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    problems = [
        Problem(flag, str(number), "is below 1", "Give a count.")
        for flag, number in (("--seq-length", args.seq_length), ("--num-samples", args.num_samples))
        if number is not None and number < 1
    ]
    config = tokenizer_settings(args, problems)
    raise_problems(problems)

    from petatron.data.tokenizer import build_tokenizer
    from petatron.history.draw.terminal import can_color

    asked = any((args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.tiktoken_pattern))
    tokenizer = build_tokenizer(config, vocab_size=args.vocab_size) if asked else None
    indexed, dataset = _open(args)
    if not 0 <= args.index < len(dataset):
        rule = f"is not a sample of {indexed.prefix}, which has {len(dataset):,} here"
        raise_problems([Problem("--index", str(args.index), rule, "They are counted from 0.")])
    parts = _parts(args, indexed, dataset, tokenizer)
    epochs = count_with_noun(dataset.plan.num_epochs, "epoch")
    print(f"sample {args.index:,} of {len(dataset):,} ({args.part}, {args.seq_length:,} tokens, {epochs})")
    stream = raw_stream(sys.stdout)
    stream.write("".join(_drawn(parts, colored=not args.no_color and can_color(stream))))
    tokens = [token for part in parts for token in part.tokens]
    with_loss = sum(token.num_with_loss for token in tokens)
    print(f"{count_with_noun(len(parts), 'document')}; loss on {with_loss:,} of {args.seq_length:,} predicted tokens")
    return 0


@dataclass(frozen=True, slots=True)
class _ShownToken:
    """Text of a token, or of several that are one character; how many ids they are, and how many have a loss."""

    text: str
    num_ids: int
    num_with_loss: int

    @property
    def is_masked(self) -> bool:
        return self.num_with_loss < self.num_ids


@dataclass(frozen=True, slots=True)
class _DocumentPart:
    """Tokens of one document in a sample."""

    title: str
    tokens: tuple[_ShownToken, ...]


def _open(args: argparse.Namespace) -> tuple[IndexedDataset, GPTDataset]:
    from petatron.config.schema.data import DataConfig
    from petatron.config.schema.data_blend import BlendError, dataset_prefix, parse_split
    from petatron.config.schema.training import TrainConfig
    from petatron.data.gpt_dataset import GPTDataset
    from petatron.data.indexed_dataset import IndexedDataset
    from petatron.data.train_valid_test_split import split_units

    indexed = IndexedDataset(dataset_prefix(args.dataset))
    indexed.check_token_ids()
    split = DataConfig().split if args.split is None else args.split
    try:
        parse_split(split)
    except BlendError as error:
        raise_problems([Problem("--split", split, str(error), "Write 969,30,1, say.")])
    sequences = split_units(split, indexed.num_sequences)[_SPLITS.index(args.part)]
    seed = TrainConfig().seed if args.seed is None else args.seed
    dataset = GPTDataset(indexed, sequences, num_samples=args.num_samples, seq_length=args.seq_length, seed=seed)
    return indexed, dataset


def _parts(
    args: argparse.Namespace, indexed: IndexedDataset, dataset: GPTDataset, tokenizer: Tokenizer | None
) -> list[_DocumentPart]:
    import numpy as np

    from petatron.data.batch_loader import LoaderOptions, make_batch

    sample = dataset[args.index]
    eod = None if tokenizer is None else tokenizer.eod
    if args.eod_mask_loss and eod is None:
        fix = "Name the tokenizer of the dataset, one with such a token."
        raise_problems([Problem("--eod-mask-loss", "", "looks for the end-of-document token", fix)])
    options = LoaderOptions(micro_batch_size=1, seed=0, eod=eod, eod_mask_loss=args.eod_mask_loss)
    mask = make_batch([sample], options).loss_mask
    # The loss at a position is that of the next token, so the first token of a sample is never predicted.
    has_loss = np.append(False, np.asarray(mask[0]) > 0)
    parts: list[_DocumentPart] = []
    position = 0
    for piece in dataset.pieces(args.index):
        stop = position + piece.length
        tokens = _shown_tokens(sample[position:stop].tolist(), has_loss[position:stop].tolist(), tokenizer)
        title = _title(indexed, piece.sequence, piece.start, piece.length)
        parts.append(_DocumentPart(title, tuple(tokens)))
        position = stop
    return parts


def _title(indexed: IndexedDataset, sequence: int, start: int, length: int) -> str:
    import numpy as np

    name = f"document {sequence:,}"
    if not indexed.one_sequence_per_document:
        document = int(np.searchsorted(indexed.document_indices, sequence, side="right")) - 1
        name = f"document {document:,}, sequence {sequence:,}"
    return f"{name}: tokens {start:,} to {start + length - 1:,} of {int(indexed.lengths[sequence]):,}"


def _shown_tokens(ids: Sequence[int], has_loss: Sequence[bool], tokenizer: Tokenizer | None) -> Iterator[_ShownToken]:
    """Yields the tokens of one document; ids that are parts of a character are shown together."""
    if tokenizer is None:
        yield from (_ShownToken(str(number), 1, int(loss)) for number, loss in zip(ids, has_loss))
        return
    from petatron.infer.sampling_params import SamplingParams
    from petatron.infer.text_stream import TextStream

    def stream() -> TextStream:
        return TextStream(tokenizer, SamplingParams())

    reader, held, held_loss = stream(), 0, 0
    for number, loss in zip(ids, has_loss):
        if number == tokenizer.eod:
            if held:
                yield _ShownToken(reader.finish(), held, held_loss)
            yield _ShownToken(_END_OF_DOCUMENT, 1, int(loss))
            reader, held, held_loss = stream(), 0, 0
            continue
        held, held_loss = held + 1, held_loss + loss
        if text := reader.add(number):
            yield _ShownToken(text, held, held_loss)
            held = held_loss = 0
    if held:
        yield _ShownToken(reader.finish(), held, held_loss)


def _drawn(parts: Sequence[_DocumentPart], *, colored: bool) -> Iterator[str]:
    """Yields the text of a sample; control characters of documents are shown, not obeyed."""
    number = 0
    for part in parts:
        yield f"{_BORDER}-- {part.title} --{_RESET}\n" if colored else f"-- {part.title} --\n"
        for token in part.tokens:
            lines = token.text.split("\n")
            style = _MASKED_BACKGROUND if token.is_masked else _BACKGROUNDS[number % 2]
            before = style if colored else "|" + "~" * token.is_masked
            for line in lines[:-1]:
                yield f"{before}{_visible(line)}{_LINE_END}{_RESET if colored else ''}\n"
                before = style if colored else ""
            if lines[-1]:
                yield f"{before}{_visible(lines[-1])}{_RESET if colored else ''}"
            number += 1
        yield "\n"


def _visible(text: str) -> str:
    return printable(text.replace("\t", _TAB))
