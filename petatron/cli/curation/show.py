"""`petatron data show`: a sample of a dataset as training sees it, token by token."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.base.terminal_escape import raw_stream
from petatron.cli.curation.draw_sample import DocumentPart, drawn, shown_tokens
from petatron.cli.curation.show_conversations import is_chat_file, show_conversations
from petatron.cli.subcommands.tokenizer_arguments import add_tokenizer_arguments, tokenizer_settings
from petatron.config.schema.objective_and_dataset_names import CHAT_DATASETS

if TYPE_CHECKING:
    from petatron.data.gpt_dataset import GPTDataset
    from petatron.data.indexed_dataset import IndexedDataset
    from petatron.data.tokenizer import Tokenizer

_SPLITS = ("train", "valid", "test")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = (
        "Show a sample of a dataset as a run reads it: its tokens, its documents, and where there is a loss."
    )
    add(
        "dataset", metavar="DATASET", help="dataset prefix, or its .bin or .idx; a file of conversations or preferences"
    )
    add("--index", type=int, default=0, metavar="N", help="number of the sample in the order of the run (0)")
    add("--seq-length", type=int, default=1024, metavar="N", help="of the run (1024)")
    add("--seed", type=int, metavar="N", help="of the run (1234)")
    add("--split", metavar="SHARES", help="of the run (969,30,1)")
    add("--part", choices=_SPLITS, default="train", help="part of the split (train)")
    add("--num-samples", type=int, metavar="N", help="that the run reads of it, which decides the epochs (one epoch)")
    add("--eod-mask-loss", action="store_true", help="mark tokens after an end of document, as the run's flag does")
    add("--no-color", action="store_true", help="put | between tokens, and ~ before those without a loss")
    text = "of the run, for a file of conversations: conversations, preferences or unpaired-preferences (conversations)"
    add("--dataset-type", choices=CHAT_DATASETS, metavar="TYPE", help=text)
    add(
        "--dataset-settings",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="of the run, for a file of conversations",
    )
    add("--chat-template", metavar="FILE", help="of the run: a file (jinja), or a built-in template")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    problems = [
        Problem(flag, str(number), "is below 1", "Give a count.")
        for flag, number in (("--seq-length", args.seq_length), ("--num-samples", args.num_samples))
        if number is not None and number < 1
    ]
    config = tokenizer_settings(args, problems)
    raise_problems(problems)
    if is_chat_file(args.dataset, args.dataset_type):
        return show_conversations(args, config)

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
    stream.write("".join(drawn(parts, colored=not args.no_color and can_color(stream))))
    tokens = [token for part in parts for token in part.tokens]
    with_loss = sum(token.num_with_loss for token in tokens)
    print(f"{count_with_noun(len(parts), 'document')}; loss on {with_loss:,} of {args.seq_length:,} predicted tokens")
    return 0


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
) -> list[DocumentPart]:
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
    parts: list[DocumentPart] = []
    position = 0
    for piece in dataset.pieces(args.index):
        stop = position + piece.length
        tokens = shown_tokens(sample[position:stop].tolist(), has_loss[position:stop].tolist(), tokenizer)
        title = _title(indexed, piece.sequence, piece.start, piece.length)
        parts.append(DocumentPart(title, tuple(tokens)))
        position = stop
    return parts


def _title(indexed: IndexedDataset, sequence: int, start: int, length: int) -> str:
    import numpy as np

    name = f"document {sequence:,}"
    if not indexed.one_sequence_per_document:
        document = int(np.searchsorted(indexed.document_indices, sequence, side="right")) - 1
        name = f"document {document:,}, sequence {sequence:,}"
    return f"{name}: tokens {start:,} to {start + length - 1:,} of {int(indexed.lengths[sequence]):,}"
