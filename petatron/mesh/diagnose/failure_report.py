"""The report of a communication failure: which ranks, which operation, over which axis, since when.

When a rank dies, or never arrives, its peers fail inside their current communication, with a backend error that names a socket at
best. The record of communication (`mesh/comm_record.py`) knows more. It is used in three ways:

- A call that breaks raises `CommunicationError`, which says where this rank was and includes the backend's message.
- A rank that hangs reports it before the backend's own watchdog ends the process without a report (`watchdog.py`).
- The launcher combines the ranks' reports: who was waiting where, and who is behind (`combine_reports`).

A report is a table of JSON values, since it passes through the error file of a rank. Nothing here imports torch: the launcher
reads reports.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petatron.base.errors import TrainError

if TYPE_CHECKING:
    from petatron.mesh.comm_record import CommEvent, CommRecord

RankReport = Mapping[str, Any]
_MAX_PREVIOUS_OPERATIONS = 5
_STATES_OUTSIDE_CALL = ("idle", "device")
"""States of a rank whose last operation may be complete."""
_MAX_PLACES = 8
REPORT_REQUEST_FILE = "report-now"
"""A file of this name in the folder of the error files: the launcher requests a report from all ranks by it."""


class CommunicationError(TrainError):
    """A collective or transfer broke, nearly always because another rank failed or did not arrive."""

    def __init__(self, report: RankReport, cause: str) -> None:
        self.report = report
        super().__init__("\n".join([f"{describe_rank(report)} It broke with:", f"  {cause}", *last_operations(report)]))


def communication_error(error: BaseException, event: CommEvent, record: CommRecord) -> CommunicationError:
    """Returns the error to raise in place of a backend's."""
    cause = next((line for line in str(error).splitlines() if line.strip()), "") or type(error).__name__
    return CommunicationError(build_rank_report(record, event, state="failed"), cause)


def build_rank_report(
    record: CommRecord, event: CommEvent | None, *, state: str, main_thread_at: str | None = None
) -> RankReport:
    """Reports where a rank is. `state` is failed or waiting (in `event`), or idle or device (waits for its device) after `event`, the
    last one it started.

    `main_thread_at` is where its main thread is.
    """
    earlier = [other for other in record.events() if event is None or other.sequence_number < event.sequence_number]
    place = {} if event is None else _event_fields(event, record)
    return {
        "rank": record.rank,
        "state": state,
        "at": main_thread_at,
        **place,
        "before": [_event_fields(other, record) for other in earlier[-_MAX_PREVIOUS_OPERATIONS:]],
        "counts": {axis: [list(record.ranks_of(axis)), count] for axis, count in record.collective_counts().items()},
    }


def _event_fields(event: CommEvent, record: CommRecord) -> dict[str, Any]:
    return {
        "number": event.sequence_number,
        "op": event.op,
        "axis": event.axis,
        "ranks": list(record.ranks_of(event.axis)),
        "caller": event.caller,
        "bytes": event.bytes,
        "for_s": round(time.monotonic() - event.started_s, 3),
    }


def describe_rank(report: RankReport) -> str:
    """Describes where one rank is."""
    who = f"Rank {report['rank']}"
    if "op" not in report:
        return f"{who} has started no communication yet{_main_thread_location(report)}."
    what = f"{report['op']} over {report['axis']} (ranks {format_ranks(report['ranks'])}), called at {report['caller']}"
    what = f"{what}, operation {report['number']:,}"
    since = _seconds(report["for_s"])
    if report["state"] == "device":
        return f"{who} waited {since} for its device, with nothing started since {what}{_main_thread_location(report)}."
    if report["state"] == "idle":
        return f"{who} has started no communication for {since} since {what}{_main_thread_location(report)}."
    return f"{who} waited {since} in {what}."


def _main_thread_location(report: RankReport) -> str:
    return f"; its main thread is at {report['at']}" if report.get("at") else ""


def last_operations(report: RankReport) -> list[str]:
    """Returns the operations before it, as lines."""
    if not report["before"]:
        return []
    rows = [
        f"  {event['number']:>8,}  {_seconds(event['for_s']):>8} ago  {event['op']} over {event['axis']}, {event['bytes']:,} bytes, "
        f"at {event['caller']}"
        for event in report["before"]
    ]
    return ["The last operations before it:", *rows]


