"""`petatron quickstart`: from nothing to a trained language model within three minutes, step by step.

Nothing is downloaded. Each step uses the same parts as the other subcommands; the training step is `petatron train` itself, with
the command line that is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from petatron.base.errors import LaunchError, Problem, raise_problems
from petatron.base.safe_files import write_atomic
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.mesh.launch.environment import read_environment
from petatron.quickstart.options import QuickstartOptions
from petatron.quickstart.run_length import MAX_STEPS, RunLengthChoice, choose_run_length, step_runner, time_step
from petatron.validate import load_config, resolve_config

if TYPE_CHECKING:
    from petatron.quickstart.evaluate_held_out import HeldOutLoss, TrainedModel
    from petatron.quickstart.stages import Workspace

PROMPT = "import os\n\n\ndef main("
SEED = 1234
NUM_STEPS = 6
SAMPLE_S = 8.0
"""Kept for the sample when the evaluation has to end early."""
_EXIT_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the subcommand."""
    defaults = QuickstartOptions()
    root = CommandParser(
        prog="petatron quickstart",
        description="Train a small LLaMA on the source of Python's standard library, split over two processes of this "
        "machine's CPU, within three minutes. Nothing is downloaded; finished steps are not repeated.",
    )
    add = root.add_argument
    add("--tp", type=int, default=defaults.tensor_parallel, metavar="N", help="processes that share the model (2)")
    add("--steps", type=int, metavar="N", help=f"training iterations (what fits into --minutes, up to {MAX_STEPS})")
    add("--minutes", type=float, default=defaults.minutes, metavar="M", help="time for everything (3)")
    add("--out", default=defaults.out, metavar="DIR", help=f"folder for all results ({defaults.out})")
    add("--fresh", action="store_true", help="do everything again, even what is finished")
    return root


def main(argv: Sequence[str]) -> int:
    """Read the flags and run."""
    args = vars(parser().parse_args(list(argv)))
    return quickstart(QuickstartOptions(tensor_parallel=args.pop("tp"), **args))


