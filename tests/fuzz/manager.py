"""Workers that run cases side by side, and what all of them have found. A worker that crashes or hangs is replaced."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.worker import Failure, Tally, serve
from tests.load_deadline import Deadline

HUNG_S = 90.0
"""A worker that has been at one case for so long is beyond its own alarm (`Kind.wall_s`), and is ended."""
_START_S = 300.0
_SHOWN_OF_A_CAUSE = 2


@dataclass
class Results:
    """What all workers have found."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def add(self, failure: Failure) -> None:
        alike = sum(other.cause == failure.cause for other in self.failures)
        self.failures.append(failure)
        if alike < _SHOWN_OF_A_CAUSE:
            print(f"FAILED {failure.case} ({failure.door}): {failure.cause}", flush=True)

    def table(self) -> str:
        rows = [("kind", "cases", "refused", "opened", "failures", "worst s", "of case", "worst MB")]
        total = Tally()
        for name, tally in self.tallies.items():
            total.add(tally)
            rows.append((name, *_cells(tally)))
        rows.append(("all", *_cells(total)))
        return "\n".join(f"{row[0]:<18}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)

    def causes(self) -> str:
        """Failures grouped by their cause, the most frequent first, with the numbers to repeat them by."""
        counts = Counter(failure.cause for failure in self.failures)
        parts = []
        for cause, count in counts.most_common():
            alike = [failure for failure in self.failures if failure.cause == cause]
            cases = ", ".join(f"{failure.case} ({failure.door})" for failure in alike[:6])
            last = next((line for line in reversed(alike[0].detail.strip().splitlines()) if line.strip()), "")
            parts.append(f"{count:>6}  {cause}\n        {cases}\n        {last[:200]}")
        return "\n".join(parts)


def _cells(tally: Tally) -> tuple[str, ...]:
    counts = (tally.cases, tally.refused, tally.opened, tally.failed)
    return (
        *(f"{count:,}" for count in counts), f"{tally.worst_s:.2f}", str(tally.slowest), f"{tally.worst_bytes / 1e6:.0f}"
    )  # fmt: skip


class Worker:
    """A process and what is known of it."""

    def __init__(self, names: list[str], first: int, stride: int, end: float, hung_s: float) -> None:
        self.names, self.stride, self.end, self.hung_s = names, stride, end, hung_s
        self.nexts = dict.fromkeys(names, first)
        self._context = multiprocessing.get_context("spawn")
        self.done = False
        self._start()

    def _start(self) -> None:
        self.now = self._context.Array("d", [0.0, 0.0, 0.0])
        self.pipe, other = self._context.Pipe()
        arguments = (self.names, self.nexts, self.stride, self.end, self.now, other)
        self.process = self._context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        other.close()
        self.ready, self._start_deadline = False, Deadline(_START_S)
        self._since, self._case_deadline = 0.0, Deadline(self.hung_s)

    def poll(self, results: Results) -> None:
        """Takes reports; ends and replaces a process that is stuck or gone."""
        alive = self.process.is_alive()
        self._hear(results)
        if self.done:
            return
        kind, number, since = self.now[:]
        stuck, late = self._is_stuck(since), not self.ready and self._start_deadline.is_over
        if alive and not stuck and not late:
            return
        self.process.kill()
        self.process.join()
        if not self.ready:
            raise SystemExit(f"a worker could not start (exit code {self.process.exitcode}); its error is above")
        name = self.names[int(kind)]
        why = (
            "no end: the process had to be killed"
            if stuck
            else f"the process ended with {_ending(self.process.exitcode)}"
        )
        results.tallies[name].add(Tally(cases=1, failed=1))
        results.add(Failure(f"{name}:{int(number)}", "?", why, why))
        self.nexts[name] = int(number) + self.stride
        self._start()

    def _is_stuck(self, since: float) -> bool:
        """Whether the case that began then has had its time, in seconds of an idle machine."""
        if since != self._since:
            self._since, self._case_deadline = since, Deadline(self.hung_s)
        return bool(since) and self._case_deadline.is_over

    def stop(self, results: Results) -> None:
        """Lets it end the case it is at."""
        if not self.done:
            self.pipe.send("stop")
        deadline = Deadline(self.hung_s)
        while not self.done and self.process.is_alive() and not deadline.is_over:
            self._hear(results)
            time.sleep(0.05)
        self._hear(results)
        self.process.kill()
        self.process.join()

    def _hear(self, results: Results) -> None:
        try:
            while self.pipe.poll():
                self._take(self.pipe.recv(), results)
        except (EOFError, OSError):  # the process is gone
            pass

    def _take(self, message: object, results: Results) -> None:
        if message == "ready":
            self.ready = True
        elif message == "done":
            self.done = True
        elif isinstance(message, tuple):
            name, tally, failure, self.nexts[name] = message
            results.tallies[name].add(tally)
            if failure is not None:
                results.add(failure)


def fuzz(
    names: list[str], *, jobs: int, seconds: float, first: int = 0, cases: float = math.inf, hung_s: float = HUNG_S, note_s: float = 60.0
) -> Results:  # fmt: skip
    """Runs the cases from number `first` on of some kinds, for so long, or so many of each."""
    results = Results({name: Tally() for name in names})
    workers = [Worker(names, first + job, jobs, first + cases, hung_s) for job in range(jobs)]
    noted, until = time.monotonic(), math.inf
    try:
        while time.monotonic() < until and not all(worker.done for worker in workers):
            for worker in workers:
                worker.poll(results)
            if until == math.inf and all(worker.ready for worker in workers):
                until = time.monotonic() + seconds
            if time.monotonic() > noted + note_s:
                noted = time.monotonic()
                done = sum(tally.cases for tally in results.tallies.values())
                print(f"{done:,} cases, {len(results.failures):,} failures", flush=True)
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    for worker in workers:
        worker.stop(results)
    return results


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
