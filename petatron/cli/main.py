"""`petatron SUBCOMMAND ...`: finds the subcommand's module, runs it, and turns errors into messages and exit codes.

A subcommand's module is imported only when the subcommand is used, so that help needs neither torch nor the schema. Each has
`main(argv) -> int`. Errors a user can fix are printed without a traceback; anything else is a bug and keeps its own.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from petatron.base.errors import ConfigError, PetatronError
from petatron.base.terminal_escape import escaped_output, escaped_stream
from petatron.base.version import __version__
from petatron.config.import_user_modules import import_typed, split_imports
from petatron.mesh.launch.environment import imports_from_env

SUBCOMMANDS: Mapping[str, str] = {
    "quickstart": "train a small model on this machine in a few minutes, nothing to download",
    "train": "train a model",
    "posttrain": "reinforcement learning: the model answers prompts, and learns from the rewards",
    "port": "make a configuration of a Megatron script, check it, plan it, or train it as a toy",
    "generate": "continue prompts with a trained model, one by one or a file of them",
    "chat": "talk to a trained model in the terminal",
    "data": "fetch, preprocess and inspect datasets",
    "serve": "answer requests over HTTP with the model of a checkpoint",
    "eval": "measure checkpoints on tasks: perplexity, LAMBADA, multiple choice, side by side",
    "lm-eval": "measure checkpoints with lm-evaluation-harness (lm_eval), all of its flags and tasks",
    "checkpoint": "inspect, verify, compare, prune and convert checkpoints",
    "plot": "draw the curves of runs, in the terminal or as a picture",
    "runs": "list runs, and compare two of them",
    "report": "write a run as one HTML file: curves, settings, checkpoints, samples",
    "plan": "simulate and draw pipeline schedules, predict memory and what would fit, before anything is started",
    "verify": "prove that a parallel layout trains the same model as one process",
    "bench": "measure speed side by side",
    "config": "show, compare and document configurations",
    "completion": "print a script that completes commands in bash, zsh or fish",
    "doctor": "report versions, devices, backends and what missing extras cost",
}

_MODULES: Mapping[str, str] = {
    "generate": "generation.generate",
    "chat": "generation.chat",
    "lm-eval": "subcommands.lm_eval_starter",
}
"""The module of a subcommand, where it is not named like it."""

_MODEL_SUBCOMMANDS = "train generate chat serve eval lm-eval checkpoint plan verify bench config".split()
_WITHOUT_TRAIN_FLAGS = ("checkpoint",)
"""Subcommands that may need the code of a model, and those of them whose arguments are not flags of `petatron train`."""

_EXIT_ERROR, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130


def entry(*arguments: str) -> None:
    """The console script; `arguments` precede what was typed. Output stays escaped for tracebacks and at exit."""
    sys.stdout, sys.stderr = escaped_stream(sys.stdout), escaped_stream(sys.stderr)
    sys.exit(main([*arguments, *sys.argv[1:]]))


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand and returns its exit code: 2 for a wrong command line or configuration, 1 for other errors.

    Printed output may contain foreign text: its control characters are escaped here, for all subcommands.
    """
    with escaped_output():
        return _run(list(argv))


def _run(argv: list[str]) -> int:
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has exited; a second failure while Python flushes at exit would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_ERROR
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _EXIT_USAGE
    except PetatronError as error:
        print(f"petatron: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        print("petatron: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return code


def usage() -> str:
    width = max(len(subcommand) for subcommand in SUBCOMMANDS)
    subcommands = "\n".join(f"  {subcommand:{width}}  {summary}" for subcommand, summary in SUBCOMMANDS.items())
    return (
        "usage: petatron SUBCOMMAND [arguments]\n\n"
        "Train language models of any size on any number of devices.\n\n"
        f"subcommands:\n{subcommands}\n\n"
        "petatron SUBCOMMAND --help tells more about a subcommand; petatron --version prints the version.\n"
        "To start: petatron quickstart"
    )


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else _EXIT_USAGE
    if argv[0] in ("-V", "--version"):
        print(f"petatron {__version__}")
        return 0
    subcommand, rest = argv[0], argv[1:]
    if subcommand not in SUBCOMMANDS:
        close = difflib.get_close_matches(subcommand, SUBCOMMANDS, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Subcommands: {', '.join(SUBCOMMANDS)}."
        print(f"petatron: {subcommand!r} is not a subcommand. {hint}", file=sys.stderr)
        return _EXIT_USAGE
    if subcommand in _MODEL_SUBCOMMANDS and not {"-h", "--help"} & set(rest):
        typed, rest = split_imports(rest) if subcommand in _WITHOUT_TRAIN_FLAGS else ([], rest)
        import_typed(imports_from_env() + typed)
    return import_subcommand(subcommand).main(rest)


def import_subcommand(subcommand: str) -> ModuleType:
    return importlib.import_module(f"petatron.cli.{_MODULES.get(subcommand, subcommand)}")