def quickstart(options: QuickstartOptions) -> int:
    """Runs all steps and prints each."""
    _check(options)
    from petatron.quickstart.stages import Workspace, prepare_corpus, prepare_data, prepare_tokenizer

    started = time.monotonic()
    space = Workspace(options.out)
    space.open(fresh=options.fresh)
    summary: dict[str, Any] = {}
    with _step(1, "corpus: the source of this Python's standard library, nothing to download", summary):
        corpus, reused = prepare_corpus(space, options)
        sizes = [sum(len(file.text.encode()) for file in files) / 1e6 for files in (corpus.train, corpus.held_out)]
        summary["corpus"] = {
            "train_files": len(corpus.train),
            "train_megabytes": sizes[0],
            "held_out_files": len(corpus.held_out),
            "held_out_megabytes": sizes[1],
        }
        _print_line(f"{len(corpus.train)} files, {sizes[0]:.1f} MB to train on; {_reuse_text(reused)}")
        _print_line(f"{len(corpus.held_out)} files, {sizes[1]:.1f} MB held out: the model never sees them")
    with _step(2, "tokenizer: a byte-level BPE of the training files", summary):
        tokenizer, reused = prepare_tokenizer(space, corpus, options.vocab_size)
        summary["vocab_size"] = tokenizer.vocab_size
        _print_line(f"{tokenizer.vocab_size:,} ids in {space.tokenizer}; {_reuse_text(reused)}")
    with _step(3, "data: text to token files", summary):
        data, reused = prepare_data(space)
        for split, dataset in data.items():
            summary[f"{split}_tokens"] = dataset.num_tokens
            _print_line(f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens in {dataset.prefix}.bin")
        _print_line(_reuse_text(reused))
    code = _train(space, options, summary, started_s=started)
    if code:
        return code
    from petatron.quickstart.evaluate_held_out import evaluate_held_out

    with _one_thread():
        title = "evaluation: the checkpoint, loaded into one process instead of the ranks that trained it"
        with _step(5, title, summary):
            end_s = started + 60 * options.minutes - SAMPLE_S
            trained = evaluate_held_out(
                str(space.settings), data["train"], data["held_out"], time_is_over=lambda: time.monotonic() > end_s
            )
            _report_losses(trained.held_out, summary)
        with _step(6, "a sample: the trained model continues a file", summary):
            _print_sample(trained, options, summary)
    seconds = time.monotonic() - started
    write_atomic(space.summary, json.dumps({**summary, "seconds": round(seconds, 2)}, indent=1) + "\n")
    print(f"\nDone in {_format_duration(seconds)}. All of it is in {space.root}; figures in {space.summary}.")
    print(f"\nTry next:\n{next_commands(space, options, steps=summary['steps'])}")
    return 0


def _check(options: QuickstartOptions) -> None:
    """All problems of the flags, before any work."""
    if read_environment().launcher != "single":
        raise LaunchError("petatron quickstart starts its own ranks. Run it by itself, not under torchrun or srun.")
    problems: list[Problem] = []
    if options.steps is not None and options.steps < 2:
        problems.append(Problem("--steps", str(options.steps), "is less than 2", "Leave it out: a number is chosen."))
    if not options.minutes > 0:
        problems.append(Problem("--minutes", str(options.minutes), "is no time at all", "Give minutes above 0."))
    layout = [f"--{name.replace('_', '-')}={value}" for name, value in options.model.items()]
    layout += ["--vocab-size", str(options.vocab_size), "--tp", str(options.tensor_parallel)]
    raise_problems([*problems, *resolve_config(layout, require_training=False)[1]])


def _train(workspace: Workspace, options: QuickstartOptions, summary: dict[str, Any], *, started_s: float) -> int:
    """Runs step 4 through the launcher; returns nonzero when it failed or was interrupted."""
    from petatron.checkpoint.files.step_folder import latest_step
    from petatron.mesh.launch.local_launcher import run_ranks
    from petatron.quickstart.stages import prepare_settings, stop_message, training_flags

    ranks = options.tensor_parallel
    with _step(4, f"training: every layer split over {ranks} CPU process{'es' if ranks > 1 else ''}", summary):
        length = _choose_length(workspace, options, summary, started_s=started_s)
        steps = summary["steps"] = length.steps
        prepare_settings(workspace, options, steps=steps)
        flags = training_flags(workspace, options, minutes=length.minutes)
        summary["command"] = f"petatron train {shlex.join(flags)}"
        run = load_config(flags).config
        before = latest_step(workspace.training) or 0
        if before >= steps:
            summary["iterations"] = before
            _print_line("finished before; --fresh trains again")
            return 0
        model = run.model
        layers = f"{model.num_layers} layers of width {model.hidden_size}"
        _print_line(f"{layers}, {model.num_attention_heads} heads; {workspace.settings}")
        if before:
            _print_line(f"goes on from the checkpoint of iteration {before}")
        print(f"\n  {summary['command']}\n", flush=True)
        code = run_ranks([sys.executable, "-m", "petatron", "train", *flags], nproc=ranks)
        if code:
            return code
        summary["iterations"] = latest_step(workspace.training) or 0
        reason = stop_message(workspace.training / "metrics.jsonl")
        if summary["iterations"] >= steps:
            return 0
        _print_line(f"{reason} ({steps} were {'chosen' if options.steps is None else 'asked for'})")
        if "received SIG" in reason:
            _print_line("the same command goes on from there")
            return _EXIT_INTERRUPTED
        return 0


def _choose_length(
    workspace: Workspace, options: QuickstartOptions, summary: dict[str, Any], *, started_s: float
) -> RunLengthChoice:
    """Returns the steps that were asked for or chosen before; else times some steps in this process and chooses."""
    from petatron.quickstart.stages import chosen_steps, prepare_settings, record_chosen_steps

    known = options.steps or chosen_steps(workspace)
    if known is not None:
        elapsed_s = time.monotonic() - started_s
        return choose_run_length(minutes=options.minutes, elapsed_s=elapsed_s, step_s=0.1, start_s=5.0, steps=known)
    prepare_settings(workspace, options, steps=MAX_STEPS)
    before_s = time.monotonic()
    with _one_thread():
        steps = step_runner(str(workspace.settings))
        next(steps)
        start_s = time.monotonic() - before_s  # imports and the model, as in each rank
        step_s = summary["measured_step_seconds"] = time_step(lambda: next(steps))
        steps.close()
    elapsed_s = time.monotonic() - started_s
    chosen = choose_run_length(minutes=options.minutes, elapsed_s=elapsed_s, step_s=step_s, start_s=start_s)
    record_chosen_steps(workspace, chosen.steps)
    _print_line(f"a step takes {1000 * step_s:.0f} ms here: {chosen.steps} steps fit into {options.minutes:g} minutes")
    return chosen


def _report_losses(held_out: HeldOutLoss, summary: dict[str, Any]) -> None:
    summary["held_out"] = {
        "tokens": held_out.tokens,
        "model_loss": held_out.model_loss,
        "model_perplexity": math.exp(held_out.model_loss),
        "unigram_loss": held_out.unigram_loss,
        "unigram_perplexity": math.exp(held_out.unigram_loss),
        "beats_unigram": held_out.model_loss < held_out.unigram_loss,
    }
    _print_line(f"{f'{held_out.tokens:,} held-out tokens':<36} loss (nats per token)   perplexity")
    for name, loss in (("this model", held_out.model_loss), ("unigram (token frequencies)", held_out.unigram_loss)):
        _print_line(f"  {name:<32} {loss:>12.3f} {math.exp(loss):>22,.1f}")
    if held_out.model_loss < held_out.unigram_loss:
        ratio = math.exp(held_out.unigram_loss - held_out.model_loss)
        _print_line(f"It has learned from context: {ratio:.1f} times less perplexed than by frequencies alone.")
    else:
        _print_line("It does not beat the frequencies yet: it needs more --steps.")


def _print_sample(trained: TrainedModel, options: QuickstartOptions, summary: dict[str, Any]) -> None:
    from petatron.infer.generate import generate

    tokenizer = trained.tokenizer
    ids = generate(
        trained.model,
        tokenizer.encode(PROMPT),
        max_new_tokens=options.new_tokens,
        temperature=0.7,
        top_k=40,
        seed=SEED,
        eod=tokenizer.eod,
    )
    text = tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.eod else ids)
    summary["parameters"] = trained.num_parameters
    summary["sample"] = {"prompt": PROMPT, "text": text}
    print(textwrap.indent(PROMPT + text, "    | ", lambda line: True))


