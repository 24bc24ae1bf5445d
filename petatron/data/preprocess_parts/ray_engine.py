"""Tokenizes parts as tasks of Ray, which is an extra and imported only here.

The machines of the cluster share the folders of the inputs and of the output, under the same names. A part whose worker or machine is
lost is tokenized again elsewhere, and no other part is.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable
from petatron.data.preprocess_parts.encode_blocks import limit_library_threads
from petatron.data.preprocess_parts.part_report import PartReport
from petatron.data.preprocess_parts.parts_folder import TokenizingJob
from petatron.data.preprocess_report import OnProgress, PartsProgress

_CONNECT_S = 10.0
_MAX_ATTEMPTS = 10
"""A part that is lost this often is itself the reason: a text may take more memory than a machine has."""


def tokenize_on_ray(
    tokenize: Callable[[int], PartReport],
    address: str | None,
    on_progress: OnProgress | None,
    job: TokenizingJob,
    parts: Sequence[int],
) -> Iterator[PartReport]:
    """Yields the reports of parts as they are finished. A cluster that the caller is connected to is used as it is."""
    ray = _library()
    progress = PartsProgress(job, parts, on_progress)
    connects = not ray.is_initialized()
    if connects:
        _connect(ray, address)
    pending: dict[Any, int] = {}
    try:
        task = ray.remote(num_cpus=1, max_retries=_MAX_ATTEMPTS - 1)(_run_task)
        pending = {task.remote(tokenize, part, os.getcwd()): part for part in parts}
        while pending:
            (done, *_), _ = ray.wait(list(pending), num_returns=1)
            report = PartReport.from_json(_result(ray, done, pending.pop(done)))
            progress.add(report)
            yield report
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
        if connects:
            ray.shutdown()


def _run_task(tokenize: Callable[[int], PartReport], part: int, folder: str) -> dict[str, Any]:
    """Runs on the cluster, where paths that are not absolute mean those of the driver."""
    os.chdir(folder)
    limit_library_threads()
    return tokenize(part).to_json()


def _result(ray: Any, reference: Any, part: int) -> dict[str, Any]:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, DataError):
            raise DataError(str(cause)) from error
        raise DataError(f"Part {part} failed on Ray: {printable(str(cause), max_chars=300)}") from error
    except ray.exceptions.RayError as error:
        raise DataError(
            f"Part {part} was lost on Ray {_MAX_ATTEMPTS} times: {_first_line(error)} Look at the memory of the machines, and run the "
            "command again."
        ) from error


def _connect(ray: Any, address: str | None) -> None:
    try:
        _try_port(address)
        ray.init(address=address or "auto", log_to_driver=False, logging_level="error")
    except Exception as error:
        where = "" if address is None else f" at --address {address}"
        raise DataError(
            f"No Ray cluster{where} can be used: {_first_line(error)} Start one with `ray start --head`."
        ) from error


def _try_port(address: str | None) -> None:
    """Raises where nothing listens: Ray would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _first_line(error: Exception) -> str:
    return printable(str(error).strip().partition("\n")[0].removesuffix("."), max_chars=300) + "."


def _library() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise DataError("--engine ray needs Ray, which is not installed: pip install 'petatron[ray]'.") from error
