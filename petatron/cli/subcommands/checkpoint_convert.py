"""`petatron checkpoint convert`: converts a model between formats, in one process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import CheckpointError, Problem, raise_problems
from petatron.base.terminal_escape import printable
from petatron.cli.subcommands.command_parser import WEIGHTS_HELP
from petatron.cli.subcommands.handled_signals import sigterm_raises
from petatron.cli.subcommands.stderr_progress import StderrProgress

if TYPE_CHECKING:
    from petatron.pretrained.convert_model import Conversion, ConversionProgress, TokenizerFiles
    from petatron.pretrained.model_reader import ModelReader

FORMATS = ("petatron", "huggingface", "megatron", "peft")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MEGATRON_ONLY = ("megatron_format", "megatron_spec", "megatron_optimizer", "tp", "pp", "ep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the subcommand."""
    add = parser.add_argument
    add("source", type=Path, help="folder of a model, of checkpoints, or of one checkpoint")
    add("target", type=Path, help="folder to write; it must not exist yet")
    add("--from", dest="kind", choices=("auto", *FORMATS), default="auto", help="what the source is (default: look)")
    add("--to", choices=FORMATS, required=True, help="what to make of it")
    add("--step", type=int, metavar="N", help="which step of the source (default: the newest)")
    add("--weights", metavar="KIND", help=WEIGHTS_HELP)
    add("--average-last", type=int, metavar="N", help="the mean of the last N steps, in double precision")
    add("--dtype", choices=tuple(_DTYPES), help="dtype of the weights (default: as they are)")
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, SentencePiece's .model, or a folder, to put beside the weights",
    )
    add("--vocab-size", type=int, metavar="N", help="token ids of a Megatron model whose checkpoint does not say")
    add("--megatron-format", choices=("legacy", "torch_dist"), help="how to write for Megatron (default: torch_dist)")
    text = "for Megatron with Transformer Engine or its own layers (default: te)"
    add("--megatron-spec", choices=("te", "local"), help=text)
    text = "for a Megatron run with or without --use-distributed-optimizer (default: distributed)"
    add("--megatron-optimizer", choices=("distributed", "plain"), help=text)
    add("--merge", action="store_true", help="merge adapters into the weights (huggingface and megatron do anyway)")
    add(
        "--base-model",
        metavar="MODEL",
        help="model that the adapters of --to peft are beside (default: where the run started)",
    )
    add("--no-optim", action="store_true", help="convert the weights alone: no optimizer state, schedule and progress")
    add("--tp", type=int, metavar="N", help="tensor-parallel ranks of the Megatron files (default: 1)")
    add("--pp", type=int, metavar="N", help="pipeline ranks of the Megatron files (default: 1)")
    add("--ep", type=int, metavar="N", help="expert-parallel ranks of the Megatron files (default: 1)")


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was made."""
    raise_problems(_problems(options))

    import torch

    from petatron.pretrained.average_checkpoints import average_checkpoints, last_steps
    from petatron.pretrained.convert_model import ConversionOptions, MegatronLayout, convert
    from petatron.pretrained.hub import local_model
    from petatron.pretrained.model_reader import open_model_reader

    kind = None if options.kind == "auto" else options.kind
    path = local_model(options.source, where="SOURCE")
    open_source = partial(
        open_model_reader, path, model_format=kind, vocab_size=options.vocab_size, weights=options.weights
    )
    if options.average_last is None:
        source = open_source(step=options.step)
    else:
        steps = last_steps(path, options.average_last, before=options.step)
        source = average_checkpoints([open_source(step=step) for step in steps])
    tokenizer, tokenizer_note = _tokenizer(options, source)
    conversion = ConversionOptions(
        target_format=options.to,
        dtype=None if options.dtype is None else getattr(torch, _DTYPES[options.dtype]),
        tokenizer=tokenizer,
        megatron=MegatronLayout(
            format=options.megatron_format or "torch_dist",
            tp=options.tp or 1,
            pp=options.pp or 1,
            ep=options.ep or 1,
            layer_spec=options.megatron_spec or "te",
            optimizer=options.megatron_optimizer or "distributed",
        ),
        training=not options.no_optim,
        merge=options.merge,
        base_model=options.base_model,
    )
    with sigterm_raises(), _progress() as on_progress:
        result = convert(source, options.target, conversion, on_progress=on_progress)
    averaged = f", the mean of {options.average_last} steps to" if options.average_last is not None else ","
    print(f"{options.source} ({source.format}{averaged} step {source.step}) is now {options.target} ({options.to})")
    if options.to == "petatron" and result.has_training:
        print(f"resume from it: petatron train --config {options.target}/config.yaml --load {options.target} ...")
    elif options.to == "petatron":
        print(f"start from it: petatron train --from {options.target} ...")
    if conversion.merges(source) and options.to != "peft":
        print(f"the adapters ({source.spec.config.adapter}) are merged into the weights")
    if result.has_training:
        print("optimizer state, schedule and progress went along")
    if result.left_behind:
        print(
            f"note: {', '.join(result.left_behind)} of {options.source} stay behind{_why_behind(options, source, result)}"
        )
    if tokenizer_note:
        print(f"note: {tokenizer_note}.")
    for note in _megatron_notes(options, source) if options.to == "megatron" else ():
        print(f"note: {note}")
    return 0


def _why_behind(options: argparse.Namespace, source: ModelReader, result: Conversion) -> str:
    if result.has_training:
        return ": the other program has no use for them."
    if (
        options.to == "megatron"
        and options.megatron_format == "legacy"
        and source.open_training
        and not options.no_optim
    ):
        return ": legacy files tell the owner of optimizer state by order alone. --megatron-format torch_dist takes it along."
    return ": weights are converted, and nothing else."


def _megatron_notes(options: argparse.Namespace, source: ModelReader) -> Iterator[str]:
    """Yields what of the source or the flags is not in the files."""
    layout = [f"--{name} {size}" for name in ("tp", "pp", "ep") if (size := getattr(options, name)) is not None]
    if layout and options.megatron_format != "legacy":
        yield (
            f"torch_dist files have no layout and load in any. {', '.join(layout)} stands in the checkpoint's arguments, and the "
            "vocabulary is padded for it. --megatron-format legacy writes files that are cut that way."
        )
    tokenizer = [name for name in source.companion_files if name != "generation_config.json"]
    if tokenizer:
        yield (
            f"{', '.join(tokenizer)} stay behind: a Megatron checkpoint has no place for a tokenizer, which its flags name "
            "(--tokenizer-model)."
        )


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    for name in _MEGATRON_ONLY:
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and options.to != "megatron":
            rule = f"is about Megatron's files, and --to is {options.to}, which has no layout"
            yield Problem(flag, str(value), rule, "Leave it out.")
        elif isinstance(value, int) and value < 1:
            yield Problem(flag, str(value), "is below 1", "Use 1 or more.")
    for name in ("base_model",) if options.to != "peft" else ("merge", "tokenizer"):
        if getattr(options, name):
            rule = "is about --to peft" if name == "base_model" else f"has no effect on --to {options.to}"
            yield Problem(f"--{name.replace('_', '-')}", "", rule, "Leave it out.")
    if options.tokenizer is not None and options.to == "megatron":
        rule = "goes beside the weights, and a Megatron checkpoint has no place for it"
        yield Problem("--tokenizer", str(options.tokenizer), rule, "Leave it out.")
    for flag, value, least, why, fix in (
        ("--average-last", options.average_last, 2, ", and fewer have no mean", "Use 2 or more."),
        ("--step", options.step, 0, "", "Steps are counted from 0."),
        ("--vocab-size", options.vocab_size, 1, "", "Give the number of token ids."),
    ):
        if value is not None and value < least:
            yield Problem(flag, str(value), f"is below {least}{why}", fix)


def _tokenizer(options: argparse.Namespace, source: ModelReader) -> tuple[TokenizerFiles | None, str | None]:
    """Returns the tokenizer to put beside the weights in place of the source's own files, and what to tell about it.

    It is the one that is asked for, else the one that the arguments of a Megatron checkpoint name, if its files are here.
    """
    from petatron.config.schema.data import TokenizerConfig
    from petatron.data.tokenizer import build_tokenizer, open_tokenizer_files
    from petatron.data.transformers_tokenizer import missing_for_transformers
    from petatron.pretrained.convert_model import TokenizerFiles

    named = source.tokenizer
    files = [str(named[name]) for name in ("tokenizer_model", "vocab_file", "merge_file") if name in named]
    rows = source.spec.vocab_size
    if options.tokenizer is not None:
        tokenizer, where = open_tokenizer_files(options.tokenizer), f"--tokenizer {options.tokenizer}"
    elif not files or options.to == "megatron":
        return None, None
    elif missing := [file for file in files if not Path(file).exists()]:
        told = " and ".join(printable(file) for file in missing)
        return (
            None,
            f"the checkpoint's arguments name the tokenizer {told}, which is not here; --tokenizer puts one beside the weights",
        )
    else:
        tokenizer = build_tokenizer(TokenizerConfig(**named), vocab_size=rows)
        where = f"the tokenizer that the checkpoint's arguments name ({' and '.join(map(printable, files))})"
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{where} has {tokenizer.vocab_size} ids, and the model in {source.path} has {rows}. Give --tokenizer the one that the "
            "model was trained with."
        )
    note = missing_for_transformers(tokenizer)
    if note is None and options.tokenizer is None:
        note = f"{where} is beside the weights"
    return TokenizerFiles(tokenizer.files(), tokenizer.eod), note


def _progress() -> StderrProgress:
    started = time.monotonic()

    def describe(now: ConversionProgress) -> str:
        left = max(0, int((time.monotonic() - started) * (now.total_bytes / max(now.done_bytes, 1) - 1)))
        done = f"{now.done_bytes / 1e9:.1f} of {now.total_bytes / 1e9:.1f} GB"
        return f"{done}, {left // 60}:{left % 60:02d} left, at {now.name}"

    return StderrProgress(describe, plain_s=5.0)
