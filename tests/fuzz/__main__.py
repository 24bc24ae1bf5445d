"""`python -m tests.fuzz`: many cases in several processes, a table of what came of them, and the failures, kept for the default suite."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

from tests.fuzz.kinds import KINDS, LACKING, PLANTED, make_kind
from tests.fuzz.manager import Results, fuzz
from tests.fuzz.mutate import make_case
from tests.fuzz.worker import Failure, repeat

CORPUS = Path(__file__).parent / "corpus"
SUITE_CASES = 12
"""Cases of every kind in the default suite."""
_KEPT_OF_A_CAUSE = 2


def keep(failures: list[Failure], folder: Path = CORPUS) -> list[Path]:
    """Puts a few of every cause into the corpus."""
    counts: Counter[str] = Counter()
    kept = []
    for failure in failures:
        counts[failure.cause] += 1
        if counts[failure.cause] <= _KEPT_OF_A_CAUSE:
            kind, number = failure.case.split(":")
            path = folder / f"{kind}-{number}.json"
            # A process that crashed could not say what it was doing, but it can be made again.
            path.write_text(failure.kept or make_case(make_kind(kind), int(number)).to_json())
            kept.append(path)
    return kept


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, help="how long; 30 where --cases is not given either")
    add("--cases", type=int, help="how many of every kind, from --first on: the same ones whichever machine runs them")
    add("--jobs", type=int, default=2)
    add("--kind", choices=(*KINDS, *LACKING, PLANTED, "all"), default="all")
    add("--first", type=int, default=0, help="number of the first case, to go on where another run ended")
    add("--case", nargs="+", metavar="KIND:NUMBER", help="repeat these, or files of the corpus, with tracebacks")
    add(
        "--suite",
        action="store_true",
        help=f"{SUITE_CASES} cases of every kind and the corpus, as in the default suite",
    )
    add("--no-keep", action="store_true", help="do not put failures into the corpus")
    options = parser.parse_args(argv)
    if options.case:
        return _repeat([Path(case) if case.endswith(".json") else case for case in options.case], every=True)
    if options.suite:
        return _repeat([*(f"{kind}:{n}" for kind in KINDS for n in range(SUITE_CASES)), *sorted(CORPUS.glob("*.json"))])
    if options.kind in LACKING:
        parser.error(f"{options.kind} needs packages that are not installed: {', '.join(LACKING[options.kind])}")
    names = list(KINDS) if options.kind == "all" else [options.kind]
    cases = math.inf if options.cases is None else options.cases
    minutes = options.minutes or (math.inf if options.cases else 30.0)
    results = fuzz(names, jobs=options.jobs, seconds=60 * minutes, first=options.first, cases=cases)
    print(results.table())
    if options.kind == "all" and LACKING:
        print(
            "left out, for lack of packages: " + "; ".join(f"{kind} ({', '.join(LACKING[kind])})" for kind in LACKING)
        )
    if results.failures:
        _report(results, kept=not options.no_keep)
    return 1 if results.failures else 0


def _report(results: Results, *, kept: bool) -> None:
    print(f"\n{len(results.failures)} failures; repeat one with: python -m tests.fuzz --case KIND:NUMBER")
    print(results.causes())
    if kept:
        print(f"kept in {CORPUS}: {', '.join(path.name for path in keep(results.failures))}")


def _repeat(cases: list[str | Path], *, every: bool = False) -> int:
    """Runs cases in this process. If it does not survive one, that one is the last that was begun."""
    failed = 0
    for case, failure in repeat(cases, lambda case: print(f"begins {case}", flush=True)):
        failed += failure is not None
        if failure is not None:
            print(f"FAILED {case} ({failure.door}): {failure.cause}\n{failure.detail}")
        elif every:
            print(f"{case}: as it should be")
    print(f"{len(cases)} cases, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