def combine_reports(reports: Sequence[RankReport], *, failed_rank: int | None = None) -> list[str]:
    """Describes where several surviving ranks were, and who did not arrive at what the others waited for.

    `failed_rank` is the rank that is known to have failed first, which is not described.
    """
    others = [report for report in reports if report["rank"] != failed_rank and "op" in report]
    places: dict[tuple[Any, ...], list[RankReport]] = {}
    for report in others:
        state = report["state"] in _STATES_OUTSIDE_CALL and report["state"]
        key = state, report["op"], report["axis"], report["caller"], report.get("at")
        places.setdefault(key, []).append(report)
    lines = [_describe_ranks(same) for same in places.values()]
    more = len(lines) - _MAX_PLACES
    others = [f"Other ranks were at {more} more places."] if more > 0 else []
    return [*missing_ranks(reports), *lines[:_MAX_PLACES], *others]


def _describe_ranks(same: Sequence[RankReport]) -> str:
    first = same[0]
    ranks = sorted(report["rank"] for report in same)
    who = f"{_rank_label(ranks)} {'was' if len(ranks) == 1 else 'were'}"
    numbers = {report["number"] for report in same}
    number = f", operation {first['number']:,}" if len(numbers) == 1 else ""
    groups = {tuple(report["ranks"]) for report in same}
    over = f"{first['axis']} (ranks {format_ranks(first['ranks'])})" if len(groups) == 1 else first["axis"]
    what = f"{first['op']} over {over} at {first['caller']}{number}"
    longest = _seconds(max(report["for_s"] for report in same))
    if first["state"] not in _STATES_OUTSIDE_CALL:
        return f"{who} waiting in {what}, for up to {longest}."
    if first["state"] == "device":
        at = f"; the main thread is at {first['at']}" if first.get("at") else ""
        return f"{who} waiting for the device, for up to {longest}, with nothing started since {what}{at}."
    stack = f", and {'is' if len(ranks) == 1 else 'are'} at {first['at']}" if first.get("at") else ""
    return f"{who} in no communication since {what}{stack}."


def missing_ranks(reports: Sequence[RankReport]) -> list[str]:
    """Returns who has started fewer collectives over an axis than the ranks that wait there; transfers have no such order.

    A rank that waits for its device may wait for any of its axes. Of ranks that all do, none is blamed while another does not: how far
    each had run ahead is no evidence.
    """
    lines: dict[str, None] = {}
    by_rank = {report["rank"]: report for report in reports}
    stuck = {report["rank"] for report in reports if report["state"] == "device"}
    for report in reports:
        for axis, what in _awaited_collectives(report).items():
            ranks = report["counts"][axis][0]
            started = {
                rank: by_rank[rank]["counts"].get(axis, [ranks, 0])[1]
                for rank in ranks
                if rank in by_rank and by_rank[rank]["counts"].get(axis, [ranks, 0])[0] == ranks
            }
            most = max(started.values(), default=0)
            late = [rank for rank, count in started.items() if count < most]
            late = [rank for rank in late if rank not in stuck] or late
            if late:
                there = [rank for rank in started if started[rank] == most]
                fewest = min(started[rank] for rank in late)
                lines[
                    f"{_rank_label(late)} did not arrive at {what} over {axis} (ranks {format_ranks(ranks)}): {fewest:,} collectives "
                    f"started there, {most:,} by {_rank_label(there).lower()}."
                ] = None
    return list(lines)


def _awaited_collectives(report: RankReport) -> dict[str, str]:
    """Maps axes to the collective that a rank may be waiting for."""
    if report["state"] == "device":
        return {axis: "a collective" for axis, (ranks, _) in report["counts"].items() if len(ranks) > 1}
    if report["state"] == "idle" or report.get("axis") not in report["counts"]:
        return {}
    return {report["axis"]: report["op"]}


def _rank_label(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {format_ranks(ranks)}"


def report_request_path(error_file: str | Path) -> Path:
    """Returns the file whose presence requests a report from the rank with this error file."""
    return Path(error_file).parent / REPORT_REQUEST_FILE


def format_ranks(ranks: Iterable[int]) -> str:
    """Formats ranks as ranges.

    >>> format_ranks([0, 1, 2, 4, 6, 7])
    '0-2, 4, 6-7'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"
