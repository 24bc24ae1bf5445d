"""Starts lm_eval's own command line for `petatron lm-eval ...`, with the model `petatron` registered and the default.

lm_eval finds models in a table of its own alone, so a program that registers one has to start it. All words are lm_eval's. It draws
progress bars on stderr, which is therefore not escaped.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence

from petatron.base.errors import DataError, LaunchError
from petatron.base.terminal_escape import raw_stream

COMMANDS = ("run", "ls", "validate")
_MODEL_FLAGS = ("--model", "-M", "--config", "-C")


def main(argv: Sequence[str]) -> int:
    try:
        importlib.import_module("petatron.integrations.lm_eval")
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise LaunchError(f"petatron lm-eval needs {missing}. Install it: pip install 'petatron[lm-eval]'") from error
    with _command_line(with_default_model(argv)), contextlib.redirect_stderr(raw_stream(sys.stderr)):
        try:
            cli_evaluate()
        except SystemExit as done:  # argparse ends the process after help and mistakes
            return done.code if isinstance(done.code, int) else int(done.code is not None)
        except ConnectionError as error:
            raise DataError(
                f"{error}. lm_eval downloads a task's data when it is first used; without a network use what is in its cache, or a task "
                "of your own with local files (--include_path FOLDER)."
            ) from error
    return 0


def with_default_model(argv: Sequence[str]) -> list[str]:
    """Returns lm_eval's words; a run that names neither a model nor a file of settings measures the model `petatron`.

    >>> with_default_model(["--tasks", "arc_easy"]), with_default_model(["ls", "tasks"])
    (['run', '--model', 'petatron', '--tasks', 'arc_easy'], ['ls', 'tasks'])
    """
    if not argv or argv[0] in ("-h", "--help") or argv[0] in COMMANDS[1:]:
        return list(argv)
    rest = argv[1:] if argv[0] == "run" else argv
    named = any(word.partition("=")[0] in _MODEL_FLAGS for word in rest)
    return ["run", *rest] if named or not rest else ["run", "--model", "petatron", *rest]


@contextlib.contextmanager
def _command_line(argv: Sequence[str]) -> Iterator[None]:
    """While entered, the process was started with these arguments: lm_eval reads no others."""
    before, sys.argv = sys.argv, ["lm-eval", *argv]
    try:
        yield
    finally:
        sys.argv = before