def next_commands(workspace: Workspace, options: QuickstartOptions, *, steps: int) -> str:
    """Returns commands that work as printed, each with what it shows."""
    settings, data = shlex.quote(str(workspace.settings)), shlex.quote(str(workspace.data("train")))
    longer = shlex.quote(str(workspace.root.parent / f"{workspace.root.name}-longer"))
    model = shlex.quote(str(workspace.training))
    commands = {
        "continue a text of your own": f"generate {model} --prompt 'def hello(' --max-tokens 60 --temperature 0.7",
        "talk to it; it knows Python better than people": f"chat {model} --temperature 0.7",
        "prove that the split changes nothing: the same steps in one process, compared tensor by tensor": (
            f"verify --config {settings} --train-data-path {data} --tp {options.tensor_parallel} --steps 5"
        ),
        "train twice as long, from this checkpoint, with two replicas instead of a split model": (
            f"train --config {settings} --dp 2 --micro-batch-size {options.batch_size // 2} "
            f"--train-iters {2 * steps} --override-opt-param-scheduler --save {longer}"
        ),
        "every setting and where it came from": f"config show --config {settings} --changed",
        "look into the token files": (
            f"data inspect {data} --tokenizer-model {shlex.quote(str(workspace.tokenizer))} --document 7"
        ),
        "what this machine offers for larger runs": "doctor",
    }
    return "\n".join(f"  # {what}\n  petatron {command}" for what, command in commands.items())


@contextmanager
def _step(number: int, title: str, summary: dict[str, Any]) -> Iterator[None]:
    """Prints a headline before, and the time it took after."""
    started = time.monotonic()
    print(f"\n[{number}/{NUM_STEPS}] {title}", flush=True)
    yield
    seconds = time.monotonic() - started
    summary.setdefault("step_seconds", {})[title.split(":")[0]] = round(seconds, 2)
    print(f"    {_format_duration(seconds)}", flush=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices of this size gain nothing from more threads, and lose much where other programs use the cores too."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _print_line(text: str) -> None:
    print(f"    {text}", flush=True)


def _reuse_text(reused: bool) -> str:
    return "kept from the last time" if reused else "new"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
