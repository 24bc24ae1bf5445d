"""Ends a rank's process: with a report for its launcher, or for ranks on other machines that nothing else would end.

When a rank fails it writes its error to the file named by TORCHELASTIC_ERROR_FILE, in torch elastic's format, and prints nothing
itself: its launcher (torchrun, or `mesh/launch/local_launcher.py`) shows one report instead of N interleaved tracebacks. Its peers
then fail too, because their connections break. Such echoes are marked and dated two seconds later, since torchrun compares whole
seconds and would otherwise pick any of them as the first cause.

torch is imported inside the functions that need it: the launcher shares this module and has to start ranks at once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from petatron.base.errors import ConfigError, LaunchError, PetatronError
from petatron.base.log import get_logger
from petatron.base.safe_files import write_atomic
from petatron.mesh.launch.environment import ERROR_FILE, has_peers, process_variables, read_environment

_log = get_logger(__name__)
EXIT_NOTICE_S = 1.0
ECHO_DELAY_S = 2


def write_error_file(
    path: str, *, message: str, text: str, echo: bool, report: Mapping[str, object] | None = None
) -> bool:
    """Writes a report for the launcher in torch elastic's format, atomically; `report` is of `mesh/diagnose/failure_report.py`."""
    now = time.time()
    details = {
        "py_callstack": text,
        "timestamp": str(int(now) + (ECHO_DELAY_S if echo else 0)),
        "time": now,
        "echo": echo,
        "communication": report,
    }
    try:
        write_atomic(Path(path), json.dumps({"message": {"message": message, "extraInfo": details}}))
    except OSError:
        return False
    return True


def is_echo(error: BaseException) -> bool:
    """Whether a communication call broke, which nearly always means that another rank failed first."""
    if getattr(error, "echo", False):
        return True
    if error.__cause__ is not None and is_echo(error.__cause__):
        return True
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and re.search(r"/gloo/|by peer|Broken pipe", str(error)) is not None


def run_rank_main(main: Callable[[], int], *, env: Mapping[str, str] | None = None) -> int:
    """Runs a rank's main to the end of its process; on failure writes a report for the launcher.

    A rank with peers, or with a launcher that reads the error file, exits here without running destructors. After a failure,
    leaving a process group whose peers are gone can take minutes; after success, a communication thread that still frees a
    tensor during interpreter shutdown would abort the process. A single process returns main's result or raises its exception.
    """
    env = process_variables() if env is None else env
    alone = not has_peers(env)
    error_file = env.get(ERROR_FILE)
    try:
        code = main()
    except (KeyboardInterrupt, SystemExit) as stop:
        if alone and not error_file:
            raise
        _exit_now(130 if isinstance(stop, KeyboardInterrupt) else _exit_code(stop))
    except Exception as error:
        failed = 2 if isinstance(error, ConfigError) else 1  # as on the command line of a single process
        written = error_file is not None and write_error_file(
            error_file,
            message=f"{type(error).__name__}: {error}",
            text=_error_text(error),
            echo=is_echo(error),
            report=getattr(error, "report", None),
        )
        if alone and not written:
            raise
        if not written:
            _log.error("rank %s failed: %s", env.get("RANK", env.get("SLURM_PROCID", "?")), _error_text(error))
        if not alone and not is_echo(error):
            _notify_peers(_error_text(error), env)
        _exit_now(failed)
    if not alone:
        _exit_now(code)
    return code


def exit_rank(code: int, text: str, *, env: Mapping[str, str] | None = None) -> NoReturn:
    """Ends this rank from any thread, with a report for its launcher, or for ranks that no launcher of this machine would end."""
    env = process_variables() if env is None else env
    if env.get(ERROR_FILE):
        write_error_file(env[ERROR_FILE], message=text, text=text, echo=False)
    peers = threading.Thread(target=_notify_peers, args=(text, env), daemon=True)
    peers.start()
    peers.join(EXIT_NOTICE_S)  # their store may be gone, and nothing here may wait for it
    os._exit(code)


def _notify_peers(text: str, env: Mapping[str, str]) -> None:
    """Notifies ranks that no launcher of this machine would end."""
    try:
        environment = read_environment(env)
    except LaunchError:  # the environment may be what is wrong
        return
    if environment.store_file is None and environment.world_size > 1:
        from petatron.mesh.launch.rendezvous import notify_peers

        notify_peers(environment, text)


def _error_text(error: Exception) -> str:
    """Returns the text for the user: a `PetatronError` without our stack, any other error with it."""
    if isinstance(error, PetatronError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def _exit_code(stop: SystemExit) -> int:
    """Returns the code Python itself would exit with: a message goes to stderr and counts as 1."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)
