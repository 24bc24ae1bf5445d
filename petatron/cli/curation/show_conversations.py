"""`petatron data show FILE`: a row of conversations or of preferences as a run reads it, with what is learned."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.base.terminal_escape import raw_stream
from petatron.cli.curation.draw_sample import END_OF_DOCUMENT, DocumentPart, drawn, shown_tokens
from petatron.config.schema.objective_and_dataset_names import CONVERSATIONS_DATASET, PREFERENCE_DATASET

if TYPE_CHECKING:
    from petatron.config.schema.data import TokenizerConfig
    from petatron.data.tokenizer import Tokenizer

_SPLITS = ("train", "valid", "test")
_ANSWERS = {PREFERENCE_DATASET: ("chosen", "rejected")}
_UNPAIRED = ("answer", "an answer to another prompt")


def is_chat_file(name: str, dataset_type: str | None) -> bool:
    """Whether a dataset is a file of records, and no prefix of token files."""
    from petatron.data.inputs.input_formats import format_of_name

    return dataset_type is not None or format_of_name(name) is not None


def show_conversations(args: argparse.Namespace, config: TokenizerConfig) -> int:
    from petatron.config.schema.training import TrainConfig
    from petatron.data.build_datasets import chat_kind
    from petatron.data.dataset_kinds import DatasetRequest
    from petatron.data.documents_of_sample import trace_sample
    from petatron.data.prompt.built_in_templates import with_chat_template
    from petatron.data.tokenizer import build_tokenizer
    from petatron.data.train_valid_test_split import split_units
    from petatron.history.draw.terminal import can_color

    kind = chat_kind(args.dataset_type or CONVERSATIONS_DATASET, args.dataset_settings)
    tokenizer = with_chat_template(build_tokenizer(config, vocab_size=args.vocab_size), args.chat_template)
    seed = TrainConfig().seed if args.seed is None else args.seed
    request = DatasetRequest(
        split=args.part,
        num_samples=1,
        seq_length=args.seq_length,
        seed=seed,
        tokenizer=tokenizer,
        vocab_size=args.vocab_size,
    )
    source = kind.open(args.dataset, request)
    units = range(source.num_units)
    if args.split is not None:
        units = split_units(args.split, source.num_units)[_SPLITS.index(args.part)]
    rows = source.samples_per_epoch(units, request)
    count = max(args.num_samples or rows, args.index + 1 if args.num_samples is None else 0)
    dataset = source.dataset(units, DatasetRequest(
        split=args.part, num_samples=count, seq_length=args.seq_length, seed=seed, tokenizer=tokenizer, vocab_size=args.vocab_size
    ))  # fmt: skip
    if not 0 <= args.index < count:
        rule = f"is not a row of {args.dataset}, which has {count:,} here"
        raise_problems([Problem("--index", str(args.index), rule, "They are counted from 0.")])
    sample, trace = cast(Mapping[str, Any], dataset[args.index]), trace_sample(dataset, args.index)
    titles = [str(document.source) for document in trace.documents]
    if "begins" in sample:
        parts = _conversations(sample, titles, tokenizer)
    else:
        parts = _answers(sample, titles, tokenizer, _ANSWERS.get(args.dataset_type, _UNPAIRED))
    print(f"row {args.index:,} of {rows:,} in an epoch ({args.part}, {args.seq_length:,} tokens)")
    stream = raw_stream(sys.stdout)
    stream.write("".join(drawn(parts, colored=not args.no_color and can_color(stream))))
    tokens = [token for part in parts for token in part.tokens]
    shown, learned = sum(token.num_ids for token in tokens), sum(token.num_with_loss for token in tokens)
    print(
        f"{count_with_noun(len(parts), 'part')}; loss on {learned:,} of {count_with_noun(shown, 'token')}, {_padding(args, shown)}"
    )
    return 0


def _padding(args: argparse.Namespace, shown: int) -> str:
    return f"{count_with_noun(max(0, args.seq_length - shown), 'token')} of padding"


def _conversations(sample: Mapping[str, Any], titles: Sequence[str], tokenizer: Tokenizer) -> list[DocumentPart]:
    begins = sample["begins"].tolist()
    starts = sorted({begin for begin in begins if begin >= 0})
    ends = [*starts[1:], sum(begin >= 0 for begin in begins)]
    # Nothing is before the first token of a conversation, so it is never predicted.
    return [
        _part(
            title,
            sample["ids"][begin:end].tolist(),
            [False, *(sample["weights"][begin + 1 : end] > 0).tolist()],
            tokenizer,
        )
        for title, begin, end in zip(titles, starts, ends, strict=True)
    ]


def _answers(
    sample: Mapping[str, Any], titles: Sequence[str], tokenizer: Tokenizer, names: Sequence[str]
) -> list[DocumentPart]:
    parts: list[DocumentPart] = []
    end = 0
    for number, length in enumerate(sample["lengths"].tolist()):
        begin, end = end, end + length
        title = f"{titles[number // 2]}, {names[number % 2]}"
        learned = [False, *sample["learned"][begin + 1 : end].tolist()]
        parts.append(_part(title, sample["ids"][begin:end].tolist(), learned, tokenizer))
    return parts


def _part(title: str, ids: list[int], learned: list[bool], tokenizer: Tokenizer) -> DocumentPart:
    text = "" if tokenizer.eod is None else tokenizer.decode([tokenizer.eod])
    end = END_OF_DOCUMENT if not text or "\ufffd" in text else text
    tokens = tuple(shown_tokens(ids, learned, tokenizer, end=end))
    return DocumentPart(f"{title}: {count_with_noun(len(ids), 'token')}", tokens)
